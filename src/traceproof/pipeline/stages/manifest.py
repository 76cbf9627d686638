"""What an actor's job leaves: for each case of each definition, where the outputs lie or why there are none."""

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Self

from traceproof.errors import TraceproofError
from traceproof.pipeline.records import AGAIN, EARLIER, Record
from traceproof.pipeline.run_record import RunRecord
from traceproof.store import linked, read_sealed, write_sealed
from traceproof.untrusted.border import BorderError

Records = dict[str, RunRecord]  # of one definition, by case id


class Manifest(Record):
    """One (op_type, actor) job's result."""

    actor: str  # its name
    op_type: str  # whose cases were run
    code: str  # digest of the code that the outputs depend on
    environment: dict[str, Any]  # the stack's record (`digest`, `versions`, `device`)
    newest: int = 0  # when the last file of the outputs changed, by its inode, in nanoseconds
    cases: dict[str, Records]  # records by definition and case id

    def write(self, path: Path) -> None:
        """Write it in one rename, and for the next job once more: Snakemake removes what a job is to write.

        Raises TraceproofError: the disk is full.
        """
        write_sealed(path, self.as_json())
        kept = _earlier(path)
        kept.parent.mkdir(exist_ok=True)
        linked(path, kept)

    @classmethod
    def earlier(cls, path: Path) -> Self | None:
        """What a job left last that is to write `path`; None: nothing, or it is not what was written."""
        try:
            return cls.model_validate(read_sealed(_earlier(path)))
        except (BorderError, ValueError):
            return None

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read it back. Raises TraceproofError: it is not what was written, and is removed."""
        try:
            return cls.model_validate(read_sealed(path))
        except (BorderError, ValueError) as error:
            why = str(error)
        path.unlink(missing_ok=True)
        raise TraceproofError(f"{path} is damaged", problems=[why], todo=f"It has been removed. {AGAIN}")

    @classmethod
    def merged(cls, paths: Iterable[Path]) -> dict[str, Self]:
        """What each actor left, by name, in any number of jobs. Raises TraceproofError: as `read` does."""
        found: dict[str, Self] = {}
        for part in map(cls.read, paths):
            whole = found.setdefault(part.actor, part)
            found[part.actor] = whole.model_copy(update={"cases": whole.cases | part.cases})
        return found

    def of(self, definition: str) -> Mapping[str, RunRecord]:
        """The records of a definition by case id."""
        return self.cases.get(definition, {})

    def only(self, definition: str) -> Self:
        """The same with one definition alone."""
        return self.model_copy(update={"cases": {definition: self.of(definition)}})


def _earlier(path: Path) -> Path:
    return path.parent / EARLIER / path.name


def manifests_of(folder: Path, actor: str) -> list[Path]:
    """The manifests of an actor in an op_type's folder: one, or one per shard."""
    name = re.compile(rf"{re.escape(actor)}(\.\d+-of-\d+)?\.json", re.ASCII)
    return sorted(path for path in folder.glob(f"{actor}*.json") if name.fullmatch(path.name))
