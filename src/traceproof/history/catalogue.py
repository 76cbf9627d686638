"""Catalogue of bugs that packages had: one YAML file each in `bugs/`, read off the differences between releases.

Facts only: no code and no sentence of the packages. docs/history.md says how to add one.
"""

from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from enum import StrEnum
from functools import cache
from importlib import resources
from types import MappingProxyType
from typing import Annotated, Self

from packaging.version import InvalidVersion, Version
from pydantic import AfterValidator, BaseModel, Field, StringConstraints, ValidationError, model_validator
from ruamel.yaml import YAML

from traceproof.dataset.fetch import CLOSED, Text
from traceproof.errors import TraceproofError
from traceproof.ops import registry
from traceproof.stacks import STACKS, truths_of

FOLDER = "bugs"


class Kind(StrEnum):
    """What kind of mistake a bug is."""

    MASK = "mask"
    ADDRESS = "address"
    STATE = "state"
    RACE = "race"
    CACHE = "cache"
    DTYPE = "dtype"
    UNDERFLOW = "underflow"
    TIE = "tie"
    LAYOUT = "layout"
    SCALE = "scale"
    RECURRENCE = "recurrence"


class Hardware(StrEnum):
    """The least that shows a bug; `cpu` means by Triton's interpreter or by a native form."""

    CPU = "cpu"
    GPU = "gpu"
    SM90 = "sm90"
    SM100 = "sm100"


class Shows(StrEnum):
    """How a bug shows: by wrong numbers, by an error or a crash, or by a call that never ends."""

    WRONG = "wrong"
    ERROR = "error"
    HANG = "hang"


class Cases(StrEnum):
    """The class of cases that shows a bug."""

    REGULAR = "regular"
    EDGE = "edge"
    ADVERSARIAL = "adversarial"
    EXTREME_VALUES = "extreme_values"
    FAR_ADDRESSES = "far_addresses"
    LONG_CONTEXTS = "long_contexts"
    ODD_SIZES = "odd_sizes"
    LAYOUTS = "layouts"
    STATE = "state"
    RACES = "races"
    SAMPLERS = "samplers"

    @property
    def stressing(self) -> bool:
        """Whether cases of the class are of size `stress`, as far as an op has them."""
        return self in {Cases.EXTREME_VALUES, Cases.FAR_ADDRESSES, Cases.LONG_CONTEXTS}


def _version(text: str) -> str:
    try:
        Version(text)
    except InvalidVersion as error:
        raise ValueError("is no version") from error
    return text


Release = Annotated[str, AfterValidator(_version)]
DISTRIBUTIONS: Mapping[str, str] = {
    name: stack.name for stack in STACKS.values() if stack.origin for name in (stack.distribution, *stack.formerly)
}


class Evidence(BaseModel):
    """A file of the package, and what changed in it between the two releases."""

    model_config = CLOSED
    file: Text
    change: Text


class Bug(BaseModel):
    """One bug."""

    model_config = CLOSED | {"strict": False}
    id: Annotated[str, StringConstraints(pattern=r"^[a-z0-9]+(-[a-z0-9]+)*$")]  # the file's name
    title: Text  # what was wrong
    upstream: Text | None = None  # number of the issue or change, where it is known
    kind: Kind  # of mistake
    op_type: Text  # whose ground truth has it
    package: Text  # the distribution whose releases have it
    since: Release | None = None  # the first release known to have it; None: only `last_bad` is known to
    # last_bad, first_good: the releases before and after the fix
    last_bad: Release
    first_good: Release
    hardware: Hardware  # the least that shows it
    shows: Shows  # how it shows
    cases: Cases  # the class of cases that shows it
    needs: Text  # what such a case has to have
    definitions: tuple[Text, ...] = ()  # patterns of the definitions to run; empty: all of the op_type
    # sizes of const axes to run instead of the definition's
    axes: dict[str, Annotated[int, Field(ge=1)]] = Field(default_factory=dict)
    # of inputs and outputs, to run instead of the definition's
    dtypes: dict[str, Text] = Field(default_factory=dict)
    in_turn: bool = False  # whether the definition as it is runs before it with those dtypes, in one process
    shown_by: tuple[Text, ...] = ()  # ids of the cases that show it, which alone are run and counted; empty: all
    ground_truths: tuple[Text, ...] = ()  # of the stack, which alone are run; empty: all
    # of the environment, that the package's own choice of kernels follows
    variables: dict[str, Text] = Field(default_factory=dict)
    unreachable: Text | None = None  # why no adapter's call reaches it; None: one does
    evidence: Annotated[tuple[Evidence, ...], Field(min_length=1)]  # what the releases' sources show

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.op_type not in registry.known():
            raise ValueError(f"op_type {self.op_type!r} is none; known: {', '.join(registry.known())}")
        if self.package not in DISTRIBUTIONS:
            raise ValueError(f"package {self.package!r} is no stack's; known: {', '.join(DISTRIBUTIONS)}")
        if unknown := set(self.ground_truths) - set(truths_of(self.stack)):
            raise ValueError(f"{', '.join(sorted(unknown))} is no ground truth of the stack {self.stack}")
        if not self.oldest_bad <= Version(self.last_bad) < Version(self.first_good):
            raise ValueError("since, last_bad and first_good are not in order")
        return self

    @property
    def oldest_bad(self) -> Version:
        """The first release known to have it."""
        return Version(self.since or self.last_bad)

    @property
    def stack(self) -> str:
        """The stack that the package is the ground truth of."""
        return DISTRIBUTIONS[self.package]

    def had(self, version: str) -> bool:
        """Whether a release has it, as far as is known."""
        return self.oldest_bad <= Version(version) <= Version(self.last_bad)


@cache
def bugs() -> Mapping[str, Bug]:
    """All bugs by id, sorted. Raises TraceproofError: a file can not be used."""
    folder = resources.files(__package__) / FOLDER
    files = sorted((file for file in folder.iterdir() if file.name.endswith(".yaml")), key=lambda file: file.name)
    return MappingProxyType(
        {bug.id: bug for bug in (parsed(file.name, file.read_text("utf-8")) for file in files)}
    )


def beside(bug: Bug, version: str) -> set[str]:
    """Ids of other bugs of the same package and op_type that a release has and an adapter reaches."""
    others = (one for one in bugs().values() if one.id != bug.id and one.unreachable is None)
    return {
        one.id for one in others if (one.package, one.op_type) == (bug.package, bug.op_type) and one.had(version)
    }


def parsed(name: str, text: str) -> Bug:
    """The bug that a file of this name describes. Raises TraceproofError: it describes none."""
    try:
        return Bug.model_validate({"id": name.removesuffix(".yaml"), **YAML(typ="safe").load(text)})
    except ValidationError as error:
        problems = [f"{'.'.join(map(str, one['loc'])) or 'the file'}: {one['msg']}" for one in error.errors()]
        raise TraceproofError(f"{FOLDER}/{name} describes no bug", problems=problems) from error


def chosen(names: Iterable[str]) -> list[Bug]:
    """The bugs of these ids; all where none is given. Raises TraceproofError: there is no such bug."""
    known, wanted = bugs(), list(names)
    absent = [name for name in wanted if name not in known]
    if absent:
        close = get_close_matches(absent[0], known, n=1)
        hint = f"Did you mean {close[0]}? " if close else ""
        raise TraceproofError(
            f"there is no bug {', '.join(absent)}", todo=f"{hint}`traceproof replay-history --list` names them."
        )
    return [known[name] for name in wanted] or list(known.values())
