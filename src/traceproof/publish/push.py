"""What every way of pushing has in common: the plan of one attempt, and when to try again."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from tenacity import RetryCallState, Retrying, retry_if_exception_type

from traceproof.errors import TraceproofError
from traceproof.publish.bundle import Base, Bundle
from traceproof.publish.change import Change, resolve
from traceproof.publish.check import problems

Result = TypeVar("Result")
TRIES = 8
UNREACHED_SECONDS = 12.0  # after which a side that never answered is given up on
FIRST_PAUSE, LONGEST_PAUSE = 1.0, 60.0  # seconds; the hub's rate limit is counted over minutes


class Again(Exception):  # noqa: N818 - no error: the same attempt may well succeed
    """A passing failure: too many requests, a server that is down, a base that moved."""

    def __init__(self, what: str, *, wait: float | None = None, reached: bool = True) -> None:
        super().__init__(what)
        self.wait = wait  # seconds that the other side asked for; None: the usual pause
        self.reached = reached  # whether the other side ever answered


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a push came to."""

    where: str  # the pull request or branch
    revision: str  # its commit
    committed: bool  # whether a commit was made; False: it held all of it already
    files: int  # how many files the pull request changes


def planned(bundle: Bundle, base: Base, *, allow_changes: bool) -> Change:
    """The bundle on top of a base, checked. Raises TraceproofError: it breaks a rule, or changes what is there."""
    change = resolve(bundle, base, allow_changes=allow_changes)
    found = problems(bundle, change, base)
    if found:
        todo = "Nothing was sent."
        if change.problems and not allow_changes:
            todo += (
                " If the changes listed are meant, give --allow-changes; they are then part of the description."
            )
        raise TraceproofError(
            f"{bundle.slug} cannot be published on top of {base.revision}", problems=found, todo=todo
        )
    return change


def silent(_line: str) -> None:
    """Say nothing of the progress."""


def patiently(
    attempt: Callable[[], Result],
    *,
    pause: Callable[[float], None] = time.sleep,
    say: Callable[[str], None] = silent,
) -> Result:
    """Make attempts until one goes through, and say what they wait for.

    Each attempt starts from what the other side holds by then, so that one whose answer was lost is found done.
    Raises TraceproofError: none did; says what the last one ran into.
    """
    began = time.monotonic()

    def lost(state: RetryCallState) -> bool:
        return not _reason(state).reached and time.monotonic() - began > UNREACHED_SECONDS

    def again(state: RetryCallState) -> None:
        last, pause = str(_reason(state))[:200], state.upcoming_sleep
        say(f"attempt {state.attempt_number} of {TRIES} failed ({last}); again in {pause:g} s")

    def ended(state: RetryCallState) -> Result:
        what = f"{TRIES} attempts failed, the last one on"
        todo = "Run the same command again later: what was uploaded is not uploaded twice."
        if lost(state):
            what, todo = "the other side cannot be reached", "Check the address and the network."
        raise TraceproofError(f"not published: {what}: {_reason(state)}", todo=todo) from None

    return Retrying(
        retry=retry_if_exception_type(Again),
        stop=lambda state: state.attempt_number >= TRIES or lost(state),
        wait=_pause,
        sleep=pause,
        before_sleep=again,
        retry_error_callback=ended,
    )(attempt)


def _pause(state: RetryCallState) -> float:
    asked = _reason(state).wait
    return min(LONGEST_PAUSE, FIRST_PAUSE * 2.0 ** (state.attempt_number - 1) if asked is None else asked)


def _reason(state: RetryCallState) -> Again:
    assert state.outcome is not None
    reason = state.outcome.exception()
    assert isinstance(reason, Again)
    return reason


def unlike(expected: Mapping[str, bytes], read: Callable[[str], bytes | None]) -> list[str]:
    """Files that read back otherwise than they were sent."""
    found = []
    for path, data in sorted(expected.items()):
        back = read(path)
        if back != data:
            found.append(
                f"{path}: {len(data)} bytes sent, {'nothing' if back is None else f'{len(back)} other'} read"
            )
    return found
