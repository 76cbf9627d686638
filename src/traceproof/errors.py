"""The one exception that a user is meant to read."""

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
