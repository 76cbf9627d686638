"""Files of a dataset: text and JSON of bounded size, out of its folder alone."""

import gc
import json
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from traceproof.reading import MIB, NotPlainError, read_resolved

DEFINITION_BYTES = 4 * MIB
PROBLEMS_SHOWN = 6  # of one file; the first few name the cause, the rest mostly follow from it


def strict_json(text: str) -> Any:  # noqa: ANN401 - any JSON value
    """Parse JSON; an object that has a key twice is an error, since one of the two would be lost.

    Raises:
        ValueError: the text is not JSON, or repeats a key.
        RecursionError: it is nested too deeply.
    """
    return json.loads(text, object_pairs_hook=_object)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        repeated = sorted({key for key in keys if keys.count(key) > 1})
        raise ValueError(f"an object has the keys {repeated} more than once")
    return found


def json_text(value: Any) -> str:  # noqa: ANN401 - any JSON value
    """A definition or a solution as the dataset writes it: two spaces, a line break at the end."""
    return json.dumps(value, indent=2, ensure_ascii=False) + "\n"


def file_text(path: Path, root: Path | None, *, most: int = DEFINITION_BYTES) -> str:
    """The text of a file of a dataset.

    Raises:
        OSError: it can not be read.
        ValueError: it is no plain file of at most `most` bytes in the dataset, or not UTF-8.
    """
    return file_bytes(path, root, most=most).decode()


def file_bytes(path: Path, root: Path | None, *, most: int) -> bytes:
    """The content of a file of a dataset; raises as `file_text` does."""
    try:
        target = path.resolve()
        if root is not None and not target.is_relative_to(root) and not inside(target, root.resolve()):
            raise NotPlainError("is a link that leads out of the dataset")
    except RuntimeError:  # of Path.resolve, before Python 3.13
        raise NotPlainError("is a link that leads in a circle") from None
    return read_resolved(target, most=most)


def inside(target: Path, root: Path) -> bool:
    """Whether a resolved path lies in a dataset, or in the blobs that a hub's cache keeps beside its snapshots."""
    blobs = root.parent.parent / "blobs" if root.parent.name == "snapshots" else root
    return target.is_relative_to(root) or target.is_relative_to(blobs)


@contextmanager
def deep_recursion(frames: int) -> Iterator[None]:
    """Let walks over syntax trees go as deep as this meanwhile: Python's own limit is 1,000 frames."""
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(max(before, frames))
    try:
        yield
    finally:
        sys.setrecursionlimit(before)


@contextmanager
def paused_collection(*, kept: bool = False) -> Iterator[None]:
    """Pause the cyclic collector: walking syntax trees takes it half of the reading time.

    What is `kept` is left out of later collections, too, which would walk all of it.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            if kept:
                gc.freeze()
            gc.enable()


def explain(error: BaseException) -> str:
    """What is wrong with a file that could not be read as what it should be."""
    if isinstance(error, ValidationError):
        found = [_explain_one(dict(detail)) for detail in error.errors(include_url=False, include_context=False)]
        rest = len(found) - PROBLEMS_SHOWN
        return "; ".join(found[:PROBLEMS_SHOWN]) + (f"; and {rest} more" if rest > 0 else "")
    if isinstance(error, json.JSONDecodeError):
        return f"not JSON: {error.msg} at line {error.lineno} column {error.colno}"
    if isinstance(error, (RecursionError, MemoryError)):
        return "nested too deeply to be parsed"
    return str(error)


def _explain_one(detail: Mapping[str, Any]) -> str:
    where = ".".join(str(part) for part in detail["loc"])
    text = str(detail["msg"]).removeprefix("Value error, ")
    given = repr(detail["input"])
    if detail["type"] not in {"missing", "value_error"} and len(given) <= 60:  # longer ones bury the message
        text += f", not {given}"
    return f"{where}: {text}" if where else text
