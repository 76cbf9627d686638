"""Putting references to their laws, and a table of what came of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from laws.trial import cases_of, subjects_of, try_law
from traceproof.dataset.definition import Definition
from traceproof.ops import registry
from traceproof.ops.laws import laws_of
from traceproof.run.source import CallError, loaded
from traceproof.sandbox import Limits, Pool

BROKEN = "broken"


@dataclass(frozen=True, slots=True)
class Finding:
    """What became of one law with one definition.

    Attributes:
        definition: its name.
        op_type: its op_type.
        law: the law's name.
        cases: how many cases it was tried on; 0: it says nothing about any of them.
        agreement: `bitwise`, `within rounding`, or `broken`; empty without cases.
        evidence: case, output and numbers, where it is broken.
        failing: cases that the reference does not run on at all.
    """

    definition: str
    op_type: str
    law: str
    cases: int
    agreement: str
    evidence: str
    failing: tuple[str, ...] = ()

    @property
    def broken(self) -> bool:
        """Whether the reference breaks the law."""
        return self.agreement == BROKEN

    def as_json(self) -> dict[str, Any]:
        """The finding as a JSON object."""
        return asdict(self)


def memory(definition: Definition, *, seed: int) -> int:
    """Bytes that the largest case in use needs, by the op's estimate."""
    op = registry.get(definition.op_type).of_form(definition)
    return max((op.memory(definition, case) for case in cases_of(definition, seed)), default=0)


def try_laws(definition: Definition, pool: Pool, *, limits: Limits, seed: int) -> Iterator[Finding]:
    """Every law of a definition. A refusal, a crash, a hang or an out-of-memory breaks the law at hand.

    `pool` has workers for strangers' code, see `traceproof.run.source.strangers`.
    """
    subjects, need = subjects_of(definition, seed), memory(definition, seed=seed)
    for law in laws_of(definition):
        try:
            with loaded(definition, pool, limits=limits, need=need) as source:
                found = try_law(law, subjects, source)
        except CallError as error:
            text = f"{error.outcome.status}: {error.outcome.message[-300:]}"
            found = {"cases": 1, "agreement": BROKEN, "evidence": text, "failing": []}
        yield Finding(
            definition.name,
            definition.op_type,
            law.name,
            found["cases"],
            found["agreement"],
            found["evidence"],
            tuple(found["failing"]),
        )


def tables(findings: Sequence[dict[str, Any]]) -> str:
    """A line an op_type and law, then every law that is broken, with its evidence."""
    lines = ["### Laws that need no ground truth", ""]
    lines += [
        "| op_type | law | definitions | bitwise | within rounding | broken |",
        "|---|---|---:|---:|---:|---:|",
    ]
    groups: dict[tuple[str, str], list[str]] = {}
    for row in findings:
        if row["cases"]:
            groups.setdefault((row["op_type"], row["law"]), []).append(row["agreement"])
    for (op_type, law), agreements in groups.items():
        counts = [agreements.count(kind) for kind in ("bitwise", "within rounding", BROKEN)]
        lines.append(f"| {op_type} | {law} | {len(agreements)} | {' | '.join(map(str, counts))} |")
    broken = [row for row in findings if row["agreement"] == BROKEN]
    lines += ["", f"Broken: {len(broken)} of {sum(map(len, groups.values()))}."]
    if broken:
        lines += ["", "| definition | law | evidence |", "|---|---|---|"]
    for row in broken:
        evidence = row["evidence"].replace("|", "\\|").replace("\n", " ")
        lines.append(f"| {row['definition']} | {row['law']} | {evidence} |")
    return "\n".join(lines) + "\n"
