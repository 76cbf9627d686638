"""What was found of a machine, as `traceproof doctor --json` writes it."""

from typing import Literal

from pydantic import BaseModel, ConfigDict

FORM = 1  # changes when a key goes or means something else


class Record(BaseModel):
    """Closed and frozen, as all records here."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Program(Record):
    """A program of this machine."""

    path: str | None = None  # where it is; None: there is none
    version: str | None = None  # what it says its version is
    problem: str = ""  # why it can not be used; empty if it can


class Gpu(Record):
    """One GPU; `sm` is its compute capability."""

    index: int
    name: str
    sm: str
    memory_gib: float


class Driver(Record):
    """The NVIDIA driver."""

    present: bool  # whether its device files are there: what a run goes by
    version: str | None = None
    gpus: tuple[Gpu, ...] = ()
    problem: str = ""  # why its GPUs could not be listed; empty if they could, or if there is no driver


class Memory(Record):
    """Memory that programs may have, in GiB; `limit` is what one case may use."""

    total: float
    available: float
    limit: float


class Disk(Record):
    """Free space where environments and results are written, in GB, and whether one may write there."""

    free: float
    missing: float
    writable: bool


class Layer(Record):
    """One layer of the isolation of references; `why` says why this kernel does not offer it."""

    name: str
    text: str
    holds: bool
    why: str = ""


State = Literal["ready", "not built", "half-built", "stale pins", "import fails", "no answer", "needs a GPU"]


class StackFound(Record):
    """One configured stack."""

    name: str
    environment: str | None  # the folder that is built for it; None: an interpreter is configured
    python: str  # its interpreter
    state: State
    versions: dict[str, str] = {}  # of the packages that matter, where it could be asked
    failed: dict[str, str] = {}  # what of it can not be imported, and why
    cuda: str = ""
    compiler: Program | None = None  # the CUDA compiler that its builds take; None: it has none, or was not asked
    problem: str = ""  # what is wrong with it otherwise


class Problem(Record):
    """Something that keeps the machine from proving what is configured."""

    what: str  # what is the matter
    command: str = ""  # what mends it, to be run as it stands; empty where no single command does
    todo: str = ""  # what to do where that takes more than a command
    fatal: bool = True  # whether it is missing or broken; what merely weakens a run is not


class Diagnosis(Record):
    """All of it."""

    form: int = FORM
    traceproof: str
    system: str
    python: str
    cores: int
    driver: Driver
    host_compiler: Program
    memory: Memory
    disk: Disk
    isolation: tuple[Layer, ...]
    stacks: tuple[StackFound, ...]
    proves: str  # what references are held against here, in one sentence
    # by op_type, the ground truths that run here; empty where the torch stack can not say
    reach: dict[str, tuple[str, ...]]
    problems: tuple[Problem, ...]
    able: bool  # whether nothing that is configured is missing or broken
