"""TP1xx: files, names and paths."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from traceproof.dataset.definition import Dialect
from traceproof.dataset.files import file_text, strict_json
from traceproof.dataset.tree import Broken
from traceproof.lint.model import Hit, definition_rule, pointer, rule
from traceproof.lint.subject import Dataset, Subject

SHARED = re.compile(r"inputs and outputs share the names (\[.*?\])")
TAKEN = re.compile(r"the name .* is already taken by ")


def _shared_names(dataset: Dataset, broken: Broken) -> list[str]:
    """Names that inputs and outputs of an unusable definition share, as far as it can be read."""
    try:
        value: Any = strict_json(file_text(dataset.tree.root / broken.path, dataset.tree.root))
    except (OSError, ValueError, RecursionError):
        return []
    match value:
        case {"inputs": dict() as inputs, "outputs": dict() as outputs}:
            return sorted(str(name) for name in inputs.keys() & outputs.keys())
    return []


@rule("TP101")
def schema(dataset: Dataset) -> Iterator[Hit]:
    """A definition file that can not be read as one."""
    for broken in dataset.tree.broken:
        rest = SHARED.sub("", broken.what).removeprefix("Value error, ").strip("; ")
        if rest and not TAKEN.match(rest):
            yield Hit("", rest, broken.path)


@rule("TP106")
def dialect(dataset: Dataset) -> Iterator[Hit]:
    """A definition that FlashInfer dumped or that is SOL-ExecBench's, and what was made of it."""
    for entry in dataset.tree.definitions.values():
        if entry.definition.dialect is not Dialect.PUBLISHED:
            yield Hit("", f"read as {entry.definition.dialect}", entry.path)
        for note in entry.notes:
            yield Hit("", note, entry.path)


@rule("TP102")
def duplicate_name(dataset: Dataset) -> Iterator[Hit]:
    """Two definition files that hold the same name."""
    for broken in dataset.tree.broken:
        if TAKEN.match(broken.what):
            yield Hit(pointer("name"), broken.what, broken.path)


@rule("TP103")
def misplaced(dataset: Dataset) -> Iterator[Hit]:
    """A definition that is not at definitions/<op_type>/<name>.json."""
    for note in dataset.tree.notes:
        yield Hit(pointer("name"), note.message, note.path)
    for name, files in dataset.tree.workload_files.items():
        entry = dataset.tree.definitions.get(name)
        if entry is None:  # TP501 says so
            continue
        for file in files:
            expected = Path("workloads", entry.definition.op_type, f"{name}.jsonl")
            if file != expected:
                yield Hit("", f"the definition's name and op_type say {expected}", file)


@rule("TP104")
def shared_name(dataset: Dataset) -> Iterator[Hit]:
    """A name that is both an input and an output."""
    for broken in dataset.tree.broken:
        for name in _shared_names(dataset, broken):
            yield Hit(pointer("outputs", name), f"{name!r} is an input and an output", broken.path)


@definition_rule("TP105")
def number_in_name(subject: Subject) -> Iterator[Hit]:
    """A number in the name that is no const axis and no constant of the reference."""
    constants = (node.value for node in subject.reference.nodes if isinstance(node, ast.Constant))
    held = {value for value in constants if isinstance(value, int)} | set(subject.definition.const_axes.values())
    for word in subject.words:
        match = re.fullmatch(r"([a-z]+)([0-9]{1,18})", word)
        if match is None or match[1] in {"fp", "int", "bf", "mxfp", "nvfp"}:  # fp8 names a format, not a size
            continue
        if int(match[2]) not in held:
            yield Hit(pointer("name"), f"{word!r}: no const axis and no constant is {match[2]}")
