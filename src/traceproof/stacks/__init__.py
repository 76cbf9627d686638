"""Stacks: where ground truths come from, what they run in, and all that is known of each by name.

A stack is a record, `STACK` in a module of this folder: whoever adds a stack adds a file. Beside it
come its ground truths in the ops and its pins: a dependency group in pyproject.toml, `envs/<name>.txt`, and a
source in sources.lock where it has an origin. Standard library only, since every interpreter reads the records.
"""

import importlib
import pkgutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

LIBRARIES = "TRACEPROOF_LIBRARIES"  # variable that names the folder of modules built ahead: <name>/<name>.so


@dataclass(frozen=True, slots=True, kw_only=True)
class GroundTruth:
    """A ground truth: an implementation of that name; functions decorated by `@OP.truth` are its calls."""

    name: str  # of the implementation
    label: str  # what people call it
    calls: str  # what it calls, to follow "agrees with"
    priority: int  # place in the specified order; the smallest comes first
    eager: bool = False  # whether it is PyTorch operation by operation, so that memory holds what is between them


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceOrigin:
    """Where a source comes from if nothing else is said."""

    url: str  # its repository
    package: str = ""  # what its releases are called; empty: it has none
    inside: str = ""  # the folder of a release's source package that is meant; empty: the release itself
    folders: tuple[str, ...] = ()  # all that is checked out (cone patterns); empty: everything
    submodules: tuple[str, ...] = ()  # paths of the submodules that ground truths compile against
    place: str = ""  # the repository's folder that holds the package; empty: the repository itself
    # what a build puts into the package beside its Python files: name in `<package>/data` -> path in the
    # repository
    data: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Module:
    """A kernel module that a stack compiles before its first use."""

    generator: str  # API key of the function that describes it
    args: tuple[Any, ...] = ()  # its arguments, JSON values; a dtype is written as `torch.bfloat16`
    # pattern found in the names of source files that no call of ours reaches, without their suffix
    unused: str | None = None
    # whether the generator compiles the module into the stack's own cache, and does not describe it
    compiles: bool = False

    @property
    def label(self) -> str:
        """Short text that is unique among modules."""
        parts = [str(arg).removeprefix("torch.") for arg in self.args]
        return "-".join([self.generator.removeprefix("gen_"), *parts])


@dataclass(frozen=True, slots=True, kw_only=True)
class Stack:
    """One stack."""

    name: str  # of the stack, its environment, its dependency group and its file `envs/<name>.txt`
    truths: tuple[GroundTruth, ...] = ()  # the ground truths that run in it
    # what is imported; `distribution` is what is installed, `formerly` what held the package before it
    package: str
    distribution: str
    formerly: tuple[str, ...] = ()
    versions: tuple[str, ...] = ()  # further distributions whose versions can change an output
    # API key -> where it may be found (`module:attribute`), the newest name first. The one place that knows what
    # an API is called at which version.
    apis: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    # API keys that a supported version may lack without leaving anything out
    optional: frozenset[str] = frozenset()
    # values of the parameter `backend` by API key, where its annotation does not list them
    backends: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    tuner: str = ""  # `module:class`, whose `choose_one` chooses among tactics; empty: nothing does
    modules: tuple[str, ...] = ()  # further modules that its adapters import
    prepare: str = ""  # `module:function`, called once before anything of the package is imported; empty: nothing
    settings: Mapping[str, str] = field(default_factory=dict)  # variables that it reads, set unless they are given
    # its repository and releases; outputs are then keyed by the code that an op_type can reach in the package.
    # None: by its version.
    origin: SourceOrigin | None = None
    tagged: bool = False  # whether it is what the dataset's `fi_api:` tags name functions of
    # `module:function`, which says for a function's dotted name and a definition's inputs which parameter takes
    # each, and which element of a tuple, if it is one; empty: nothing says so
    parameters: str = ""
    # whether its own tests are those of linear attention that `traceproof coverage` reads
    linear_attention: bool = False
    main: bool = False  # whether planning, references, oracles and judging run in it
    triton: bool = False  # whether its kernels are Triton's alone, so that TRITON_INTERPRET=1 runs them on a CPU
    reads_models: bool = False  # whether it is built to read models with, and runs no kernel
    cpu: str = ""  # the environment in its place where there is no NVIDIA driver; empty: there is none
    # what an environment takes when it is installed, where it is not GPU_GB
    gb: Mapping[str, float] = field(default_factory=dict)
    toolkit: bool = False  # whether it compiles with nvcc, so that `cuda_home` may name a toolkit of the machine
    needs_nvcc: bool = False  # whether it can not do without
    # by API key of a kernel module's generator, how long the module builds alone on 16 cores; only the order
    # matters
    build_seconds: Mapping[str, float] = field(default_factory=dict)
    # generators of modules whose longest file takes about as long as all files of all modules
    long_files: frozenset[str] = frozenset()
    # variable of the environment -> folder below the stack's cache
    caches: Mapping[str, str] = field(default_factory=dict)
    variables: tuple[str, ...] = ()  # prefixes of what workers for trusted code see of the environment

    @property
    def label(self) -> str:
        """What people call it."""
        return self.truths[0].label if self.truths else self.name

    def places(self, key: str) -> tuple[str, ...]:
        """Where an API may be found; a key `module:attribute`, which one op_type alone uses, says it itself."""
        return (key,) if ":" in key else self.apis[key]

    def preparation(self) -> Callable[[], None] | None:
        """The function that `prepare` names; None: nothing has to be done."""
        if not self.prepare:
            return None
        module, _, name = self.prepare.partition(":")
        found: Callable[[], None] = getattr(importlib.import_module(module), name)
        return found

    @property
    def environments(self) -> tuple[str, ...]:
        """The environments that may be built for it."""
        return (self.cpu, self.name) if self.cpu else (self.name,)

    @property
    def unhashed(self) -> frozenset[str]:
        """Those of them whose torch is PyTorch's CPU build: it is not the registry's file, so it has no hash."""
        return frozenset({self.name} if self.reads_models else {self.cpu} - {""})


# The records that there are.


def _discovered() -> Iterator[Stack]:
    for found in pkgutil.iter_modules(__path__):
        stack: Stack = importlib.import_module(f"{__name__}.{found.name}").STACK
        yield stack


def _order(stack: Stack) -> tuple[bool, bool, int]:
    return not stack.main, not stack.truths, min((truth.priority for truth in stack.truths), default=0)


# The main stack first, the others by their ground truths' priority, those without any last.
STACKS: Mapping[str, Stack] = MappingProxyType({one.name: one for one in sorted(_discovered(), key=_order)})
# Ground truths in the specified order of priority.
TRUTHS: Mapping[str, GroundTruth] = {
    truth.name: truth
    for truth in sorted((one for stack in STACKS.values() for one in stack.truths), key=lambda one: one.priority)
}
STACK_OF: Mapping[str, str] = {truth.name: stack.name for stack in STACKS.values() for truth in stack.truths}
# The ground truth that stands for each stack, in that order: one that shares a stack is not among them.
FIRST_TRUTHS = tuple(name for name in TRUTHS if STACKS[STACK_OF[name]].truths[0].name == name)
(TAGGED,) = (name for name, stack in STACKS.items() if stack.tagged)
(MAIN,) = (name for name, stack in STACKS.items() if stack.main)
(READER,) = (name for name, stack in STACKS.items() if stack.reads_models)
# Stacks that run kernels: what a machine with a GPU has.
KERNELS = tuple(name for name, stack in STACKS.items() if not stack.reads_models)
# The package of every stack whose code is followed; the others are keyed by their versions alone.
PACKAGES: Mapping[str, str] = {name: stack.package for name, stack in STACKS.items() if stack.origin is not None}
ENVIRONMENTS = tuple(name for stack in STACKS.values() for name in stack.environments)
UNHASHED = frozenset(name for stack in STACKS.values() for name in stack.unhashed)


def truths_of(stack: str) -> tuple[str, ...]:
    """The ground truths that run in a stack, or in an environment of that name."""
    found = next((one for one in STACKS.values() if stack in one.environments), None)
    return tuple(truth.name for truth in found.truths) if found else ()


def distribution(name: str) -> str:
    """The package that a stack's name stands for in versions; a name that is no stack's stands for itself."""
    return STACKS[name].distribution if name in STACKS else name
