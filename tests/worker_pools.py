"""Pools for the tests of the worker: every kind of isolation, as strong as this machine has it, and weaker."""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import traceproof
from traceproof.sandbox import Limits, Pool, Reply

TESTS = Path(__file__).parent
SOURCES = Path(traceproof.__file__).parent.parent
NAMESPACES = ("user", "process", "network", "ipc", "files")
NOTHING = (*NAMESPACES, "privileges", "system_calls", "landlock")
# name: layers left out
KINDS: dict[str, Sequence[str]] = {
    "untrusted": (),
    "container": NAMESPACES,  # what many containers leave: seccomp and Landlock
    "limits_only": NOTHING,
}


def pool(*, without: Collection[str] = (), preload: Sequence[str] = ()) -> Pool:
    path = os.pathsep.join([str(SOURCES), str(TESTS)])
    return Pool(preload=preload, env={"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}, without=without)


class Workers:
    """A pool with its kind of isolation, and calls that run items in it."""

    def __init__(self, kind: str, *, preload: Sequence[str] = ()) -> None:
        self.pool = pool(without=KINDS[kind], preload=preload)

    def run(
        self,
        *items: dict[str, Any],
        setup: str = "setup",
        payload: Any = None,  # noqa: ANN401 - any JSON value
        limits: Limits | None = None,
        scratch: Path | None = None,
    ) -> list[Reply]:
        given = {"payload": payload, "limits": limits or Limits(), "scratch": scratch}
        with self.pool.session(setup=f"worker_misdeeds:{setup}", **given) as session:
            return [session.ask(item) for item in items]

    def has(self, *layers: str) -> bool:
        """Whether any of these layers of isolation holds for the workers."""
        states = self.pool.layers()
        return any(states.get(layer) == "holds" for layer in layers)
