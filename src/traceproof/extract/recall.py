"""Extraction against what a dataset already says of the same models: found, different, missing."""

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from traceproof.dataset.definition import Definition
from traceproof.extract.compare import meaning_differences, notes


def recall_table(extracted: Sequence[Definition], dataset: Path, models: Iterable[str]) -> str:
    """Markdown: is every definition of `dataset` that has a `model:` tag out of `models` extracted alike?"""
    wanted = {f"model:{model}" for model in models}
    ours = {definition.name: definition for definition in extracted}
    counted: Counter[tuple[str, str]] = Counter()
    lines: list[str] = []
    for path in sorted((dataset / "definitions").glob("*/*.json")):
        raw = json.loads(path.read_text(encoding="utf-8"))
        if not wanted & set(raw.get("tags") or ()):
            continue
        status, remarks = _status(raw, ours.get(path.stem))
        counted[path.parent.name, status] += 1
        if remarks:
            lines.append(f"| {path.stem} | {status} | {'; '.join(remarks)} |")
    return _render(counted, lines)


def _status(raw: Mapping[str, Any], mine: Definition | None) -> tuple[str, list[str]]:
    if mine is None:
        return "missing", ["no model of the catalogue, at its usual parallelism, makes this call"]
    other = Definition.model_validate(raw)
    differences = meaning_differences(mine, other)
    remarks = [f"extraction and dataset: {text}" for text in differences] + notes(mine, other)
    return ("different" if differences else "same"), remarks


def _render(counted: Mapping[tuple[str, str], int], lines: Sequence[str]) -> str:
    op_types = sorted({op_type for op_type, _ in counted})
    table = ["| op_type | in the dataset | same | different | missing |", "|---|---|---|---|---|"]
    totals = Counter[str]()
    for op_type in op_types:
        row = {status: counted.get((op_type, status), 0) for status in ("same", "different", "missing")}
        totals.update(row)
        table.append(
            f"| {op_type} | {sum(row.values())} | {row['same']} | {row['different']} | {row['missing']} |"
        )
    whole = sum(totals.values())
    table.append(f"| all | {whole} | {totals['same']} | {totals['different']} | {totals['missing']} |")
    share = f"Recall: {totals['same']} of {whole}." if whole else "The dataset has no definition of these models."
    remarks = ["| definition | | what differs |", "|---|---|---|", *lines] if lines else ["No differences."]
    return "\n".join([*table, "", share, "", *remarks]) + "\n"
