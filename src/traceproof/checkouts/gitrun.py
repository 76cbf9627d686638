"""Running git: without prompts, with limits on waiting, with retries where they help, and errors that name causes.

GitPython, which reads objects elsewhere, reports failed commands in its own words, and retries nothing.
"""

import os
import re
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import tenacity
from tenacity import RetryCallState, Retrying

from traceproof import programs
from traceproof.errors import TraceproofError
from traceproof.programs import HUB_TOKENS, without_secrets
from traceproof.text import redacted

TAIL = 6  # last lines of git's output in an error, where the cause is
STALLED = r"Operation too slow|Timeout, server .* not responding"  # messages of curl and of ssh
# Failures that a second attempt does not change: (pattern in git's output, cause, what to do).
FINAL: tuple[tuple[str, str, str], ...] = (
    (
        r"not our ref|remote error: upload-pack|couldn't find remote ref|unadvertised object",
        "the remote has no such commit",
        "Check that the commit (all 40 digits) was pushed there and was not rewritten since.",
    ),
    (
        r"No space left on device|Disk quota exceeded|[Ff]ile too large|out of disk space|died of signal 25",
        "no space left on the disk",
        "Free some space and run the same command again: nothing half-written is used.",
    ),
    (
        r"Authentication failed|could not read Username|Permission denied|terminal prompts disabled|error: 40[13]",
        "the remote refused access",
        "Set up credentials for git itself (a credential helper, ssh keys); none are read from anywhere else.",
    ),
    (
        r"[Rr]epository .*not found|does not appear to be a git repository|not a git repository|error: 404",
        "there is no repository at this address",
        "Check the address (git ls-remote URL).",
    ),
    (
        r"Needed a single revision|Not a valid object name|unknown revision|Not a valid commit name",
        "it has no such commit",
        "Check the name; `git fetch --unshallow --tags` brings what a shallow clone lacks.",
    ),
    ("remote rejected", "the remote refuses it", "See what it says."),
    (r"dubious ownership", "git does not trust the folder's owner", "See `git help config`, safe.directory."),
)


class GitError(TraceproofError):
    """A failed git command."""

    def __init__(self, what: str, *, output: str, final: bool, todo: str) -> None:
        lines = [line.strip() for line in re.split(r"[\r\n]+", output) if line.strip()]
        super().__init__(what, problems=[line for line in lines if "%" not in line][-TAIL:], todo=todo)
        self.output = output  # all that git said
        self.final = final  # whether a second attempt would fail as well


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """How long to wait for a remote, and how often to try."""

    attempts: int = 4  # of a network command, in all
    # seconds before the second try; each further pause is twice as long, and up to half as much more
    pause: float = 1.0
    stall: float = 60.0  # seconds without a byte from an http or ssh remote, after which the attempt is given up


@dataclass(frozen=True, slots=True)
class Git:
    """Runs git in one folder. `report` is called with git's progress lines."""

    folder: Path
    patience: Patience = field(default_factory=Patience)
    report: Callable[[str], None] = field(default=lambda _: None)
    lfs: bool = False

    def local(self, *arguments: str) -> str:
        """Output of a command that needs no network. Raises GitError: it failed."""
        return self._once(arguments, network=False).decode(errors="surrogateescape")

    def commit(self, name: str) -> str:
        """The full commit of a name. Raises GitError: there is none."""
        return self.local("rev-parse", "--verify", f"{name}^{{commit}}").strip()

    def network(self, *arguments: str) -> str:
        """Output of a command that asks a remote, retried where that may help. Raises GitError: it failed."""
        pause = self.patience.pause
        retrying = Retrying(
            retry=tenacity.retry_if_exception(lambda error: isinstance(error, GitError) and not error.final),
            stop=tenacity.stop_after_attempt(self.patience.attempts),
            wait=tenacity.wait_exponential(multiplier=pause) + tenacity.wait_random(0, pause / 2),
            before_sleep=self._again,
            reraise=True,
        )
        return retrying(self._once, arguments, network=True).decode(errors="replace")

    def _again(self, state: RetryCallState) -> None:
        assert state.outcome is not None
        error, pause = state.outcome.exception(), state.upcoming_sleep
        cause = error.problems[-1] if isinstance(error, GitError) and error.problems else str(error)
        self.report(f"attempt {state.attempt_number} failed ({cause}); again in {pause:.0f} s")

    def _once(self, arguments: tuple[str, ...], *, network: bool) -> bytes:
        """Run git once; returns its output. Raises GitError: it fails or stalls."""
        # Without hooks: a user's template folder may hold some, and they are no part of what is fetched.
        command = ["git", "-c", "core.hooksPath=/dev/null", "-c", "advice.detachedHead=false", *arguments]
        with tempfile.TemporaryFile() as output:
            with subprocess.Popen(
                command,
                cwd=self.folder,
                env=self._environment(network=network),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.PIPE,
                encoding="utf-8",
                errors="replace",
            ) as process:
                assert process.stderr is not None
                messages = []
                try:
                    for line in process.stderr:  # progress lines end with a carriage return
                        messages.append(line)
                        self.report(line.strip())
                except BaseException:
                    process.kill()
                    raise
            if process.returncode == -signal.SIGINT:
                raise KeyboardInterrupt  # Ctrl-C reaches git as well, and must not be retried
            if process.returncode:
                raise self._failure(arguments, process.returncode, "".join(messages))
            output.seek(0)
            return output.read()

    def _failure(self, arguments: tuple[str, ...], code: int, output: str) -> GitError:
        """The error for a failed command, with its cause if the output shows it; `final`: retrying is useless."""
        what = redacted(f"git {' '.join(arguments)} in {self.folder}")
        if re.search(STALLED, output):
            what += f": the remote sent nothing for {self.patience.stall:g} s"
            todo = "Check the network, or set a mirror (git config url.<mirror>.insteadOf <address>)."
            return GitError(what, output=output, final=False, todo=todo)
        if code == -signal.SIGXFSZ:
            output += "\nfile too large"
        for pattern, cause, todo in FINAL:
            if re.search(pattern, output):
                return GitError(f"{what}: {cause}", output=output, final=True, todo=todo)
        todo = "Check the address, the network (git ls-remote URL), and that a shallow clone has the commits."
        return GitError(f"{what} ended with {code}", output=output, final=False, todo=todo)

    def _environment(self, *, network: bool) -> Mapping[str, str]:
        """Environment variables for git: the user's, without prompts and other repositories' variables.

        Secrets are removed, except where a remote is asked, for credential helpers. git and ssh themselves notice
        a silent remote.
        """
        foreign = {"GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", *HUB_TOKENS}
        variables = os.environ if network else without_secrets()
        inherited = {key: value for key, value in variables.items() if key not in foreign}
        stall = max(1, round(self.patience.stall))
        options = f"-o BatchMode=yes -o ConnectTimeout=30 -o ServerAliveInterval={stall} -o ServerAliveCountMax=1"
        # the variable would replace a command of the user's own
        ask = ["git", "config", "core.sshCommand"]
        own = network and ("GIT_SSH" in inherited or programs.run(ask, cwd=self.folder).stdout)
        return {
            **({} if own else {"GIT_SSH_COMMAND": f"ssh {options}"}),
            "GIT_HTTP_LOW_SPEED_LIMIT": "1",
            "GIT_HTTP_LOW_SPEED_TIME": str(stall),
            **inherited,
            "GIT_TERMINAL_PROMPT": "0",
            "GIT_OPTIONAL_LOCKS": "0",  # a killed `git status` must not leave a lock
            "GIT_LFS_SKIP_SMUDGE": "0" if self.lfs else "1",
            "LC_ALL": "C",  # errors are recognised by their text
        }


def available() -> None:
    """Raise TraceproofError if git is not installed."""
    if shutil.which("git") is None:
        raise TraceproofError("git is not installed", todo="Install it (Debian: apt install git) and run again.")
