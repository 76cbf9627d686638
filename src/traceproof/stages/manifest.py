"""What an actor's job leaves: for each case of each definition, where the outputs lie or why there are none."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from traceproof.border import BorderError, read_json
from traceproof.digests import digest_json
from traceproof.errors import TraceproofError
from traceproof.records import AGAIN, Record, RunRecord
from traceproof.store import write_json

MANIFEST_BYTES = 1 << 30
Records = dict[str, RunRecord]  # of one definition, by case id


class Manifest(Record):
    """One (op_type, actor) job's result.

    Attributes:
        actor: its name.
        op_type: whose cases were run.
        code: digest of the code that the outputs depend on.
        environment: the stack's record (`digest`, `versions`, `device`).
        cases: records by definition and case id.
    """

    actor: str
    op_type: str
    code: str
    environment: dict[str, Any]
    cases: dict[str, Records]

    def write(self, path: Path) -> None:
        """Write it in one rename.

        Raises:
            TraceproofError: the disk is full.
        """
        value = self.as_json()
        write_json(path, {"seal": digest_json(value), **value})

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read it back.

        Raises:
            TraceproofError: it is not what was written; it is removed, so that the next run makes it again.
        """
        try:
            value = read_json(path, most=MANIFEST_BYTES)
            seal = value.pop("seal")
            if seal == digest_json(value):
                return cls.model_validate(value)
            why = "it was changed after it was written"
        except (BorderError, AttributeError, KeyError, TypeError, ValueError) as error:
            why = str(error)
        path.unlink(missing_ok=True)
        raise TraceproofError(f"{path} is damaged", problems=[why], todo=f"It has been removed. {AGAIN}")

    def of(self, definition: str) -> Mapping[str, RunRecord]:
        """The records of a definition by case id."""
        return self.cases.get(definition, {})
