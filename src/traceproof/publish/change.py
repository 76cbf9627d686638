"""What a bundle comes to on top of a dataset's present state."""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field

from traceproof.dataset.definition import Definition
from traceproof.dataset.tree import strict_json
from traceproof.publish import card
from traceproof.publish.bundle import Base, Bundle, Kind, Piece
from traceproof.publish.difference import differences
from traceproof.publish.references import joined_tests


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
    own_card = card.ours(base.read(Kind.CARD) or b"")
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
    elif piece.kind is Kind.TEST and (both := joined_tests(piece.path, old, new)) is not None:
        change.files |= {piece.path: both} if both != old else {}
        (change.same if both == old else change.differs).append(piece.path)
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
    except (ValueError, KeyError, TypeError):
        return line.decode(errors="replace")


def _count(data: bytes) -> int:
    return sum(1 for line in data.splitlines() if line.strip())


def _same_definition(one: bytes, other: bytes) -> bool:
    """Whether two files say the same of a definition: the order of axes, inputs and outputs counts, no other."""
    try:
        said = [
            json.dumps(Definition.model_validate(strict_json(text.decode())).as_json()) for text in (one, other)
        ]
    except ValueError:
        return False
    return said[0] == said[1]
