"""What changes between two states of a file, said in terms of what it means.

DeepDiff does not serve: the order of a definition's axes, inputs and outputs counts, and it ignores that of keys.
"""

import difflib
import json
from collections.abc import Iterator
from typing import Any

SHOWN = 40  # lines of a text's difference
ORDERED = frozenset({"axes", "inputs", "outputs"})  # of a definition, where it is the order of arguments
LONG = 60  # characters of a value shown


def differences(old: bytes, new: bytes) -> list[str]:
    """A line a difference: JSON by key (texts in it by line), anything else by line."""
    try:
        one, other = json.loads(old), json.loads(new)
    except ValueError:
        return list(_text("", old.decode(errors="replace"), new.decode(errors="replace")))
    return list(_json("", one, other)) or ["only its formatting"]


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
