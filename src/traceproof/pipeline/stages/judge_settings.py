"""What judging needs beside the cases. Standard library only, for the process that hands the work out."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from traceproof.store import JUDGED, OUTPUTS, Store

REPLAY = "replay"  # folder of a run's replay bundles


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgeSettings:
    """What a judge needs beside the cases."""

    store: Path  # where outputs and finished rows lie
    code: str  # digest of the judge's own code and the ops'
    tolerance: float | None  # the user's atol and rtol, in place of the calibrated gates
    device: str = "cpu"  # where large cases are judged, `cuda` or `cpu`
    options: str = ""  # further options of commands that repeat a case

    @property
    def outputs(self) -> Store:
        """What actors left."""
        return Store(self.store, OUTPUTS)

    @property
    def judged(self) -> Store:
        """Finished rows."""
        return Store(self.store, JUDGED)

    def as_json(self) -> dict[str, Any]:
        """The settings as a JSON object, its paths absolute."""
        return asdict(self) | {"store": str(self.store.absolute())}

    @classmethod
    def of_json(cls, value: dict[str, Any]) -> Self:
        """The settings that `as_json` wrote."""
        return cls(**{**value, "store": Path(value["store"])})
