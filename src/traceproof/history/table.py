"""Tables of bugs and of what came of their replays."""

from collections.abc import Sequence

from rich.markup import escape
from rich.table import Table

from traceproof.history.catalogue import Bug
from traceproof.history.outcome import Found, Outcome
from traceproof.history.replay import counts
from traceproof.tables import headed

MESSAGE = 90  # characters of a message shown


def listed(bugs: Sequence[Bug]) -> Table:
    """The catalogue."""
    names = ("bug", "kind", "op_type", "package", "last bad", "first good", "hardware", "cases", "reachable")
    grid = headed("Known bugs of released packages", names)
    for bug in bugs:
        versions = (bug.package, bug.last_bad, bug.first_good)
        reached = "no" if bug.unreachable else "yes"
        grid.add_row(bug.id, bug.kind, bug.op_type, *versions, bug.hardware, bug.cases, reached)
    return grid


def replayed(bugs: Sequence[Bug], outcomes: Sequence[Outcome]) -> Table:
    """What came of each bug."""
    grid = headed(
        "Replays (one row per bug)", ("bug", "kind", "with", "without", "found"), ("flips", "alarms", "s"), "why"
    )
    for bug, outcome in zip(bugs, outcomes, strict=True):
        text = f"{outcome.reason}: {outcome.message}" if outcome.reason else outcome.message
        figures = (str(len(outcome.flips)), str(len(outcome.alarms)), f"{outcome.seconds:.0f}")
        shown = escape(" ".join(text.split())[:MESSAGE])
        grid.add_row(bug.id, bug.kind, outcome.bad or "", outcome.good or "", outcome.found, *figures, shown)
    return grid


def summed(outcomes: Sequence[Outcome]) -> str:
    """The counts in a sentence."""
    found = counts(outcomes)
    caught, missed = found[Found.CAUGHT], found[Found.MISSED]
    alarms = sum(outcome.unexplained for outcome in outcomes)
    share = f" ({100 * caught / (caught + missed):.0f} % of those run)" if caught + missed else ""
    return (
        f"{caught} caught{share}, {missed} missed, {found[Found.NOT_HERE]} not reproducible here; "
        f"releases without the bug that fail for no known reason: {alarms}"
    )
