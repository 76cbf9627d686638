"""The dataset card: what the hub's viewer needs to show a dataset that has no card of its own.

Definitions are one JSON object per file over many lines, which the viewer can not read, so a table is beside it.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from fnmatch import fnmatch
from itertools import combinations
from pathlib import Path

from traceproof.dataset.tree import Tree
from traceproof.publish.bundle import Bundle, Kind, Piece
from traceproof.publish.ledger import Ledger, tagged

TABLE = f"{Kind.VIEWER}/definitions.jsonl"
FILES = {"definitions": TABLE, "workloads": "workloads/*/*.jsonl", "traces": "traces/**/*.jsonl"}
# Columns of the datasets library, by name. What has other keys from row to row is JSON to it.
STRING, STRINGS, JSON = "dtype: string", "list: string", "dtype: json"
LINES = {"definition": STRING, "workload": JSON, "solution": STRING, "evaluation": JSON}
DEFINITION = {"name": STRING, "op_type": STRING, "description": STRING, "tags": STRINGS, "verified_by": STRINGS}
DEFINITION |= {"axes": JSON, "constraints": STRINGS, "inputs": JSON, "outputs": JSON, "reference": STRING}
COLUMNS: Mapping[str, Mapping[str, str]] = {"definitions": DEFINITION, "workloads": LINES, "traces": LINES}
TEXT = """
# Definitions of LLM kernels

Each definition states a kernel's axes, inputs and outputs, and a reference in PyTorch, in the schema of FlashInfer
Trace. The table of definitions holds those whose reference agrees with a float64 oracle that was written
independently of it, and with the kernels in `verified_by`; `status:` tags say the same. `workloads` are sizes and
inputs to measure them with, `traces` measurements.
"""


def card(shown: Iterable[str]) -> bytes:
    """A card whose viewer shows these of `definitions`, `workloads` and `traces`."""
    lines = ["---", "configs:"]
    for name in shown:
        lines += [f"- config_name: {name}", f"  data_files: {FILES[name]}"]
    lines += ["dataset_info:"]
    for name in shown:
        lines += [f"- config_name: {name}", "  features:"]
        lines += [f"  - name: {column}\n    {kind}" for column, kind in COLUMNS[name].items()]
    return "\n".join([*lines, "---", TEXT]).encode()


def ours(data: bytes) -> bool:
    """Whether a card is one that was written here, and nobody has edited since."""
    first, *others = FILES
    return any(
        data == card((first, *chosen))
        for count in range(len(others) + 1)
        for chosen in combinations(others, count)
    )


def bundle(tree: Tree, ledger: Ledger, published: Path) -> Bundle:
    """The card of a published dataset, and its table of the definitions that are verified."""
    shown = ["definitions", *(name for name in ("workloads", "traces") if any(published.glob(FILES[name])))]
    rows = "".join(json.dumps(row) + "\n" for row in _rows(tree, ledger))
    return Bundle(
        slug="card",
        title="docs: add a dataset card",
        definitions={},
        standings={},
        pieces=(Piece(Kind.CARD.value, card(shown)), Piece(TABLE, rows.encode())),
        notes=(),
    )


def _rows(tree: Tree, ledger: Ledger) -> Iterator[Mapping[str, object]]:
    for name in sorted(tree.definitions):
        definition = tree.definitions[name].definition
        standing = ledger.standing(definition)
        if standing.verified:
            value = definition.as_json() | {"tags": list(tagged(definition, standing))}
            found = value | {"verified_by": list(standing.truths)}
            yield {column: found.get(column) for column in COLUMNS["definitions"]}


def problems(path: str, data: bytes, present: Iterable[str]) -> Iterator[str]:
    """Why a card, or its table, does not fit a dataset with these files."""
    if path == Kind.CARD:
        for name, pattern in FILES.items():
            if f"- config_name: {name}\n".encode() in data and not any(
                fnmatch(other, pattern) for other in present
            ):
                yield f"shows {pattern}, which the dataset lacks"
    elif path != TABLE:
        yield f"is no part of a card: that is {Kind.CARD} and {TABLE}"
    else:
        there = frozenset(present)
        for line in data.splitlines():
            row = json.loads(line)
            if f"definitions/{row['op_type']}/{row['name']}.json" not in there:
                yield f"has a row for {row['name']}, which the dataset lacks"
