"""What an actor's job leaves: for each case of each definition, where the outputs lie or why there are none."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from traceproof.border import BorderError, read_json
from traceproof.digests import digest_json
from traceproof.errors import TraceproofError
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
        value = {
            "actor": self.actor,
            "op_type": self.op_type,
            "code": self.code,
            "environment": dict(self.environment),
            "cases": self.cases,
        }
        write_json(path, {"seal": digest_json(value), **value})

    @classmethod
    def read(cls, path: Path) -> Manifest:
        """Read it back.

        Raises:
            TraceproofError: it is not what was written; it is removed, so that the next run makes it again.
        """
        try:
            value = read_json(path)
            seal = value.pop("seal")
            if seal == digest_json(value):
                return cls(**value)
            why = "it was changed after it was written"
        except (BorderError, AttributeError, KeyError, TypeError, ValueError) as error:
            why = str(error)
        path.unlink(missing_ok=True)
        raise TraceproofError(
            f"{path} is damaged",
            problems=[why],
            todo="It has been removed. Run the same command again: finished outputs are kept.",
        )
