"""Which definitions are verified: verdict rows summed up per implementation, definition and model.

Only here is `status:verified` decided: a definition is verified if its reference and at least one ground truth
passed everything that was compared with the oracle, for the definition's present digest. Without an oracle, two
ground truths are needed.
"""

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from traceproof.dataset.definition import Definition
from traceproof.ops.cases import is_hidden
from traceproof.reasons import Verdict
from traceproof.run.schema import ORACLE, PAIR, REFERENCE, SHADOW, WHOLE, GateResult, RowDigests, VerdictRow
from traceproof.stacks import TRUTHS
from traceproof.text import markdown

STATUS = "status:"
NEEDED = 2  # ground truths that are needed if the reference's float64 shadow replaces an oracle


def or_narrower(results: Path) -> str:
    """End of the advice to run everything: the narrower runs in a results folder; empty if there are none."""
    names = ", ".join(f"selections/{path.name}" for path in sorted(results.glob("selections/*")))
    return f", or name a narrower run by --selection: {names}" if names else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ImplementationVerdict:
    """All rows of one implementation on one definition, summed up."""

    implementation: str  # `reference`, or a ground truth
    digest: str | None  # of the definition that was run
    status: str  # `passed` (something was compared, nothing failed), `failed` or `not run`
    reason: str  # why it is not `passed`; empty if it is
    cases: tuple[str, ...]  # ids of cases with an output that was compared and passed
    compared: int  # number of outputs that passed
    skipped: Mapping[str, int]  # number of skipped rows, by reason
    # by output: kinds of gate, and the largest share of a limit that was used
    gates: Mapping[str, Mapping[str, Any]]
    # versions, device, seed: what it ran with
    versions: Mapping[str, str]
    device: str | None
    seed: int | None
    # ORACLE, or SHADOW: the reference's own float64, where there is no oracle
    against: str = ORACLE
    infinite: tuple[str, ...] = ()  # those of its cases whose right outputs hold NaN or infinities

    @property
    def passed(self) -> bool:
        """Whether it passed, so counts as evidence."""
        return self.status == "passed"


Verdicts = Mapping[str, ImplementationVerdict]  # of one definition, by implementation


@dataclass(frozen=True, slots=True)
class Verification:
    """Whether a definition is verified, by which ground truths, or why not."""

    truths: tuple[str, ...]  # ground truths that passed, in order of priority
    reason: str  # one line; empty if verified

    @property
    def verified(self) -> bool:
        """Whether `status:verified` is earned."""
        return not self.reason

    def tags(self, definition: Definition) -> tuple[str, ...]:
        """The definition's tags with its status, at the place of the old one, else first."""
        tags = list(definition.tags)
        places = [index for index, tag in enumerate(tags) if tag.startswith(STATUS)]
        rest = [tag for tag in tags if not tag.startswith(STATUS)]
        rest.insert(places[0] if places else 0, f"{STATUS}{'verified' if self.verified else 'unverified'}")
        return tuple(rest)


def implementation_verdicts(rows: Iterable[VerdictRow]) -> dict[str, dict[str, ImplementationVerdict]]:
    """Verdict rows summed up by definition and implementation, without pairs of ground truths."""
    groups: dict[str, dict[str, list[VerdictRow]]] = {}
    for row in rows:
        if PAIR not in row.implementation:
            groups.setdefault(row.definition, {}).setdefault(row.implementation, []).append(row)
    return {name: {who: _verdict(group) for who, group in parts.items()} for name, parts in groups.items()}


def _verdict(rows: Sequence[VerdictRow]) -> ImplementationVerdict:
    """One implementation's rows on one definition, summed up."""
    # Hidden cases differ between runs, and a scaled-down definition says nothing of the definition itself.
    fixed = [row for row in rows if not is_hidden(row.case) and not row.scaled_down]
    compared = [row for row in fixed if row.verdict == Verdict.PASS and row.output != WHOLE]
    skipped = Counter(str(row.reason) for row in rows if row.verdict == Verdict.SKIP)
    known = next((row for row in fixed if row.digests != RowDigests()), rows[0])
    if bad := [row for row in rows if row.bad]:
        more = f" and {len(bad) - 1} more" if len(bad) > 1 else ""
        where = f"case {bad[0].case}, {bad[0].output}" if bad[0].case else "the file"
        status, reason = "failed", f"{bad[0].verdict} {bad[0].reason} in {where}{more}"
    else:
        reason = _why_unproven(rows, compared, skipped)
        status = "not run" if reason else "passed"
    infinite = (row.case for row in compared if row.metrics.get("finite") != row.metrics.get("elements"))
    return ImplementationVerdict(
        implementation=rows[0].implementation,
        digest=known.digests.definition,
        status=status,
        reason=reason,
        cases=tuple(dict.fromkeys(str(row.case) for row in compared)),
        compared=len(compared),
        skipped=dict(sorted(skipped.items())),
        gates=_gates(compared),
        versions=known.versions or {},
        device=known.device,
        seed=known.seed,
        against=next((row.against for row in compared if row.against is not None), ORACLE),
        infinite=tuple(dict.fromkeys(map(str, infinite))),
    )


def _why_unproven(rows: Sequence[VerdictRow], compared: Sequence[VerdictRow], skipped: Mapping[str, int]) -> str:
    """Why rows without a failure prove nothing of the definition; empty: they do."""
    if not compared and any(row.scaled_down for row in rows):
        return "too large, judged by a scaled-down definition alone"
    if any(row.tolerance is not None for row in rows):
        return "judged by a tolerance of the user's own, which proves nothing"
    if not compared:
        why = ", ".join(f"{reason} {count}" for reason, count in skipped.items()) or "no numerics"
        return f"nothing was compared ({why})"
    unjudged = sorted({row.output for row in rows if row.unjudged})
    return f"nobody judged {', '.join(unjudged)}" if unjudged else ""


def _gates(compared: Iterable[VerdictRow]) -> dict[str, dict[str, Any]]:
    """Per output, the kinds of its gates and the largest share of a limit that was used."""
    gates: dict[str, list[GateResult | None]] = {}
    for row in compared:
        gates.setdefault(row.output, []).append(row.gate)
    return {
        output: {
            "kinds": sorted({gate.kind for gate in of_output if gate and gate.kind}),
            "margin": max((gate.margin for gate in of_output if gate and gate.margin is not None), default=None),
        }
        for output, of_output in gates.items()
    }


def verification(definition: Definition, verdicts: Verdicts) -> Verification:
    """Whether a definition, in its present text, is verified by its implementations' verdicts."""
    reference = verdicts.get(REFERENCE)
    ran = [verdicts[name] for name in TRUTHS if name in verdicts]
    truths: tuple[str, ...] = ()
    reason = ""
    if reference is None:
        reason = "it was not run"
    elif reference.digest != definition.digest:
        reason = "it changed since it was verified; verify it again"
    elif not reference.passed:
        reason = f"its reference: {reference.reason}"
    elif reference.against != SHADOW and definition.constants.alone:
        reason = f"{'; '.join(definition.constants.alone)}; its description should state it"
    else:
        agreeing = [verdict for verdict in ran if verdict.passed and verdict.digest == reference.digest]
        shared = [verdict for verdict in agreeing if not set(verdict.cases).isdisjoint(reference.cases)]
        truths = tuple(verdict.implementation for verdict in shared)
        if not truths:
            reasons = (f"{one.implementation}: {one.reason or 'other cases, or another state'}" for one in ran)
            reason = f"no ground truth was compared ({'; '.join(reasons) or 'none ran'})"
        elif reference.against == SHADOW and len(truths) < NEEDED:
            reason = f"no oracle, and {len(truths)} of the {NEEDED} ground truths needed then"
    return Verification(() if reason else truths, reason)


class ModelRow(NamedTuple):
    """A definition of a model, and its status."""

    model: str
    definition: str
    op_type: str
    # tp, ep: parallelism in its tags; None: none
    tp: int | None
    ep: int | None
    by: tuple[str, ...]  # ground truths that its reference agrees with; empty unless verified
    reason: str  # why it is not verified; empty if it is


def model_rows(definition: Definition, result: Verification) -> list[ModelRow]:
    """A row per `model:` tag of a definition."""

    def number(kind: str) -> int | None:
        values = tag_values(definition.tags, kind)
        return int(values[0]) if len(values) == 1 and re.fullmatch("[0-9]{1,9}", values[0]) else None

    name, op_type, tp, ep = definition.name, definition.op_type, number("tp"), number("ep")
    models = tag_values(definition.tags, "model")
    return [ModelRow(model, name, op_type, tp, ep, by=result.truths, reason=result.reason) for model in models]


def tag_values(tags: Iterable[str], kind: str) -> list[str]:
    """Values of the tags of one kind, such as `model`."""
    return [tag.partition(":")[2] for tag in tags if tag.startswith(f"{kind}:")]


def model_table(rows: Iterable[ModelRow]) -> list[str]:
    """A Markdown table of the rows."""
    lines = ["| model | definition | op_type | tp | ep | status |", "|---|---|---|---|---|---|"]
    for row in rows:
        numbers = " | ".join("" if value is None else str(value) for value in (row.tp, row.ep))
        status = f"unverified: {markdown(row.reason)}" if row.reason else f"verified by {', '.join(row.by)}"
        lines.append(f"| {markdown(row.model)} | `{row.definition}` | {row.op_type} | {numbers} | {status} |")
    return lines
