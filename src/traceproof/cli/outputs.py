"""Files and folders that a command is to write: found out before the work, not after it."""

import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from traceproof.errors import TraceproofError

FILES = frozenset({"--json", "--sarif", "--markdown", "--models-ts"})
FOLDERS = frozenset({"--output-dir", "--report-dir", "--out", "--target-dir"})
STDOUT = "-"


def check(arguments: Sequence[str]) -> None:
    """Fail where an output that arguments name can not be written. Raises TraceproofError: the first such one."""
    for option, value in _given(arguments):
        path = Path(value).expanduser()
        try:
            if option in FILES and value != STDOUT:
                _try_file(path)
            elif option in FOLDERS:
                _try_folder(path)
        except OSError as error:
            what = f"{option} {value} cannot be written: {error.strerror or error}"
            kind = "file in a folder" if option in FILES else "folder"
            raise TraceproofError(what, todo=f"Give a {kind} that exists and may be written to.") from error


def _given(arguments: Sequence[str]) -> Iterator[tuple[str, str]]:
    for place, argument in enumerate(arguments):
        option, equals, value = argument.partition("=")
        if argument == "--":
            return
        if equals:
            yield option, value
        elif place + 1 < len(arguments):
            yield option, arguments[place + 1]


def _try_file(path: Path) -> None:
    there = path.exists()
    with path.open("ab"):
        pass
    if not there:
        path.unlink()


def _try_folder(path: Path) -> None:
    existing = next(parent for parent in (path.absolute(), *path.absolute().parents) if parent.exists())
    with tempfile.TemporaryFile(dir=existing):
        pass
