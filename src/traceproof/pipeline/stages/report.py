"""Report: all verdicts of a run in one summary, and the table that ends a run."""

import io
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from operator import itemgetter
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from traceproof.actors.registry import ACTORS, PAIR
from traceproof.digests import digest_bytes, digest_json
from traceproof.pipeline.known import Known, read_known
from traceproof.pipeline.records import REFERENCE
from traceproof.pipeline.rows import VerdictRow, each_row
from traceproof.pipeline.stages import proof
from traceproof.pipeline.stages.outcomes import Outcomes, proved, sentence
from traceproof.pipeline.stages.standing import INODES, KEY, inodes, standing
from traceproof.reasons import Grade, Skip, Verdict
from traceproof.store import SUMMARIES, Store, write_sealed
from traceproof.tables import headed
from traceproof.text import printable

WIDTH = 118
SHOWN = 20  # findings listed under the table; summary.json has all
NO_ORACLE = str(Skip.NO_ORACLE)  # of a definition: nobody judged its numerics, which is no pass
KINDS = ("new", "known", "unexpected")  # of findings
FINDING_KEYS = ("definition", "op_type", "case", "actor", "output", "verdict", "reason", "message", "repeat")


def report(  # noqa: PLR0913 - a rule's inputs and outputs
    verdicts: Sequence[Path],
    summary: Path,
    *,
    known: Path | None,
    stacks: Sequence[Mapping[str, Any]] = (),
    store: Path | None = None,
    code: str = "",
) -> dict[str, Any]:
    """Write summary.json out of the op_types' verdict files and the stacks' records, and give it back.

    The `store` has the summary of an op_type whose verdicts the same `code` summarised before. Raises
    TraceproofError: known.yaml can not be used, or the disk is full.
    """
    run = verdicts[0].parent.parent if verdicts else summary.parent
    op_types = {path.stem for path in verdicts}
    found = inodes(run, op_types)
    stood = standing(run, op_types)
    listed = read_known(known)
    basis = [code, list(stacks), None if known is None else digest_bytes(known.read_bytes())]
    kept = Store(store, SUMMARIES) if store is not None and code else None
    parts = []
    for path in verdicts:
        stated = stood.get(f"verdicts/{path.name}")
        part = kept.record(digest_json([*basis, stated])) if kept and stated else None
        if part is None:
            part = summarise(each_row(path), listed, stacks)
            if kept and stated:
                kept.finish(digest_json([*basis, stated]), part)
        parts.append(part)
    rows = chain.from_iterable(map(each_row, verdicts))
    value = joined(parts) if _apart(parts) else summarise(rows, listed, stacks)
    write_sealed(summary, value | {KEY: stood, INODES: found})
    return value


def _apart(parts: Sequence[Mapping[str, Any]]) -> bool:
    """Whether summaries have no definition in common: a file that can not be read may be called as another one."""
    names = [name for part in parts for name in part["definitions"]]
    return bool(parts) and len(set(names)) == len(names)


def joined(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The summary of several op_types, out of the summary of each."""
    groups = sorted((group for part in parts for group in part["groups"]), key=itemgetter("op_type", "actor"))
    findings = {kind: [found for part in parts for found in part["findings"][kind]] for kind in KINDS}
    reached = proof.joined([proof.Proof.model_validate(part["proof"]) for part in parts])
    outcomes, definitions = (
        dict(sorted(item for part in parts for item in part[key].items())) for key in ("outcomes", "definitions")
    )
    return _summary(outcomes, definitions, groups, findings, reached)


def _summary(
    outcomes: Mapping[str, str],
    definitions: Mapping[str, str],
    groups: Sequence[Mapping[str, Any]],
    findings: Mapping[str, Sequence[Mapping[str, Any]]],
    reached: proof.Proof,
) -> dict[str, Any]:
    return {
        "verified": proved(outcomes.values()) and not findings["new"] and not findings["unexpected"],
        "outcomes": outcomes,
        "definitions": definitions,
        "groups": groups,
        "findings": findings,
        "proof": reached.model_dump(mode="json"),
    }


def summarise(
    rows: Iterable[VerdictRow], known: Known, stacks: Sequence[Mapping[str, Any]] = ()
) -> dict[str, Any]:
    """Counts by op_type and actor; findings that are new; known ones; known ones that came out otherwise.

    Raises TraceproofError: known.yaml limits versions of a package that an actor's stack does not hold.
    """
    versions = {str(record["stack"]): record["versions"] for record in stacks}
    collector, outcomes = proof.Collector(), Outcomes()
    groups: dict[tuple[str, str], _Group] = {}
    definitions: dict[str, Counter[str]] = {}
    findings: dict[str, list[dict[str, Any]]] = {kind: [] for kind in KINDS}
    for row in collector.watch(rows):
        shown = NO_ORACLE if row.unjudged else Grade.TWIN if row.grade is Grade.TWIN else str(row.verdict)
        definitions.setdefault(row.definition, Counter())[shown] += 1
        kind = _kind(row, known, versions)
        outcomes.note(row, kind)
        groups.setdefault((row.op_type, row.actor), _Group()).note(row, kind)
        if kind is not None:
            findings[kind].append({key: getattr(row, key) for key in FINDING_KEYS})
    overall = {name: _overall(counts) for name, counts in sorted(definitions.items())}
    told = [group.as_json(*names) for names, group in sorted(groups.items(), key=lambda item: item[0])]
    return _summary(outcomes.by_definition(), overall, told, findings, collector.proof(stacks))


@dataclass(frozen=True, slots=True)
class _Group:
    """What the rows of an actor over an op_type come to."""

    counts: Counter[str] = field(default_factory=Counter)  # of verdicts, kinds of findings, and what nobody judged
    skips: Counter[str] = field(default_factory=Counter)  # by reason
    members: dict[str, set[str]] = field(default_factory=dict)  # cases of each definition

    def note(self, row: VerdictRow, kind: str | None) -> None:
        """Count a row, which is a finding of a kind, or none."""
        self.counts[str(row.verdict)] += 1
        self.counts[NO_ORACLE] += row.unjudged
        self.counts[str(kind)] += 1
        self.members.setdefault(row.definition, set()).add(str(row.case))
        if row.verdict == Verdict.SKIP:
            self.skips[str(row.reason)] += 1

    def as_json(self, op_type: str, actor: str) -> dict[str, Any]:
        """The group's row of the summary."""
        return {
            "op_type": op_type,
            "actor": actor,
            "definitions": len(self.members),
            "members": sorted(self.members) if actor == REFERENCE else [],
            "cases": sum(map(len, self.members.values())),
            **{name: self.counts[name] for name in (*Verdict, "known", NO_ORACLE)},
            "skips": dict(sorted(self.skips.items())),
        }


def _kind(row: VerdictRow, known: Known, stacks: Mapping[str, Mapping[str, str]]) -> str | None:
    """`new` finding, `known` one, `unexpected` outcome where another was known, or None: all is well."""
    if row.tolerance is not None:  # by the user's tolerance: the list speaks of the calibrated gates
        return "new" if row.bad else None
    if row.verdict == Verdict.SKIP and not row.unjudged:
        # A machine without the GPU that showed it says nothing against it.
        return None
    versions = _versions(row, stacks)
    entry = known.entry(row, versions)
    # Who lists a definition as one without an oracle need not say whether its float64 shadow was computed.
    alone = row.changed(verdict=Verdict.SKIP, reason=Skip.NO_ORACLE) if row.grade is Grade.CONSISTENT else row
    if entry is not None and entry.expects(alone):
        return "known"
    if entry is not None and entry.stands(versions):
        return "unexpected"
    return "new" if row.bad or row.unjudged else None


def _versions(row: VerdictRow, stacks: Mapping[str, Mapping[str, str]]) -> dict[str, str]:
    """Package versions that a row's actors ran with: those of this run, since a row may be an earlier one's."""
    found = dict(row.versions or {})
    for actor in row.actor.split(PAIR):
        found |= stacks.get(ACTORS[actor].stack, {})
    return found


def _overall(counts: Mapping[str, int]) -> str:
    """A definition's verdict: the worst of its rows; skip only if nothing passed, twin if a smaller one did."""
    order = (Verdict.ERROR, Verdict.FAIL, NO_ORACLE, Grade.TWIN, Verdict.PASS, Verdict.SKIP)
    return str(next(verdict for verdict in order if counts.get(verdict)))


def failed(summary: Mapping[str, Any]) -> bool:
    """Whether a run must end with exit code 1: news, an outcome other than the known one, or nothing compared."""
    return not summary["verified"]


def table(summary: Mapping[str, Any]) -> str:
    """The table and the findings, as text for a terminal or a log."""
    out = io.StringIO()
    console = Console(file=out, width=WIDTH)
    nobody = ["no oracle"] if any(group[NO_ORACLE] for group in summary["groups"]) else []
    columns = ("definitions", "cases", "pass", "fail", "error", "known", *nobody, "skip")
    grid = headed("Verdicts (one row per case output)", ("op_type", "actor"), columns, "skipped because")
    for group in summary["groups"]:
        if _idle(group):
            continue
        why = ", ".join(f"{reason} {count}" for reason, count in group["skips"].items())
        shown = group | {"no oracle": group[NO_ORACLE], "skip": group["skip"] - group[NO_ORACLE]}
        grid.add_row(group["op_type"], group["actor"], *(str(shown[key]) for key in columns), why)
    console.print(grid)
    reached = proof.Proof.model_validate(summary["proof"])
    if not {Grade.PROVED, Grade.CHECKED}.issuperset(reached.grades.values()):
        console.print(_grades(summary, reached))
    ending = proof.sentences(reached)
    for text in (*_closing(summary), *ending):
        safe = "\n".join(map(printable, text.split("\n")))  # the lines are ours, what stands in them is anybody's
        console.print(safe, markup=False, highlight=False, soft_wrap=True)
    return out.getvalue()


def _grades(summary: Mapping[str, Any], reached: proof.Proof) -> Table:
    """How many definitions of each op_type have which grade of proof, where some have one that says less."""
    op_types = {name: group["op_type"] for group in summary["groups"] for name in group["members"]}
    grid = headed("Grades of proof, definitions", ["op_type"], (*Grade, "findings", "not verified"))
    for op_type in sorted(reached.op_types):
        own = [name for name, of in op_types.items() if of == op_type]
        counts = Counter(reached.grades[name] for name in own if name in reached.grades)
        wrong = sum(name in reached.wrong for name in own)
        rest = reached.op_types[op_type] - sum(counts.values()) - wrong
        grid.add_row(op_type, *(str(counts[grade]) for grade in Grade), str(wrong), str(rest))
    return grid


def _idle(group: Mapping[str, Any]) -> bool:
    """Whether an actor has nothing to do with an op_type: it says nothing that a reader needs a line for."""
    return set(group["skips"]) == {str(Skip.NO_ADAPTER)} and group[Verdict.SKIP] == sum(group[v] for v in Verdict)


def _closing(summary: Mapping[str, Any]) -> Iterator[str]:
    findings = summary["findings"]
    for kind, heading in (("new", "new"), ("unexpected", "not as known.yaml says")):
        if not findings[kind]:
            continue
        yield f"\n{len(findings[kind])} {heading}:"
        for found in findings[kind][:SHOWN]:
            yield f"  {printable(found['definition'])}, case {found['case']}, {found['actor']}"
            message = _first(found["message"])
            yield f"    {found['output']}  {found['verdict'].upper()}  {found['reason']}: {message}"
            if found["repeat"]:
                yield f"    repeat  {found['repeat']}"
        if len(findings[kind]) > SHOWN:
            yield f"  ... and {len(findings[kind]) - SHOWN} more in summary.json"
    yield f"\n{sentence(summary)}"


def absent(family: str, families: Mapping[str, Sequence[str]], planned: Sequence[str]) -> str:
    """Why nothing of a family was compared, and which families would be, by the op_types that are `planned`."""
    there = [name for name, op_types in families.items() if set(op_types) & set(planned)]
    return (
        f"Nothing was compared: the selected definitions of the dataset have no op_type of family {family} "
        f"({', '.join(families[family])}).\nThey have {', '.join(planned) or 'none at all'}"
        f"{'; families: ' + ', '.join(there) if there else ''}. Change `dataset` or `selection` in config.yaml."
    )


def _first(message: str) -> str:
    """The last line of a message (an exception's own), cut to a readable length."""
    line = message.strip().splitlines()[-1] if message.strip() else ""
    return line if len(line) <= 200 else line[:197] + "..."
