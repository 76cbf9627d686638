"""What a run's rows come to: grades of passing rows, what came of each definition, and what the run proved."""

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from enum import StrEnum
from typing import Any, TypedDict

from traceproof.reasons import Grade, Skip, Verdict
from traceproof.run.schema import REFERENCE, SHADOW, WHOLE, VerdictRow
from traceproof.stacks import TRUTHS


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


def compared(conclusions: Iterable[str]) -> bool:
    """Whether anything was compared at all."""
    return not COMPARED.isdisjoint(conclusions)


def proved(conclusions: Collection[str]) -> bool:
    """Whether anything was compared, and nothing with what itself says alone."""
    return compared(conclusions) and not {Conclusion.CONSISTENT, Conclusion.UNCONFIRMED} & set(conclusions)


def sentence(summary: Mapping[str, Any]) -> str:
    """`VERIFIED: 48 definitions, 41 right, 6 with known findings, 1 not runnable here`."""
    conclusions = [one["conclusion"] for one in summary["definitions"].values()]
    counts = Counter(conclusions)
    parts = [f"{counts[one]} {words}" for one, words in WORDS.items() if counts[one]]
    definitions = f"{len(conclusions)} definition{'' if len(conclusions) == 1 else 's'}"
    verdict = "VERIFIED" if summary["verified"] else "NOT VERIFIED"
    told = f"{verdict}: {', '.join([definitions, *parts])}"
    if compared(conclusions):
        return told
    skips: Counter[str] = Counter()
    for group in summary["groups"]:
        if group["implementation"] == REFERENCE:
            skips.update(group["skips"])
    why = ", ".join(f"{reason} {count}" for reason, count in skips.items()) or "the selection has no case"
    where = " in its own size" if Conclusion.SCALED_DOWN in conclusions else ""
    return f"{told}; nothing was compared{where}: {why}"


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


# Of a definition's rows, the worst; skip only if nothing passed, scaled_down if that one did.
WORST_FIRST = (Verdict.ERROR, Verdict.FAIL, Skip.NO_ORACLE, Grade.SCALED_DOWN, Verdict.PASS, Verdict.SKIP)


class DefinitionResult(TypedDict):
    """What a definition's rows come to."""

    op_type: str
    verdict: str  # one of WORST_FIRST
    conclusion: str  # a Conclusion
    grade: str | None  # how strong its proof is; None: it has none
    wrong: bool  # whether its reference failed
    truths: list[str]  # ground truths that were compared
    unmet: str  # why it met no ground truth, a key of WHY; empty: it met one
    scaled_down: str  # which axes were smaller in what was judged; empty: it was judged in its own size
    unconfirmed: str  # constants that the reference alone states, where its grade is by them


def concluded(noted: Sequence[tuple[VerdictRow, str | None]]) -> DefinitionResult:
    """What the rows of one definition come to, each with the kind of finding that it is, if it is one."""
    rows = [row for row, _ in noted]
    full = [row for row in rows if not row.scaled_down]  # the others say nothing of it in its own size
    cases, reasons = _compared(full)
    judged = cases.get(REFERENCE, set())
    met = any(judged & cases.get(name, set()) for name in TRUTHS)
    wrong = any(row.implementation == REFERENCE and row.bad for row in rows)
    scaled_down = [row.scaled_down for row in rows if row.grade is Grade.SCALED_DOWN]
    unconfirmed = [row.constants for row in full if row.grade is Grade.CONSISTENT and row.constants]
    shadowed = {row.grade for row in full if row.against == SHADOW and row.grade is not None}
    grade: Grade | None = Grade.PROVED if met else Grade.CHECKED if judged else None
    if wrong:
        grade = None
    elif scaled_down:  # in its own size, none but empty cases and the like were judged
        grade = Grade.SCALED_DOWN
    elif unconfirmed:
        grade = Grade.CONSISTENT
    elif any(row.unjudged for row in full):  # of an output that nobody judged, nothing is proved
        grade = None
    elif shadowed:  # of its rows, the best one counts
        grade = Grade.AGREED if Grade.AGREED in shadowed else Grade.CONSISTENT
    shown = {
        Skip.NO_ORACLE if row.unjudged else row.grade if row.grade is Grade.SCALED_DOWN else row.verdict
        for row in rows
    }
    marks = {_mark(row, finding) for row, finding in noted}
    return DefinitionResult(
        op_type=rows[0].op_type,
        verdict=str(next(one for one in WORST_FIRST if one in shown)),
        conclusion=str(next((one for one in Conclusion if one in marks), Conclusion.NOT_RUN)),
        grade=None if grade is None else str(grade),
        wrong=wrong,
        truths=[name for name in TRUTHS if cases.get(name)],
        unmet="" if met else str(next((one for one in WHY if one in reasons), NO_TRUTH)),
        scaled_down=scaled_down[-1] if scaled_down and grade is not None else "",
        unconfirmed=unconfirmed[-1] if unconfirmed and grade is Grade.CONSISTENT else "",
    )


def _compared(rows: Iterable[VerdictRow]) -> tuple[dict[str, set[str]], set[str]]:
    """By implementation, which cases were compared; and why ground truths were not."""
    cases: dict[str, set[str]] = {}
    reasons: set[str] = set()
    for row in rows:
        if row.tolerance is not None:
            reasons.add(RELAXED)
        elif row.verdict in {Verdict.PASS, Verdict.FAIL} and row.output != WHOLE:  # conduct alone is no comparison
            cases.setdefault(row.implementation, set()).add(str(row.case))
        elif row.implementation == REFERENCE and row.unjudged:
            reasons.add(str(row.reason))
        elif row.case is None:
            reasons.add(UNREADABLE)
        elif row.implementation in TRUTHS or row.verdict == Verdict.ERROR:
            reasons.add(str(row.reason) if row.verdict == Verdict.SKIP else ERROR)
    return cases, reasons


def _mark(row: VerdictRow, finding: str | None) -> Conclusion | None:
    """What a row alone would come to, if it is one that counts."""
    if finding is not None:
        news = Conclusion.UNVERIFIED if row.unjudged else Conclusion.WRONG
        return Conclusion.KNOWN if finding == "known" else news
    if row.implementation != REFERENCE:
        return None
    if row.grade in OF_GRADE:
        return Conclusion.UNCONFIRMED if row.constants else OF_GRADE[row.grade]
    if row.verdict == Verdict.PASS and not row.scaled_down:
        return Conclusion.RIGHT if row.tolerance is None else Conclusion.RELAXED
    return Conclusion.NOT_RUN if row.verdict == Verdict.SKIP else None


def sentences(summary: Mapping[str, Any]) -> Iterator[str]:
    """What a run ends with: on what and against what it proved how much, and what could not be reached."""
    definitions: Mapping[str, DefinitionResult] = summary["definitions"]
    if not definitions:
        return
    total, every = len(definitions), list(definitions.values())
    named = (f"{TRUTHS[name].label} {version or ''}".strip() for name, version in summary["truths"].items())
    truths = ", ".join(named)
    where = f"on SM {summary['capability']} ({summary['device']})" if summary["capability"] else "on the CPU"
    grades = Counter(one["grade"] for one in every if not one["unconfirmed"])
    counts = [f"{grades[Grade.PROVED]} of {total} definitions against a ground truth"]
    words = {
        Grade.CHECKED: "against the float64 oracle alone",
        Grade.AGREED: "agreed without an oracle",
        Grade.CONSISTENT: "consistent with float64 alone",
    }
    counts += [f"{grades[grade]} {told}" for grade, told in words.items() if grades[grade]]
    unconfirmed = {name: one["unconfirmed"] for name, one in definitions.items() if one["unconfirmed"]}
    if unconfirmed:
        counts.append(f"{len(unconfirmed)} but for a constant that the reference alone states")
    scaled_down = {name: one["scaled_down"] for name, one in definitions.items() if one["scaled_down"]}
    if scaled_down:
        counts.append(f"{len(scaled_down)} by scaled-down definitions alone")
    wrong = sum(one["wrong"] for one in every)
    without = [one for one in every if one["grade"] is None and not one["wrong"]]
    relaxed = sum(one["unmet"] == RELAXED for one in without)
    reasons = (
        (wrong, "with findings"),
        (relaxed, "accepted by your tolerance"),
        (len(without) - relaxed, "not run"),
    )
    short = [f"{count} {why}" for count, why in reasons if count]
    rest = f"; not proved: {', '.join(short)}" if short else ""
    yield f"Proved {where}{f' with {truths}' if truths else ''}: {', '.join(counts)}{rest}."
    if any(one["unmet"] for one in every):
        yield f"Without a ground truth here: {'; '.join(_unreached(definitions))}."
    for name, told in scaled_down.items():
        yield f"Scaled down, {name}: {told}."
    for name, told in unconfirmed.items():
        yield f"Not proved: {name}, {told}; its description should state it."


def _unreached(definitions: Mapping[str, DefinitionResult]) -> Iterator[str]:
    """By reason, which op_types, or which definitions where it is not the whole op_type."""
    totals = Counter(one["op_type"] for one in definitions.values())
    by_words: dict[str, dict[str, list[str]]] = {}
    for reason, words in WHY.items():
        for name, one in definitions.items():
            if one["unmet"] == reason:
                by_words.setdefault(words, {}).setdefault(one["op_type"], []).append(name)

    def told(op_type: str, names: list[str]) -> str:
        if len(names) == totals[op_type] > NAMED:
            return f"all {len(names)} of {op_type}"
        return ", ".join(names) if len(names) <= NAMED else f"{len(names)} of {totals[op_type]} of {op_type}"

    for words, members in by_words.items():
        yield f"{', '.join(told(*item) for item in members.items())} ({words})"
