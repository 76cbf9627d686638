"""The one exception that a user is meant to read, and how others become it."""

from collections.abc import Sequence

from traceproof.text import printable, redacted


class TraceproofError(Exception):
    """Bad use or bad input: says what, where, and what to do. Commands exit with 2 on it.

    `what` is one sentence; `problems` are listed below it, one line each; `todo` is what the user can do next.
    """

    def __init__(self, what: str, *, problems: Sequence[str] = (), todo: str = "") -> None:
        self.what = what
        self.problems = tuple(problems)
        self.todo = todo
        super().__init__(str(self))

    def __str__(self) -> str:
        lines = [self.what + (":" if self.problems else "")]
        lines += [f"  - {problem}" for problem in self.problems]
        if self.todo:
            lines.append(self.todo)
        return "\n".join(printable(redacted(line)) for line in lines)


def readable(error: Exception) -> TraceproofError | None:
    """An error as users read it: itself, or that of a path that can not be used. None: it is a fault of ours."""
    if isinstance(error, TraceproofError):
        return error
    if not isinstance(error, OSError) or error.filename is None:
        return None
    where = " and ".join(str(name) for name in (error.filename, error.filename2) if name is not None)
    reason = (error.strerror or "it can not be used").lower()
    todo = "Give a path that exists, is of the right kind, and that this user may read and write."
    return TraceproofError(f"{where}: {reason}", todo=todo)
