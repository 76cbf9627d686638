"""A kernel call of a model, with its constants."""

from dataclasses import dataclass, field
from typing import Any

Fact = int | float | str | bool | None


@dataclass(frozen=True, slots=True)
class Kernel:
    """One kernel call of a model."""

    kind: str  # of call, e.g. norm, linear, mla_absorbed.
    facts: tuple[tuple[str, Fact], ...]  # its constants on one rank, sorted by name
    count: int = 1  # how many modules make the call
    paths: tuple[str, ...] = ()  # the modules, layer numbers starred
    note: str = field(default="", compare=False)  # what the constants do not say, for the definition's description

    def __getitem__(self, name: str) -> Any:  # noqa: ANN401 - the facts' types differ by name
        return dict(self.facts)[name]

    @property
    def role(self) -> str:
        """The last part of the first module's path, e.g. `qkv_proj`."""
        return self.paths[0].rpartition(".")[2] if self.paths else self.kind


def kernel(kind: str, *, count: int, path: str, note: str = "", **facts: Fact) -> Kernel:
    """A kernel with its facts sorted."""
    return Kernel(kind, tuple(sorted(facts.items())), count, (path,), note)
