"""One interpreter and its workers for all jobs of a run, instead of new ones for every job.

A run says who it is in an environment variable. The first of its jobs that needs an interpreter starts a host for
it (`traceproof.worker.host`); the jobs borrow workers from there and give trusted ones back. So a run imports
torch a few times and not once a job, and a GPU is opened by a few processes: a driver opens it for one after the
other.
"""

import contextlib
import fcntl
import json
import os
import shutil
import signal
import socket
import stat
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import traceproof
from traceproof.digests import digest_json
from traceproof.errors import TraceproofError
from traceproof.owner import OWNER_FILE, Owner
from traceproof.worker import starter
from traceproof.worker.conversation import Conversation
from traceproof.worker.interpreter import CACHES, PASSED, Recipe
from traceproof.worker.model import Isolation, Limits

RUN = "TRACEPROOF_RUN"  # environment variable: the process whose end is the run's end
COMMANDED = "TRACEPROOF_COMMANDED"  # environment variable: the process of the command whose Snakemake this is
STARTER = "TRACEPROOF_STARTER"  # environment variable: folder of the starter that serves this process, if any
ALLOCATION = "TRACEPROOF_ALLOCATION"  # environment variable: the batch system's job that the run is in
BATCH_JOB = "SLURM_JOB_ID"  # environment variable: the same, as Slurm has it
VISIBLE = "CUDA_VISIBLE_DEVICES"
PACKET_BYTES = 1 << 16
MOST_DESCRIPTORS = 3
LONGEST_SOCKET = 100  # characters of its path; the kernel takes 107
STEPS = "steps"  # folder in that of a run: who starts hosts for others
LOOK_SECONDS = 1.0  # how often a process looks whether its run is there
WAITING = 128  # jobs that may wait for a host that is starting
_COMMANDS: list[Owner] = []  # the command that started this process, if one did; see `announce`


def commanding(environment: dict[str, str]) -> dict[str, str]:
    """The environment of a Snakemake that ends with this process, which is its run unless it is part of one."""
    own, run = Owner.of(os.getpid()).text, environment.get(RUN, "")
    return environment | {RUN: run if Owner(run).alive else own, COMMANDED: own}


def announce() -> bool:
    """Make this process the run that jobs started from here share interpreters in, unless it is part of one.

    Jobs of a batch system are part of none but that of their own allocation: what they share with others is files.

    Returns:
        True: it is that run, or a command started it for its own. Where that command was killed while this
        process was starting, it stays the run's owner, so that `follow` ends this process too.
    """
    command = os.environ.pop(COMMANDED, "")
    _COMMANDS[:] = [Owner(command)] if command else []
    owner = Owner(os.environ.get(RUN, ""))
    allocation = os.environ.get(BATCH_JOB, "")
    apart = os.environ.get(ALLOCATION, allocation) != allocation
    os.environ[ALLOCATION] = allocation
    if apart or (not owner.alive and not (command and owner.ended)):
        os.environ[RUN] = Owner.of(os.getpid()).text
    return bool(command) or os.environ[RUN] == Owner.of(os.getpid()).text


def follow(number: signal.Signals) -> None:
    """Send this process a signal when the command or the run that it belongs to has ended, killed perhaps."""
    owner = _COMMANDS[0] if _COMMANDS else Owner(os.environ.get(RUN, ""))
    if not owner.alive and not owner.ended:  # it belongs to none, or to one of another machine
        return

    def watch() -> None:
        while not owner.ended:
            time.sleep(LOOK_SECONDS)
        os.kill(os.getpid(), number)

    threading.Thread(target=watch, daemon=True).start()


def in_run() -> bool:
    """Whether this process belongs to a run that is under way here."""
    return Owner(os.environ.get(RUN, "")).alive


class BorrowedWorker(Conversation):
    """A borrowed worker; released, it goes back if it is fit for another job, else it ends."""

    host: socket.socket

    def release(self) -> None:
        """Give it back, or end it."""
        if not self.moves or not self.idle:
            self.close()
            return
        with contextlib.suppress(OSError):  # a host that is gone: the worker ends with its descriptors
            socket.send_fds(self.host, [b"{}"], self.descriptors)
        self.abandon()

    def abandon(self) -> None:
        """Hang up; the host sees that its worker is gone, or takes what was sent."""
        super().abandon()
        self.host.close()


@dataclass(frozen=True, slots=True)
class Host:
    """Where jobs of this run get workers of one recipe."""

    recipe: Recipe
    folder: Path

    @classmethod
    def of_run(cls, recipe: Recipe) -> Self | None:
        """The host of the run that this process belongs to; None: it belongs to none, or none can be had here."""
        if not in_run():
            return None
        environment = {
            name: value
            for name, value in os.environ.items()
            if (name in (*PASSED, "PYTHONUSERBASE") or name.startswith(CACHES))
            and name != VISIBLE
            and name not in recipe.env
        }
        source = str(Path(traceproof.__file__).absolute())  # not resolved: what lies beside it is imported too
        key = digest_json([recipe.as_json(), environment, source])[:16]
        folder = run_folder() / key
        if len(str(folder / "socket")) > LONGEST_SOCKET:
            return None
        return cls(recipe, folder)

    def borrow(
        self,
        limits: Limits,  # of the worker
        scratch: Path,  # its folder
        *,
        # how many trusted workers may be there at once; more jobs than that wait. None: any number.
        most: int | None = None,
        conceal: Sequence[str] = (),  # what a shut-in worker does not see
        lasting: bool = True,  # whether a trusted one goes back
    ) -> BorrowedWorker:
        """A worker; a trusted one may have served other jobs, and serves others later if it is a lasting one.

        Raises TraceproofError: the interpreter does not start.
        """
        connection = self._connected()
        request = {
            "limits": limits.as_json(),
            "scratch": str(scratch),
            "visible": os.environ.get(VISIBLE) if self.recipe.gpu else None,
            "most": most,
            "conceal": list(conceal),
            "lasting": lasting,
        }
        try:
            connection.send(json.dumps(request).encode())
            said, descriptors, _, _ = socket.recv_fds(connection, PACKET_BYTES, MOST_DESCRIPTORS)
        except BaseException:
            connection.close()
            raise
        if not descriptors:
            connection.close()
            if not said:
                raise TraceproofError("the interpreter that a run shares is gone")
            raise TraceproofError.of_json(json.loads(said))
        borrowed = BorrowedWorker.of(descriptors, limits)
        told = json.loads(said)
        borrowed.host, borrowed.used, borrowed.layers = connection, told["used"], told["layers"]
        borrowed.moves = lasting and self.recipe.isolation is Isolation.TRUSTED
        return borrowed

    def start(self) -> None:
        """Have its interpreter started, and wait for nothing; what fails is told to who borrows."""
        with contextlib.suppress(OSError, TraceproofError), self._connected() as connection:
            connection.send(b"{}")

    def _connected(self) -> socket.socket:
        address = str(self.folder / "socket")
        with contextlib.suppress(FileNotFoundError, ConnectionRefusedError):
            return _connect(address)
        with place(self.folder):
            with contextlib.suppress(FileNotFoundError, ConnectionRefusedError):
                return _connect(address)
            order = json.dumps({"recipe": self.recipe.as_json(), "owner": os.environ[RUN]})
            start_server(self.folder, "traceproof.worker.host", order, env=self._environment(), session=True)
            return _connect(address)

    def _environment(self) -> dict[str, str]:
        """The host's: which GPU a worker sees is said with each request."""
        kept = {name: value for name, value in os.environ.items() if name != VISIBLE}
        return kept | {"PYTHONPATH": str(Path(traceproof.__file__).parent.parent)}


def run_folder(run: str = "") -> Path:
    """Folder of what the processes of a run, this one's if none is named, share on this machine."""
    run = run or os.environ.get(RUN, "")
    return Path(tempfile.gettempdir()) / f"traceproof-{os.getuid()}-{digest_json(run)[:12]}"


def start_for_steps() -> None:
    """Start hosts for the jobs of this allocation: a batch system ends a step with all that it started."""
    with place(run_folder() / STEPS):
        starter.serve(run_folder())


@contextmanager
def run_of_workers() -> Iterator[dict[str, str]]:
    """Variables of workers that share interpreters as the jobs of this run do, or until this process ends.

    This process starts their hosts: a worker ends with all that it started.
    """
    own, run = Owner.of(os.getpid()).text, os.environ.get(RUN, "")
    folder = run_folder(own)
    with place(folder / STEPS, own):
        starter.serve(folder)
    try:
        yield {RUN: run if in_run() else own, STARTER: str(folder), "TMPDIR": tempfile.gettempdir()}
    finally:
        (folder / starter.NAME).unlink(missing_ok=True)
        leave(folder / STEPS)


@contextmanager
def place(folder: Path, run: str = "") -> Iterator[None]:
    """Make a server's folder in that of the run, and hold it: one job starts the server, the others wait for that.

    Raises TraceproofError: somebody else may write there.
    """
    for made in (folder.parent, folder):
        made.mkdir(mode=0o700, exist_ok=True)
        _check_private(made)
    (folder.parent / OWNER_FILE).write_text(run or os.environ[RUN], encoding="ascii")
    with (folder / "lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        yield


def start_server(folder: Path, module: str, order: str, *, env: Mapping[str, str], session: bool) -> None:
    """Start `python -m module FD FOLDER ORDER`; jobs can knock at once and are heard when it has imported all.

    Args:
        folder: with its socket and its log.
        module: it forks and goes on by itself: it is the run's, and not this job's.
        order: its last argument.
        env: its environment.
        session: whether it leaves the session of the run.
    """
    address = folder / "socket"
    address.unlink(missing_ok=True)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener, (folder / "log").open("ab") as log:
        listener.bind(str(address))
        listener.listen(WAITING)
        arguments, descriptors = [module, str(folder), order], [listener.fileno(), log.fileno()]
        own = os.environ.get(STARTER)
        starters = [folder.parent, *([Path(own)] if own else [])] if session else []
        if not any(starter.ask(one, arguments, descriptors, env) for one in starters):
            starter.run(arguments, descriptors, env, session=session)


def leave(folder: Path) -> None:
    """Remove a server's folder, and that of the run after the last one."""
    shutil.rmtree(folder, ignore_errors=True)
    with contextlib.suppress(OSError):  # another server of the run has just removed it
        if [path.name for path in folder.parent.iterdir()] == [OWNER_FILE]:  # the other servers have theirs there
            shutil.rmtree(folder.parent)


def _connect(address: str) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        connection.connect(address)
    except OSError:
        connection.close()
        raise
    return connection


def _check_private(folder: Path) -> None:
    """Workers obey what comes through this folder. Raises TraceproofError: somebody else may write to it."""
    found = folder.lstat()
    if found.st_uid != os.getuid() or not stat.S_ISDIR(found.st_mode) or found.st_mode & 0o077:
        raise TraceproofError(
            f"{folder} is not this user's own folder", todo="Remove it, or set TMPDIR elsewhere."
        )
