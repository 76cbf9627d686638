"""What a bundle comes to on top of a dataset's present state, and how that differs from what is there.

DeepDiff does not serve: the order of a definition's axes, inputs and outputs counts, and it ignores that of keys.
"""

import difflib
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from traceproof.dataset.definition import Definition
from traceproof.dataset.tree import strict_json
from traceproof.publish.bundle import Base, Bundle, Kind, Piece, our_card
from traceproof.testgen.generate import whose

SHOWN = 40  # lines of a text's difference
ORDERED = frozenset({"axes", "inputs", "outputs"})  # of a definition, where it is the order of arguments
LONG = 60  # characters of a value shown


@dataclass
class Change:
    """A bundle on top of a base."""

    files: dict[str, bytes] = field(default_factory=dict)  # what is added or replaced, whole files by path
    # paths that the base holds already, byte for byte (a definition: value for value)
    same: list[str] = field(default_factory=list)
    differs: list[str] = field(default_factory=list)  # what it changes of what the base holds, a line each
    # files of the base that are left as they are though the bundle has others
    kept: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)  # why it can not go on top


def resolve(bundle: Bundle, base: Base, *, allow_changes: bool) -> Change:
    """What a bundle comes to on top of a base. Problems are collected, not raised."""
    change = Change()
    present = base.paths()
    own_card = our_card(base.read(Kind.CARD) or b"")
    for piece in bundle.pieces:
        old = base.read(piece.path) if piece.path in present else None
        if piece.kind in {Kind.CARD, Kind.VIEWER}:  # somebody else's card stays, whatever is allowed
            _resolve(piece, old, change, allow_changes=own_card)
        else:
            _resolve(piece, old, change, allow_changes=allow_changes)
    change.problems += _taken(bundle, present)
    return change


def _resolve(piece: Piece, old: bytes | None, change: Change, *, allow_changes: bool) -> None:
    lines = piece.kind in {Kind.WORKLOADS, Kind.TRACES}
    new = joined(old or b"", piece.data) if lines else piece.data
    if old is None:
        change.files[piece.path] = new
    elif new == old or (piece.kind is Kind.DEFINITION and _same_definition(old, new)):
        change.same.append(piece.path)
    elif lines:
        change.files[piece.path] = new
        change.differs.append(f"{piece.path}: {_count(new) - _count(old)} lines more, the others as they were")
    elif piece.kind is Kind.TEST and whose(old.decode(errors="replace")) == "ours":
        change.files[piece.path] = new
        change.differs.append(f"{piece.path}: generated again")
    elif piece.kind is Kind.TEST and not allow_changes:
        change.kept.append(piece.path)
    else:
        _replace(piece.path, old, new, change, allowed=allow_changes)


def _replace(path: str, old: bytes, new: bytes, change: Change, *, allowed: bool) -> None:
    change.files[path] = new
    found = [f"{path}: {line}" for line in differences(old, new)]
    change.differs += found
    change.problems += [] if allowed else [f"{path} exists and would change", *found]


def _taken(bundle: Bundle, present: frozenset[str]) -> Iterator[str]:
    """Names that the base gives to something else: flashinfer-bench refuses a dataset that has one twice."""
    for piece in bundle.pieces:
        if piece.kind in {Kind.SOLUTION, Kind.DEFINITION}:
            leaf = piece.path.rpartition("/")[2]
            others = [
                path for path in present if path.startswith(f"{piece.kind}/") and path.rpartition("/")[2] == leaf
            ]
            yield from (f"{piece.path}: its name is taken by {path}" for path in others if path != piece.path)


def joined(old: bytes, new: bytes) -> bytes:
    """Lines of a base with new ones behind them; a line that says the same thing is there once."""
    end = b"" if not old or old.endswith(b"\n") else b"\n"
    known = {_identity(line) for line in old.splitlines() if line.strip()}
    fresh = [line for line in new.splitlines() if line.strip() and _identity(line) not in known]
    return old + end + b"".join(line + b"\n" for line in fresh) if fresh else old


def _identity(line: bytes) -> tuple[str, str] | str:
    """Workload and solution of a line; a line that is no such thing is only itself."""
    try:
        value = json.loads(line)
        return str(value["workload"]["uuid"]), str(value.get("solution"))
    except (ValueError, KeyError, TypeError, RecursionError):
        return line.decode(errors="replace")


def _count(data: bytes) -> int:
    return sum(1 for line in data.splitlines() if line.strip())


def _same_definition(one: bytes, other: bytes) -> bool:
    """Whether two files say the same of a definition: the order of axes, inputs and outputs counts, no other."""
    try:
        said = [
            json.dumps(Definition.model_validate(strict_json(text.decode())).as_json()) for text in (one, other)
        ]
    except (ValueError, RecursionError):
        return False
    return said[0] == said[1]


def differences(old: bytes, new: bytes) -> list[str]:
    """A line a difference: JSON by key (texts in it by line), anything else by line."""
    try:
        return list(_json("", json.loads(old), json.loads(new))) or ["only its formatting"]
    except (ValueError, RecursionError):  # no JSON, or lists in lists in lists
        return list(_text("", old.decode(errors="replace"), new.decode(errors="replace")))


def _json(where: str, old: Any, new: Any) -> Iterator[str]:  # noqa: ANN401 - any JSON value
    match old, new:
        case dict(), dict():
            yield from _object(where, old, new)
        case list(), list():
            yield from _array(where, old, new)
        case str(), str() if "\n" in old + new:
            yield from _text(f"{where} ", old, new)
        case _ if old != new or type(old) is not type(new):
            yield f"{where}: {_short(old)} -> {_short(new)}"


def _object(where: str, old: dict[str, Any], new: dict[str, Any]) -> Iterator[str]:
    for key in dict.fromkeys([*old, *new]):
        place = f"{where}.{key}" if where else key
        if key not in new:
            yield f"{place} is gone (was {_short(old[key])})"
        elif key not in old:
            yield f"{place} is new: {_short(new[key])}"
        else:
            yield from _json(place, old[key], new[key])
    if where in ORDERED and [key for key in old if key in new] != [key for key in new if key in old]:
        yield f"{where}: the order changes to {', '.join(new)}"


def _array(where: str, old: list[Any], new: list[Any]) -> Iterator[str]:
    gone = [item for item in old if item not in new]
    came = [item for item in new if item not in old]
    yield from (f"{where} loses {_short(item)}" for item in gone)
    yield from (f"{where} gains {_short(item)}" for item in came)
    if not gone and not came and old != new:
        yield f"{where}: another order"


def _text(where: str, old: str, new: str) -> Iterator[str]:
    found = [
        line
        for line in difflib.unified_diff(old.splitlines(), new.splitlines(), lineterm="", n=0)
        if not line.startswith(("---", "+++", "@@"))
    ]
    yield from (f"{where}{line}" for line in found[:SHOWN])
    if len(found) > SHOWN:
        yield f"{where}... and {len(found) - SHOWN} lines more"


def _short(value: Any) -> str:  # noqa: ANN401 - any JSON value
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= LONG else f"{text[: LONG - 3]}..."
