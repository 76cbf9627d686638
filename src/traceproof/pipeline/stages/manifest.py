"""What an actor's job leaves: for each case of each definition, where the outputs lie or why there are none."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from traceproof.errors import TraceproofError
from traceproof.pipeline.records import AGAIN, Record, RunRecord
from traceproof.store import read_sealed, write_sealed
from traceproof.untrusted.border import BorderError

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
        write_sealed(path, self.as_json())

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read it back.

        Raises:
            TraceproofError: it is not what was written; it is removed, so that the next run makes it again.
        """
        try:
            return cls.model_validate(read_sealed(path))
        except (BorderError, ValueError) as error:
            why = str(error)
        path.unlink(missing_ok=True)
        raise TraceproofError(f"{path} is damaged", problems=[why], todo=f"It has been removed. {AGAIN}")

    def of(self, definition: str) -> Mapping[str, RunRecord]:
        """The records of a definition by case id."""
        return self.cases.get(definition, {})
