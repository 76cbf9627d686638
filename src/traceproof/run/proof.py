"""What a run's rows come to: grades of passing rows, what came of each definition, and what the run proved."""

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from enum import StrEnum
from typing import Any

from pydantic import BaseModel, ConfigDict

from traceproof.reasons import Grade, Skip, Verdict
from traceproof.run.schema import REFERENCE, SHADOW, WHOLE, VerdictRow
from traceproof.stacks import STACK_OF, TRUTHS, distribution


def graded(rows: Iterable[VerdictRow]) -> list[VerdictRow]:
    """The rows of one definition; those of the reference that passed by their numbers get their grade.

    A user's tolerance proves nothing, so what it let pass has none.
    """
    found = list(rows)
    passed = [row for row in found if row.verdict is Verdict.PASS]
    kernels = {(row.case, row.output) for row in passed if row.implementation in TRUTHS}

    def of(row: VerdictRow) -> Grade | None:
        ours = row.implementation == REFERENCE and row.verdict is Verdict.PASS
        if not ours or row.output == WHOLE or row.tolerance is not None:
            return None
        kernel = (row.case, row.output) in kernels
        if row.scaled_down:
            return Grade.SCALED_DOWN
        if row.against == SHADOW:
            return Grade.AGREED if kernel else Grade.CONSISTENT
        if row.constants:
            return Grade.CONSISTENT
        return Grade.PROVED if kernel else Grade.CHECKED

    return [row if (grade := of(row)) is None else row.changed(grade=grade) for row in found]


class Conclusion(StrEnum):
    """What came of a definition; of several that fit, the first one in this order counts."""

    WRONG = "wrong"
    UNVERIFIED = "unverified"
    KNOWN = "known"
    RELAXED = "relaxed"
    AGREED = "agreed"
    CONSISTENT = "consistent"
    UNCONFIRMED = "unconfirmed"
    SCALED_DOWN = "scaled_down"
    RIGHT = "right"
    NOT_RUN = "not_run"


# How many of each there are, in the order in which it is told.
WORDS: Mapping[Conclusion, str] = {
    Conclusion.RIGHT: "right",
    Conclusion.AGREED: "agreed by a ground truth and their own float64, no oracle",
    Conclusion.RELAXED: "accepted by your tolerance, not proved",
    Conclusion.KNOWN: "with known findings",
    Conclusion.WRONG: "with new findings",
    Conclusion.CONSISTENT: "not verified: consistent with their own float64 alone",
    Conclusion.UNCONFIRMED: "not verified: right but for a constant that the reference alone states",
    Conclusion.UNVERIFIED: "not verified: no oracle",
    Conclusion.SCALED_DOWN: "too large here, judged by a scaled-down definition alone",
    Conclusion.NOT_RUN: "not runnable here",
}
COMPARED = frozenset(Conclusion) - {Conclusion.UNVERIFIED, Conclusion.SCALED_DOWN, Conclusion.NOT_RUN}
OF_GRADE = {
    Grade.AGREED: Conclusion.AGREED,
    Grade.CONSISTENT: Conclusion.CONSISTENT,
    Grade.SCALED_DOWN: Conclusion.SCALED_DOWN,
}


class Conclusions:
    """Notes rows one by one what comes of their definitions."""

    def __init__(self) -> None:
        self._marks: dict[str, set[Conclusion]] = defaultdict(set)

    def note(self, row: VerdictRow, finding: str | None) -> None:
        """Note a row and the kind of finding that it is: `new`, `known`, `unexpected`, or None."""
        marks = self._marks[row.definition]
        if finding is not None:
            news = Conclusion.UNVERIFIED if row.unjudged else Conclusion.WRONG
            marks.add(Conclusion.KNOWN if finding == "known" else news)
        elif row.implementation != REFERENCE:
            return
        elif row.grade in OF_GRADE:
            marks.add(Conclusion.UNCONFIRMED if row.constants else OF_GRADE[row.grade])
        elif row.verdict == Verdict.PASS and not row.scaled_down:
            marks.add(Conclusion.RIGHT if row.tolerance is None else Conclusion.RELAXED)
        elif row.verdict == Verdict.SKIP:
            marks.add(Conclusion.NOT_RUN)

    def by_definition(self) -> dict[str, str]:
        """What came of each definition."""
        return {
            name: str(next((one for one in Conclusion if one in marks), Conclusion.NOT_RUN))
            for name, marks in sorted(self._marks.items())
        }


def compared(conclusions: Iterable[str]) -> bool:
    """Whether anything was compared at all."""
    return not COMPARED.isdisjoint(conclusions)


def proved(conclusions: Collection[str]) -> bool:
    """Whether anything was compared, and nothing with what itself says alone."""
    return compared(conclusions) and not {Conclusion.CONSISTENT, Conclusion.UNCONFIRMED} & set(conclusions)


def sentence(summary: Mapping[str, Any]) -> str:
    """`VERIFIED: 48 definitions, 41 right, 6 with known findings, 1 not runnable here`."""
    conclusions: Mapping[str, str] = summary["conclusions"]
    counts = Counter(conclusions.values())
    parts = [f"{counts[one]} {words}" for one, words in WORDS.items() if counts[one]]
    definitions = f"{len(conclusions)} definition{'' if len(conclusions) == 1 else 's'}"
    verdict = "VERIFIED" if summary["verified"] else "NOT VERIFIED"
    return f"{verdict}: {', '.join([definitions, *parts])}{_idle(summary)}"


def _idle(summary: Mapping[str, Any]) -> str:
    """Why nothing was compared, where nothing was."""
    if compared(summary["conclusions"].values()):
        return ""
    skips: Counter[str] = Counter()
    for group in summary["groups"]:
        if group["implementation"] == REFERENCE:
            skips.update(group["skips"])
    why = ", ".join(f"{reason} {count}" for reason, count in skips.items()) or "the selection has no case"
    where = " in its own size" if Conclusion.SCALED_DOWN in summary["conclusions"].values() else ""
    return f"; nothing was compared{where}: {why}"


NO_TRUTH, ERROR, UNREADABLE, RELAXED = "no_truth", "error", "unreadable", "relaxed"
# Why a definition met no ground truth, in words; of several reasons the first one in this order is told.
WHY: Mapping[str, str] = {
    RELAXED: "judged by a tolerance of your own, which proves nothing",
    UNREADABLE: "the definition cannot be read",
    ERROR: "ended in an error",
    Skip.DOES_NOT_FIT: "larger than limits.memory_gb",
    Skip.BLOB_MISSING: "files of its workloads are missing",
    Skip.NEEDS_SM: "needs a GPU of another compute capability",
    Skip.NO_CUDA: "needs a GPU",
    Skip.API_ABSENT: "the installed version lacks the function",
    Skip.PACKAGE_ABSENT: "the package is not installed",
    Skip.DTYPE_UNSUPPORTED: "its dtype is not supported",
    Skip.NO_REFERENCE: "it has no reference",
    Skip.NO_INPUTS: "no inputs can be made for it",
    Skip.NO_ORACLE: "no oracle is known for it",
    Skip.UNJUDGED: "nobody judged one of its outputs",
    Skip.NO_ADAPTER: "no ground truth is known for it",
    NO_TRUTH: "no ground truth is known for it",
}
NAMED = 2  # definitions of an op_type that are named one by one; more are counted


class Unmet(BaseModel):
    """A definition that met no ground truth."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    definition: str
    op_type: str
    reason: str  # a key of WHY
    judged: bool  # whether the oracle judged its reference


class Proof(BaseModel):
    """What one run proved."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    # device, capability: the GPU and its compute capability; None without one
    device: str | None
    capability: str | None
    truths: dict[str, str | None]  # versions of the ground truths that were compared, by implementation
    op_types: dict[str, int]  # definitions by op_type
    proved: int  # how many were proved against a ground truth
    alone: int  # how many were proved against the oracle alone
    grades: dict[str, Grade] = {}  # how strong the proof of each definition is, that has one
    # which axes were smaller in what was judged, of those that are too large themselves
    scaled_down: dict[str, str] = {}
    unconfirmed: dict[str, str] = {}  # constants that the reference alone states, of those graded by them
    wrong: list[str]  # those whose reference has a finding
    unmet: list[Unmet]  # those that met no ground truth


class Collector:
    """Notes of verdict rows what a proof is made of."""

    def __init__(self) -> None:
        self._op_types: dict[str, str] = {}
        self._cases: dict[tuple[str, str], set[str]] = defaultdict(set)  # of what was compared
        self._reasons: dict[str, set[str]] = defaultdict(set)
        self._wrong: set[str] = set()
        self._open: set[str] = set()  # an output of which nobody judged
        self._shadowed: dict[str, set[Grade]] = defaultdict(set)
        self._scaled_down: dict[str, str] = {}
        self._unconfirmed: dict[str, str] = {}

    def note(self, row: VerdictRow) -> None:
        """Note a row."""
        name = row.definition
        self._op_types[name] = row.op_type
        if row.implementation == REFERENCE and row.bad:
            self._wrong.add(name)
        if row.scaled_down:
            if row.grade is Grade.SCALED_DOWN:
                self._scaled_down[name] = row.scaled_down
            return  # it says nothing of the definition in its own size
        if row.unjudged:
            self._open.add(name)
        if row.grade is Grade.CONSISTENT and row.constants:
            self._unconfirmed[name] = row.constants
        if row.grade is not None and row.against == SHADOW:
            self._shadowed[name].add(row.grade)
        self._compare(row)

    def _compare(self, row: VerdictRow) -> None:
        """Note that an implementation's output was compared, or why it was not."""
        name, implementation, verdict = row.definition, row.implementation, row.verdict
        if row.tolerance is not None:
            self._reasons[name].add(RELAXED)
        elif verdict in {Verdict.PASS, Verdict.FAIL} and row.output != WHOLE:  # conduct alone is no comparison
            self._cases[name, implementation].add(str(row.case))
        elif implementation == REFERENCE and row.unjudged:
            self._reasons[name].add(str(row.reason))
        elif row.case is None:
            self._reasons[name].add(UNREADABLE)
        elif implementation in TRUTHS or verdict == Verdict.ERROR:
            self._reasons[name].add(str(row.reason) if verdict == Verdict.SKIP else ERROR)

    def proof(self, stacks: Iterable[Mapping[str, Any]]) -> Proof:
        """What the rows show; `stacks` are the records of the stacks that they come from."""
        records = {str(record["stack"]): record for record in stacks}
        gpu = next((one for one in records.values() if one.get("device_type") == "cuda"), {})
        compared = {implementation for (_, implementation), cases in self._cases.items() if cases}
        unmet = [one for one in map(self._unmet, sorted(self._op_types)) if one is not None]
        grades = dict(self._grades({one.definition: one for one in unmet}))
        counts = Counter(grades.values())
        return Proof(
            device=gpu.get("device"),
            capability=gpu.get("capability"),
            truths={
                implementation: _version(implementation, records)
                for implementation in TRUTHS
                if implementation in compared
            },
            op_types=dict(sorted(Counter(self._op_types.values()).items())),
            proved=counts[Grade.PROVED],
            alone=counts[Grade.CHECKED],
            grades=grades,
            scaled_down={name: told for name, told in sorted(self._scaled_down.items()) if name in grades},
            unconfirmed={
                name: told
                for name, told in sorted(self._unconfirmed.items())
                if grades.get(name) is Grade.CONSISTENT
            },
            wrong=sorted(self._wrong),
            unmet=unmet,
        )

    def _grades(self, unmet: Mapping[str, Unmet]) -> Iterator[tuple[str, Grade]]:
        """The grade of each definition that has one."""
        for name in sorted(self._op_types.keys() - self._wrong):
            if name in self._scaled_down:  # in its own size, none but empty cases and the like were judged
                yield name, Grade.SCALED_DOWN
            elif name in self._unconfirmed:
                yield name, Grade.CONSISTENT
            elif name in self._shadowed:
                if name not in self._open:
                    found = self._shadowed[name]  # of its rows; the best one counts
                    yield name, Grade.AGREED if Grade.AGREED in found else Grade.CONSISTENT
            elif name in self._open:
                continue  # of an output that nobody judged, nothing is proved
            elif name not in unmet:
                yield name, Grade.PROVED
            elif unmet[name].judged:
                yield name, Grade.CHECKED

    def _unmet(self, name: str) -> Unmet | None:
        judged = self._cases.get((name, REFERENCE), set())
        if any(judged & self._cases.get((name, implementation), set()) for implementation in TRUTHS):
            return None
        reasons = self._reasons.get(name, set())
        reason = next((one for one in WHY if one in reasons), NO_TRUTH)
        return Unmet(definition=name, op_type=self._op_types[name], reason=reason, judged=bool(judged))


def joined(proofs: Sequence[Proof]) -> Proof:
    """What the proofs of several verdict files show together, which have no definition in common."""
    grades = dict(sorted(item for proof in proofs for item in proof.grades.items()))
    op_types: Counter[str] = Counter()
    for one in proofs:
        op_types.update(one.op_types)
    return Proof(
        device=proofs[0].device,  # they state the same stacks
        capability=proofs[0].capability,
        truths={name: one.truths[name] for name in TRUTHS for one in proofs if name in one.truths},
        op_types=dict(sorted(op_types.items())),
        proved=sum(proof.proved for proof in proofs),
        alone=sum(proof.alone for proof in proofs),
        grades=grades,
        scaled_down=dict(sorted(item for proof in proofs for item in proof.scaled_down.items())),
        unconfirmed=dict(sorted(item for proof in proofs for item in proof.unconfirmed.items())),
        wrong=sorted(name for proof in proofs for name in proof.wrong),
        unmet=sorted((one for proof in proofs for one in proof.unmet), key=lambda one: one.definition),
    )


def _version(implementation: str, records: Mapping[str, Mapping[str, Any]]) -> str | None:
    stack = STACK_OF[implementation]
    version = records.get(stack, {}).get("versions", {}).get(distribution(stack))
    return None if version is None else str(version)


def sentences(proof: Proof) -> Iterator[str]:
    """What a run ends with: on what and against what it proved how much, and what could not be reached."""
    total = sum(proof.op_types.values())
    if not total:
        return
    named = (
        f"{TRUTHS[implementation].label} {version or ''}".strip()
        for implementation, version in proof.truths.items()
    )
    truths = ", ".join(named)
    where = "on the CPU" if proof.capability is None else f"on SM {proof.capability} ({proof.device})"
    counts = [f"{proof.proved} of {total} definitions against a ground truth"]
    if proof.alone:
        counts.append(f"{proof.alone} against the float64 oracle alone")
    graded = Counter(grade for name, grade in proof.grades.items() if name not in proof.unconfirmed)
    words = {Grade.AGREED: "agreed without an oracle", Grade.CONSISTENT: "consistent with float64 alone"}
    counts += [f"{graded[grade]} {told}" for grade, told in words.items() if graded[grade]]
    if proof.unconfirmed:
        counts.append(f"{len(proof.unconfirmed)} but for a constant that the reference alone states")
    if proof.scaled_down:
        counts.append(f"{len(proof.scaled_down)} by scaled-down definitions alone")
    relaxed = sum(
        one.reason == RELAXED and one.definition not in {*proof.grades, *proof.wrong} for one in proof.unmet
    )
    idle = total - len(proof.grades) - len(proof.wrong) - relaxed
    reasons = ((len(proof.wrong), "with findings"), (relaxed, "accepted by your tolerance"), (idle, "not run"))
    short = [f"{count} {why}" for count, why in reasons if count]
    rest = f"; not proved: {', '.join(short)}" if short else ""
    yield f"Proved {where}{f' with {truths}' if truths else ''}: {', '.join(counts)}{rest}."
    if proof.unmet:
        yield f"Without a ground truth here: {'; '.join(_unreached(proof))}."
    for name, told in proof.scaled_down.items():
        yield f"Scaled down, {name}: {told}."
    for name, told in proof.unconfirmed.items():
        yield f"Not proved: {name}, {told}; its description should state it."


def _unreached(proof: Proof) -> Iterator[str]:
    """By reason, which op_types, or which definitions where it is not the whole op_type."""
    by_words: dict[str, dict[str, list[str]]] = {}
    for one in sorted(proof.unmet, key=lambda one: list(WHY).index(one.reason)):
        by_words.setdefault(WHY[one.reason], {}).setdefault(one.op_type, []).append(one.definition)
    for words, members in by_words.items():
        yield f"{', '.join(_named(proof, *item) for item in members.items())} ({words})"


def _named(proof: Proof, op_type: str, names: list[str]) -> str:
    total = proof.op_types[op_type]
    if len(names) == total > NAMED:
        return f"all {total} of {op_type}"
    return ", ".join(names) if len(names) <= NAMED else f"{len(names)} of {total} of {op_type}"
