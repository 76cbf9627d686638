"""Running git: no prompts, no waiting for ever, retries where they help, and errors that name the cause.

GitPython, which reads objects elsewhere, neither ends a stalled command's helpers nor bounds what it writes.
"""

import contextlib
import os
import re
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import tenacity
from tenacity import RetryCallState, Retrying

from traceproof.checkouts.git_folder import bytes_of_packs, unlock
from traceproof.errors import TraceproofError
from traceproof.programs import HUB_TOKENS, without_secrets
from traceproof.text import redacted

TAIL = 6  # lines of git's output that an error shows; the cause stands last
POLL_SECONDS = 0.1
MOST_BYTES = 100 << 30  # that may come onto the disk while one command runs
MOVED = r"non-fast-forward|fetch first|stale info|cannot lock ref|incorrect old value"  # of a push
# What no second attempt changes: (pattern in git's output, what it means, what to do).
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
    (MOVED, "the branch moved meanwhile", "Run the same command again."),
    ("remote rejected", "the remote refuses it", "See what it says."),
    (r"dubious ownership", "git does not trust the folder's owner", "See `git help config`, safe.directory."),
)
CORRUPT = re.compile(
    r"corrupt|bad object|inflate|pack has bad|index-pack failed|invalid index-pack|unable to read tree"
    r"|sha1 mismatch|loose object|missing blob|unable to read sha1|early EOF|bad pack|unexpected end"
)


class GitError(TraceproofError):
    """A failed git command."""

    def __init__(self, what: str, *, output: str, final: bool, todo: str) -> None:
        lines = [line.strip() for line in re.split(r"[\r\n]+", output) if line.strip()]
        super().__init__(what, problems=[line for line in lines if "%" not in line][-TAIL:], todo=todo)
        self.output = output  # all it said
        self.final = final  # whether a second attempt would meet the same
        self.corrupt = bool(CORRUPT.search(output))  # whether git found damaged objects


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """How long to wait for a remote."""

    attempts: int = 4  # tries of a network command in all
    # seconds before the second try; each further pause is twice as long, and up to half as much more
    pause: float = 1.0
    stall: float = 60.0  # seconds without a byte printed or written after which a command is ended


@dataclass(frozen=True, slots=True)
class Git:
    """Git in one folder. `report` gets git's progress lines."""

    folder: Path
    patience: Patience = field(default_factory=Patience)
    report: Callable[[str], None] = field(default=lambda _: None)
    lfs: bool = False

    def local(self, *arguments: str, data: bytes = b"", index: Path | None = None) -> str:
        """Output of a command that needs no network, on the index given, if any. Raises GitError: it failed."""
        return self._once(arguments, watched=False, data=data, index=index).decode(errors="surrogateescape")

    def commit(self, name: str) -> str:
        """The full commit that a name means. Raises GitError: it means none."""
        return self.local("rev-parse", "--verify", f"{name}^{{commit}}").strip()

    def network(self, *arguments: str) -> str:
        """Output of a command to a remote: watched, tried again if that may help. Raises GitError: it did not."""
        return self.content(*arguments).decode(errors="replace")

    def content(self, *arguments: str) -> bytes:
        """Like `network`, with the output's bytes."""
        pause = self.patience.pause
        retrying = Retrying(
            retry=tenacity.retry_if_exception(lambda error: isinstance(error, GitError) and not error.final),
            stop=tenacity.stop_after_attempt(self.patience.attempts),
            wait=tenacity.wait_exponential(multiplier=pause) + tenacity.wait_random(0, pause / 2),
            before_sleep=self._again,
            reraise=True,
        )
        return retrying(self._once, arguments, watched=True)

    def _again(self, state: RetryCallState) -> None:
        assert state.outcome is not None
        error, pause = state.outcome.exception(), state.upcoming_sleep
        cause = error.problems[-1] if isinstance(error, GitError) and error.problems else str(error)
        self.report(f"attempt {state.attempt_number} failed ({cause}); again in {pause:.0f} s")

    def _once(
        self, arguments: tuple[str, ...], *, watched: bool, data: bytes = b"", index: Path | None = None
    ) -> bytes:
        # Hooks are off: a template folder of the user's may hold some, and they are no part of what is fetched.
        command = ["git", "-c", "core.hooksPath=/dev/null", "-c", "advice.detachedHead=false", *arguments]
        own = {} if index is None else {"GIT_INDEX_FILE": str(index)}
        with tempfile.TemporaryFile() as given, tempfile.TemporaryFile() as output:
            given.write(data)
            given.seek(0)
            process = subprocess.Popen(
                command,
                cwd=self.folder,
                env={**environment(lfs=self.lfs, network=watched), **own},
                stdin=given,
                stdout=output,
                stderr=subprocess.PIPE,
                start_new_session=True,  # so that its helpers (index-pack, ssh) end with it
            )
            said, stalled = _Listener(process, self.report), False
            try:
                stalled = watched and self._watch(process, said)
                process.wait()
            finally:
                _end(process)
            said.thread.join()
            output.seek(0)
            content = output.read()
        if stalled:
            unlock(self.folder)  # else the next attempt meets the lock of this one, and says nothing else
        if process.returncode or stalled:
            raise self._failure(arguments, process.returncode, said.text(), stalled=stalled)
        return content

    def _watch(self, process: subprocess.Popen[bytes], said: "_Listener") -> bool:
        """Wait for the end; True: nothing came for too long. Raises GitError: it filled the disk."""
        size, since = -1, time.monotonic()
        free = shutil.disk_usage(self.folder).free
        while process.poll() is None:
            time.sleep(POLL_SECONDS)
            if free - shutil.disk_usage(self.folder).free > MOST_BYTES:
                _end(process)
                raise GitError(
                    f"{self.folder}: more than {MOST_BYTES >> 30} GiB were written",
                    output="",
                    final=True,
                    todo="Look at what the repository holds, and give another commit.",
                )
            now = said.count + bytes_of_packs(self.folder)
            if now != size:
                size, since = now, time.monotonic()
            elif time.monotonic() - since > self.patience.stall:
                _end(process)
                return True
        return False

    def _failure(self, arguments: tuple[str, ...], code: int, output: str, *, stalled: bool) -> GitError:
        what = redacted(f"git {' '.join(arguments)} in {self.folder}")
        if stalled:
            return GitError(
                f"{what}: the remote sent nothing for {self.patience.stall:g} s",
                output=output,
                final=False,
                todo="Check the network, or set a mirror (git config url.<mirror>.insteadOf <address>).",
            )
        if code == -signal.SIGXFSZ:
            output += "\nfile too large"
        for pattern, cause, todo in FINAL:
            if re.search(pattern, output):
                return GitError(f"{what}: {cause}", output=output, final=True, todo=todo)
        return GitError(
            f"{what} ended with {code}",
            output=output,
            final=False,
            todo="Check the address, the network (git ls-remote URL), and that a shallow clone has the commits.",
        )


def tree_with(git: Callable[..., str], base: str, files: Mapping[str, bytes]) -> str:
    """Write the tree of a commit with these files on top, by `Git.local` or its like; its digest."""
    with tempfile.TemporaryDirectory() as scratch:
        index = Path(scratch) / "index"
        git("read-tree", base, index=index)
        blobs = {
            path: git("hash-object", "-w", "--stdin", data=data).strip() for path, data in sorted(files.items())
        }
        listed = "".join(f"100644 {blob}\t{path}\n" for path, blob in blobs.items())
        git("update-index", "--index-info", data=listed.encode(), index=index)
        return git("write-tree", "--missing-ok", index=index).strip()


class _Listener:
    """Reads what git says while it runs."""

    def __init__(self, process: subprocess.Popen[bytes], report: Callable[[str], None]) -> None:
        self.count = 0
        self._parts: list[bytes] = []
        self._report = report
        self._process = process
        self.thread = threading.Thread(target=self._read, daemon=True)
        self.thread.start()

    def _read(self) -> None:
        assert self._process.stderr is not None
        with self._process.stderr as stream:
            while chunk := os.read(stream.fileno(), 65536):
                self.count += len(chunk)
                self._parts.append(chunk)
                lines = [line for line in re.split(rb"[\r\n]+", chunk) if line.strip()]
                if lines:
                    self._report(lines[-1].decode(errors="replace").strip())

    def text(self) -> str:
        """All of it."""
        return b"".join(self._parts).decode(errors="replace")


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a command with all that it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def environment(*, lfs: bool = False, network: bool = False) -> Mapping[str, str]:
    """The environment of git: the user's, without prompts and without another repository's variables.

    Secrets stay behind, but for what a credential helper may read where a command asks a remote.
    """
    foreign = {"GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", *HUB_TOKENS}
    given = os.environ if network else without_secrets()
    inherited = {key: value for key, value in given.items() if key not in foreign}
    return {
        "GIT_SSH_COMMAND": "ssh -o BatchMode=yes -o ConnectTimeout=30",
        "GIT_HTTP_LOW_SPEED_LIMIT": "1",
        "GIT_HTTP_LOW_SPEED_TIME": "60",
        **inherited,
        "GIT_TERMINAL_PROMPT": "0",
        "GIT_OPTIONAL_LOCKS": "0",  # a killed `git status` must not leave a lock behind
        "GIT_LFS_SKIP_SMUDGE": "0" if lfs else "1",
        "LC_ALL": "C",  # errors are recognised by their text
    }


def available() -> None:
    """Check that there is a git. Raises TraceproofError: there is none."""
    if shutil.which("git") is None:
        raise TraceproofError("git is not installed", todo="Install it (Debian: apt install git) and run again.")
