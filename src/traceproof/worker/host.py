"""The process that keeps one interpreter for a run and lends its workers to the run's jobs; see `shared`.

Started as `python -m traceproof.worker.host FD FOLDER ORDER`: a listening socket, a folder of its own, and
JSON that says which interpreter (`recipe`) and whose (`owner`). A connection borrows one worker: the request, then
the worker's descriptors as the answer, then these descriptors back, which keeps the worker for the next job, or
nothing. It ends when its owner has.
"""

import contextlib
import json
import os
import selectors
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from traceproof.errors import TraceproofError
from traceproof.owner import Owner
from traceproof.worker.conversation import Conversation
from traceproof.worker.interpreter import Interpreter, Recipe
from traceproof.worker.model import Limits
from traceproof.worker.shared import MOST_DESCRIPTORS, PACKET_BYTES, leave

LOOK_SECONDS = 0.5  # how often it looks whether its owner is there


@dataclass(slots=True, eq=False)
class Client:
    """One connection: a job that waits for a worker, or has one."""

    connection: socket.socket
    request: dict[str, Any] = field(default_factory=dict)
    served: bool = False

    @property
    def key(self) -> str:
        """What a worker that is lent again has to have in common with the request."""
        return json.dumps([self.request[name] for name in ("limits", "visible", "lasting")])


@dataclass(slots=True)
class HostServer:
    """Who waits, who has a worker, and which workers are free."""

    recipe: Recipe
    listener: socket.socket
    selector: selectors.BaseSelector = field(default_factory=selectors.DefaultSelector)
    clients: list[Client] = field(default_factory=list)
    free: list[tuple[str, Conversation]] = field(default_factory=list)
    interpreter: Interpreter | None = None

    def serve(self, owner: Owner) -> None:
        """Lend workers until the owner is gone."""
        self.listener.setblocking(False)  # noqa: FBT003 - positional in the standard library
        self.selector.register(self.listener, selectors.EVENT_READ)
        while owner.alive:
            for key, _ in self.selector.select(LOOK_SECONDS):
                if key.fileobj is self.listener:
                    self._admit()
                else:
                    self._hear(key.data)
            self._lend()

    def _admit(self) -> None:
        with contextlib.suppress(BlockingIOError):
            connection, _ = self.listener.accept()
            client = Client(connection)
            self.clients.append(client)
            self.selector.register(connection, selectors.EVENT_READ, client)

    def _hear(self, client: Client) -> None:
        """A request, a worker that comes back, or the end of a connection."""
        said, descriptors = b"", list[int]()
        with contextlib.suppress(OSError):
            said, descriptors, _, _ = socket.recv_fds(client.connection, PACKET_BYTES, MOST_DESCRIPTORS)
        if said and not client.served and not client.request:
            client.request = json.loads(said)
            if client.request:
                return
            with contextlib.suppress(TraceproofError):  # whoever wants a worker is told
                self._started()
        if descriptors:
            worker = Conversation.of(descriptors, Limits.of_json(client.request["limits"]))
            worker.layers = self.interpreter.layers if self.interpreter is not None else {}
            self.free.append((client.key, worker))
        self._dismiss(client)

    def _dismiss(self, client: Client) -> None:
        self.selector.unregister(client.connection)
        client.connection.close()
        self.clients.remove(client)

    def _lend(self) -> None:
        """Serve those who wait, in the order in which they came, as far as there may be workers."""
        self.free = [(key, worker) for key, worker in self.free if _fit(worker)]
        for client in [client for client in self.clients if client.request and not client.served]:
            most = client.request["most"]
            lent = sum(other.served and other.request["most"] is not None for other in self.clients)
            if most is not None and lent >= most:
                continue
            try:
                worker, used = self._worker(client, room=most is None or lent + len(self.free) < most)
            except TraceproofError as error:
                with contextlib.suppress(OSError):
                    client.connection.send(json.dumps(error.as_json()).encode()[:PACKET_BYTES])
                self._dismiss(client)
                continue
            client.served = True
            with contextlib.suppress(OSError):  # a job that was killed; its connection's end is heard next
                socket.send_fds(
                    client.connection,
                    [json.dumps({"used": used, "layers": dict(worker.layers)}).encode()],
                    worker.descriptors,
                )
            worker.abandon()  # the job's descriptors are copies

    def _worker(self, client: Client, *, room: bool) -> tuple[Conversation, bool]:
        """A free worker that fits, else a new one, for which a free one makes room; and whether it was used."""
        for place, (key, worker) in enumerate(self.free):
            if key == client.key:
                del self.free[place]
                return worker, True
        if not room and self.free:
            self.free.pop(0)[1].close()
        limits, scratch = Limits.of_json(client.request["limits"]), Path(client.request["scratch"])
        told = client.request
        return self._started().worker(limits, scratch, told["visible"], told["conceal"]), False

    def _started(self) -> Interpreter:
        """The interpreter, which is started if none lives."""
        if self.interpreter is None or not self.interpreter.alive:
            if self.interpreter is not None:
                self.interpreter.stop()
            self.interpreter = Interpreter.start(self.recipe)
        return self.interpreter

    def close(self) -> None:
        """End everything that is here; workers that are lent end with their jobs."""
        for _, worker in self.free:
            worker.close()
        if self.interpreter is not None:
            self.interpreter.stop()


def _fit(worker: Conversation) -> bool:
    """Whether a free worker still lives; one that does not is let go."""
    if worker.idle:
        return True
    worker.close()
    return False


def main(arguments: Sequence[str]) -> int:
    """Serve, then leave nothing."""
    if os.fork():
        os._exit(0)  # whoever started this goes on
    fd, folder, said = arguments
    order = json.loads(said)
    with socket.socket(fileno=int(fd)) as listener:
        listener.set_inheritable(False)
        server = HostServer(Recipe.of_json(order["recipe"]), listener)
        try:
            server.serve(Owner(order["owner"]))
        finally:
            server.close()
            leave(Path(folder))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
