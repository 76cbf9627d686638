"""Runs items in worker processes: the part that a caller sees. Needs the standard library only."""

import contextlib
import os
import sys
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from traceproof.owner import own_folder
from traceproof.worker.conversation import Answer, Conversation
from traceproof.worker.interpreter import Interpreter, Recipe
from traceproof.worker.model import Isolation, ItemOutcome, Limits, Status
from traceproof.worker.sandbox import lacking, line_of
from traceproof.worker.shared import Host


@dataclass(kw_only=True, eq=False, repr=False)
class Pool:
    """Keeps an interpreter, with `preload` imported, from which each worker is forked in milliseconds.

    Use it as a context manager; `run_items` may be called from several threads at once. Trusted and untrusted
    workers come from interpreters of their own, each started when it is first needed.
    """

    # modules to import before the first fork. They must not start threads, run tensor operations or touch CUDA
    # on import.
    preload: Sequence[str] = ("torch",)
    python: str | os.PathLike[str] | None = None  # the interpreter; None: this one
    # environment variables for the worker beside the few that are passed on. Foreign code sees them.
    env: Mapping[str, str] | None = None
    # whether workers may use CUDA devices; if not, they see none, and memory limits hold more exactly
    gpu: bool = False
    # files and folders that shut-in workers may read beside the interpreter and installed software
    readable: Sequence[Path] = ()
    # layers (keys of `layers`) to leave out: where one stands in the way, and to see what is left
    without: Collection[str] = ()
    # files and folders that shut-in workers do not see even where they lie inside of what they see
    conceal: Sequence[Path] = ()
    # whether untrusted code may run where isolation is not whole; if not, each item's status says so
    weak: bool = True
    # whether to use, inside a run that announced itself, the interpreters that its jobs share
    shared: bool = False
    most: int | None = None  # how many trusted workers such an interpreter may have at once; None: any number
    lasting: bool = True  # whether its trusted workers serve other jobs too, before and afterwards

    def __post_init__(self) -> None:
        # Nothing shuts trusted code in; without what would, recipes of different jobs are equal and share a host.
        shut_in = [os.path.abspath(path) for path in self.readable], sorted(self.without)  # noqa: PTH100 - links stay links
        self._recipes = {
            isolation: Recipe(
                python=os.fspath(self.python) if self.python is not None else sys.executable,
                preload=tuple(self.preload),
                env=dict(self.env or {}),
                gpu=self.gpu,
                isolation=isolation,
                readable=shut_in[0] if isolation is Isolation.UNTRUSTED else [],
                without=shut_in[1] if isolation is Isolation.UNTRUSTED else [],
            )
            for isolation in Isolation
        }
        self._hosts = {
            isolation: Host.of_run(recipe) if self.shared else None for isolation, recipe in self._recipes.items()
        }
        self._conceal = sorted(os.path.realpath(path) for path in self.conceal)
        self._lock = threading.Lock()
        self._running: dict[Isolation, Interpreter] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def layers(self) -> dict[str, str]:
        """Each layer of isolation around untrusted code: "holds", or "absent: " and why, as tried on this machine.

        Raises TraceproofError: the interpreter does not start.
        """
        with self._lock:
            return dict(self._interpreter(Isolation.UNTRUSTED).layers)

    def line(self) -> str:
        """The layers in one line for people; raises as `layers` does."""
        return line_of(self.layers())

    def start(self, isolation: Isolation) -> None:
        """Have the interpreter that the jobs of a run share started, ahead of its first worker."""
        host = self._hosts[isolation]
        if host is not None:
            host.start()

    def run_items(  # noqa: PLR0913 - one request, spelled out
        self,
        *,
        # "module:function"; in the worker `function(payload, scratch)` returns the handler, and `handler(item)`
        # the item's value
        setup: str,
        # a JSON value
        payload: Any,  # noqa: ANN401 - any JSON value
        items: Sequence[Any],  # JSON values
        limits: Limits | None = None,  # None: the defaults
        isolation: Isolation = Isolation.UNTRUSTED,  # how far the worker is shut in
        # an existing folder that the worker may write to and that stays; None: one that is removed
        scratch: Path | None = None,
    ) -> Iterator[ItemOutcome]:
        """Run the items in order in one worker, replaced whenever it dies; one outcome per item.

        Raises TraceproofError: the interpreter does not start, a module to preload does not import, or no worker
        can be forked.
        """
        with self.session(
            setup=setup, payload=payload, limits=limits, isolation=isolation, scratch=scratch
        ) as session:
            for item in items:
                yield session.ask(item)

    @contextlib.contextmanager
    def session(
        self,
        *,
        setup: str,
        payload: Any,  # noqa: ANN401 - any JSON value
        limits: Limits | None = None,
        isolation: Isolation = Isolation.UNTRUSTED,
        scratch: Path | None = None,
    ) -> "Iterator[Session]":
        """A worker for one item after the other, as `run_items` has it, started at the first."""
        isolation = Isolation(isolation)
        settled = (limits or Limits()).settled(isolation)
        shut_in = isolation is Isolation.UNTRUSTED
        with contextlib.ExitStack() as stack:
            session = Session(
                stack,
                lambda: self._worker(settled, isolation, scratch),
                setup=setup,
                payload=payload,
                limits=settled,
                shut_in=shut_in,
                strict=shut_in and not self.weak,
            )
            try:
                yield session
            except Exception:
                session.settle()
                raise
            session.settle()

    @contextlib.contextmanager
    def _worker(
        self, limits: Limits, isolation: Isolation, scratch: Path | None
    ) -> Iterator[tuple[Conversation, Path]]:
        with contextlib.ExitStack() as stack:
            folder = (scratch or stack.enter_context(own_folder("traceproof"))).resolve()
            host = self._hosts[isolation]
            worker: Conversation
            if host is not None:
                most = self.most if isolation is Isolation.TRUSTED else None
                worker = host.borrow(limits, folder, most=most, conceal=self._conceal, lasting=self.lasting)
            else:
                with self._lock:
                    worker = self._interpreter(isolation).worker(limits, folder, conceal=self._conceal)
            stack.callback(worker.release)
            yield worker, folder

    def _interpreter(self, isolation: Isolation) -> Interpreter:
        """The interpreter for such code; started if it is not there. The lock is held."""
        running = self._running.get(isolation)
        if running is None or not running.alive:
            if running is not None:
                running.stop()
            running = self._running[isolation] = Interpreter.start(self._recipes[isolation])
        return running

    def close(self) -> None:
        """End the interpreters. Workers that still run end with their own iterators."""
        with self._lock:
            while self._running:
                _, running = self._running.popitem()
                running.stop()


class Session:
    """One worker that runs items, replaced whenever it dies; what refuses the first refuses all."""

    def __init__(  # noqa: PLR0913 - made in one place
        self,
        stack: contextlib.ExitStack,
        worker: Callable[[], contextlib.AbstractContextManager[tuple[Conversation, Path]]],
        *,
        setup: str,
        payload: Any,  # noqa: ANN401 - any JSON value
        limits: Limits,
        strict: bool,
        shut_in: bool,
    ) -> None:
        self._stack, self._new = stack, worker
        self._setup, self._payload, self._limits = setup, payload, limits
        self._strict, self._shut_in = strict, shut_in
        self._worker: Conversation | None = None
        self._reach = ""
        self._refused: ItemOutcome | None = None
        self._count = 0
        self._ahead: Future[None] | None = None

    def start(self) -> None:
        """Begin to start the worker, beside whatever is done until it is asked something."""
        begun: Future[None] = Future()
        self._ahead = begun

        def run() -> None:
            try:
                self._start()
            except Exception as error:  # noqa: BLE001 - raised where it is waited for
                begun.set_exception(error)
            else:
                begun.set_result(None)

        threading.Thread(target=run, daemon=True).start()

    def settle(self) -> None:
        """Wait for a start that has begun; raises what that raised."""
        begun, self._ahead = self._ahead, None
        if begun is not None:
            begun.result()

    def ask(self, item: Any, seconds: float | None = None) -> ItemOutcome:  # noqa: ANN401 - any JSON value
        """Run one item, in `seconds` or the limit's; the outcome is numbered by how many came before."""
        index, self._count = self._count, self._count + 1
        self.settle()
        while self._refused is None:
            if self._worker is None or self._worker.over():
                self._start()
            else:
                answer = self._worker.ask({"item": item}, seconds or self._limits.seconds)
                return _outcome(index, answer, self._reach)
        return replace(self._refused, index=index)

    def _start(self) -> None:
        """Take a new worker and set it up."""
        self._stack.close()
        self._worker, folder = self._stack.enter_context(self._new())
        self._reach = ", ".join(lacking(self._worker.layers)) if self._shut_in else ""
        if self._reach and self._strict:
            self._refuse(_not_isolated(self._reach))
            return
        start = self._worker.set_up(self._setup, self._payload, folder, self._limits.setup_seconds)
        if start.status is Status.CRASH and self._worker.used:
            self._worker = None  # it ended while nobody used it
        elif start.status is not Status.OK:
            self._refuse(_outcome(0, start, self._reach, "setup: "))

    def _refuse(self, outcome: ItemOutcome) -> None:
        self._refused = outcome
        self._stack.close()


def _not_isolated(reach: str) -> ItemOutcome:
    message = (
        f"not run: on this machine strangers' code could reach {reach} (namespaces and Landlock are absent or not"
        " allowed here); --allow-weak-isolation runs it all the same"
    )
    return ItemOutcome(index=0, status=Status.ISOLATION, message=message)


def _outcome(index: int, answer: Answer, reach: str, prefix: str = "") -> ItemOutcome:
    return ItemOutcome(
        index=index,
        status=answer.status,
        value=answer.value,
        message=prefix + answer.message,
        seconds=answer.seconds,
        peak_bytes=answer.peak,
        output=answer.output,
        isolation=reach,
    )
