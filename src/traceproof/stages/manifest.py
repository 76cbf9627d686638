"""What an actor's job leaves: for each case of each definition, where the outputs lie or why there are none."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from traceproof.store import write_json


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """One (op_type, actor) job's result.

    Attributes:
        actor: its name.
        op_type: whose cases were run.
        code: digest of the code that the outputs depend on.
        environment: the stack's record (`digest`, `versions`, `device`).
        cases: definition -> case id -> record. A record has `key` (store digest), `status` (ok, skip, error),
            `reason` and `message` unless ok, `inputs` (digest), `seconds`, `cached` (taken from the store) and the
            notes of traceproof.actors.execute.
    """

    actor: str
    op_type: str
    code: str
    environment: Mapping[str, Any]
    cases: Mapping[str, Mapping[str, Mapping[str, Any]]]

    def write(self, path: Path) -> None:
        """Write it in one rename.

        Raises:
            TraceproofError: the disk is full.
        """
        write_json(
            path,
            {
                "actor": self.actor,
                "op_type": self.op_type,
                "code": self.code,
                "environment": dict(self.environment),
                "cases": self.cases,
            },
        )

    @classmethod
    def read(cls, path: Path) -> Manifest:
        """Read it back."""
        return cls(**json.loads(path.read_text(encoding="utf-8")))
