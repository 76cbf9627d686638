"""Tables of error rates and of mutants, out of the JSON that the measurements leave."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from calibration.measure import OURS, RIVALS

GATES = (OURS, *RIVALS)
Rates = Mapping[str, Any]


def rates_tables(rates: Sequence[Rates]) -> str:
    """A summary by op_type, then each answer that some gate got wrong."""
    lines = [
        *_summary(rates, "wrong", "Wrong answers refused"),
        "",
        *_summary(rates, "right", "Right answers accepted"),
    ]
    lines += ["", "### Answer by answer", "", *_answers(rates)]
    return "\n".join(lines) + "\n"


def _summary(rates: Sequence[Rates], kind: str, title: str) -> Iterator[str]:
    yield f"### {title}"
    yield ""
    yield "| op_type | answers | runs | " + " | ".join(GATES) + " |"
    yield "|---|---:|---:|" + "---:|" * len(GATES)
    for entry in rates:
        tallies = [tally for tally in entry[kind].values() if tally["runs"]]
        runs = sum(tally["runs"] for tally in tallies)
        cells = []
        for gate in GATES:
            able = any(gate in tally["refused"] for tally in tallies)
            refused = sum(tally["refused"].get(gate, 0) for tally in tallies)
            cells.append(_percent(refused if kind == "wrong" else runs - refused, runs if able else 0))
        yield f"| {entry['op_type']} | {len(tallies)} | {runs} | " + " | ".join(cells) + " |"


def _percent(part: int, whole: int) -> str:
    if not whole:
        return "-"
    return "100 %" if part == whole else f"{min(99.9, 100 * part / whole):.1f} %"


def _answers(rates: Sequence[Rates]) -> Iterator[str]:
    yield "Refusals, of the runs in which the answer differed from a right one. Where all gates are right, no row."
    yield ""
    yield "| op_type | answer | is | runs | " + " | ".join(GATES) + " |"
    yield "|---|---|---|---:|" + "---:|" * len(GATES)
    for entry in rates:
        for kind in ("wrong", "right"):
            for name, tally in entry[kind].items():
                runs = tally["runs"]
                wanted = runs if kind == "wrong" else 0
                counts = tally["refused"]
                if runs and any(count != wanted for count in counts.values()):
                    cells = " | ".join(str(counts.get(gate, "-")) for gate in GATES)
                    yield f"| {entry['op_type']} | {name} | {kind} | {runs} | {cells} |"
    idle = [f"{entry['op_type']}: {', '.join(names)}" for entry in rates if (names := _idle(entry))]
    if idle:
        yield ""
        yield "Answers that the definitions measured leave no room for, or that change no bit there:"
        yield ""
        yield from (f"- {line}" for line in idle)


def _idle(entry: Rates) -> list[str]:
    return [name for kind in ("wrong", "right") for name, tally in entry[kind].items() if not tally["runs"]]


def mutation_tables(scores: Sequence[Mapping[str, Any]]) -> str:
    """Kill rate by op_type, the survivors, and the changes that no case reaches."""
    lines = ["### Mutants of references", ""]
    lines += ["| op_type | references | mutants | equivalent | unreached | killed | survived | rate |"]
    lines += ["|---|---:|---:|---:|---:|---:|---:|---:|"]
    for op_type in sorted({score["op_type"] for score in scores}):
        group = [score["counts"] for score in scores if score["op_type"] == op_type]
        killed, survived, equivalent, unreached = (
            sum(counts.get(fate, 0) for counts in group)
            for fate in ("killed", "survived", "equivalent", "unreached")
        )
        total = killed + survived + equivalent + unreached
        rate = _percent(killed, killed + survived)
        cells = (op_type, len(group), total, equivalent, unreached, killed, survived, rate)
        lines.append(f"| {' | '.join(map(str, cells))} |")
    lines += ["", "Survivors, by what was changed:", "", *_changes(scores, "survived")]
    lines += ["", "Changes in code that no case reaches:", "", *_changes(scores, "unreached")]
    return "\n".join(lines) + "\n"


def _changes(scores: Sequence[Mapping[str, Any]], fate: str) -> Iterator[str]:
    found: dict[tuple[str, str, str], set[str]] = {}
    for score in scores:
        for row in score["kept"]:
            if row["fate"] == fate:
                key = (score["op_type"], f"{row['operator']}: {row['what']}", row["by"])
                found.setdefault(key, set()).add(score["definition"])
    if not found:
        yield "None."
        return
    yield "| op_type | change | definitions | first differs on |"
    yield "|---|---|---:|---|"
    for (op_type, what, by), names in sorted(found.items()):
        text = what.replace("|", "\\|").replace("\n", " ")
        yield f"| {op_type} | {text} | {len(names)} | {by or '-'} |"
