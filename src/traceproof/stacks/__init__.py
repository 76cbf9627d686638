"""Stacks: where ground truths come from, what they run in, and all facts that depend on a package's name.

A stack is a record, `STACK` in a module of this folder, so adding a stack adds a file. It also needs ground truths
in the ops and its pins: a dependency group in pyproject.toml, `envs/<name>.txt`, and a source in sources.lock if
it has an origin. Imports the standard library alone, since every interpreter reads the records.
"""

import importlib
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

LIBRARIES = "TRACEPROOF_LIBRARIES"  # variable: folder of modules built ahead, as <name>/<name>.so


@dataclass(frozen=True, slots=True, kw_only=True)
class GroundTruth:
    """A ground truth: an implementation of that name; functions decorated by `@OP.truth` are its calls."""

    name: str  # of the implementation
    label: str  # its name for people
    calls: str  # what it calls, as text after "agrees with"
    priority: int  # rank in the specified order, the smallest first


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceOrigin:
    """Where a source comes from by default."""

    url: str  # its repository
    package: str = ""  # name of its releases; empty: it has none
    inside: str = ""  # the wanted folder of a release's source package; empty: all
    folders: tuple[str, ...] = ()  # cone patterns of a sparse checkout; empty: all files
    submodules: tuple[str, ...] = ()  # submodules that its kernels are compiled against
    place: str = ""  # folder of the repository that has the package; empty: its root
    folder: str = ""  # its folder among the sources; empty: its name
    # what a build adds to the package: name in `<package>/data` -> path in the repository
    data: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Module:
    """A kernel module that a stack compiles before its first use."""

    generator: str  # API key of the function that describes it
    args: tuple[Any, ...] = ()  # its arguments, as JSON; a dtype is written as `torch.bfloat16`
    # pattern in names of source files, without suffix, that none of our calls needs
    unused: str | None = None
    # whether the generator itself compiles into the stack's cache, and describes nothing
    compiles: bool = False

    @property
    def label(self) -> str:
        """A short text that is unique among modules."""
        parts = [str(arg).removeprefix("torch.") for arg in self.args]
        return "-".join([self.generator.removeprefix("gen_"), *parts])


@dataclass(frozen=True, slots=True, kw_only=True)
class Stack:
    """A package with ground truths, or one that models are read with, and its environment."""

    name: str  # also of its environment, its dependency group and `envs/<name>.txt`
    truths: tuple[GroundTruth, ...] = ()  # the ground truths that run in it
    # name for imports; `distribution` is the installed one's name, `formerly` earlier ones'
    package: str
    distribution: str
    formerly: tuple[str, ...] = ()
    versions: tuple[str, ...] = ()  # further distributions whose versions can change an output
    # API key -> places (`module:attribute`) where it may be, the newest version's first. API names by version are
    # known only here.
    apis: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    # API keys that a supported version may lack without losing anything
    optional: frozenset[str] = frozenset()
    # API key -> values of parameter `backend`, if its annotation does not list them
    backends: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    tuner: str = ""  # `module:class` whose `choose_one` chooses among tactics; empty: none
    modules: tuple[str, ...] = ()  # further modules that its adapters import
    prepare: str = ""  # `module:function`, called once before anything of the package is imported; empty: none
    # environment variables that it reads, and values for those that are not set
    settings: Mapping[str, str] = field(default_factory=dict)
    # its repository and releases; the package's files then count in cache keys. None: only its version does.
    origin: SourceOrigin | None = None
    tagged: bool = False  # whether the dataset's `fi_api:` tags name its functions
    # `module:function` that gives, for a function's dotted name and a definition's inputs, each one's parameter
    # and place in its tuple; empty: none
    parameters: str = ""
    # whether `traceproof coverage` reads its tests of linear attention
    linear_attention: bool = False
    main: bool = False  # whether planning, references, oracles and judging run in it
    triton: bool = False  # whether all its kernels are Triton's, so that TRITON_INTERPRET=1 runs them on a CPU
    reads_models: bool = False  # whether it only reads models, and runs no kernels
    cpu: str = ""  # the environment that replaces it without an NVIDIA driver; empty: none
    # GB that an installed environment takes, if not GPU_GB
    gb: Mapping[str, float] = field(default_factory=dict)
    toolkit: bool = False  # whether it compiles with nvcc, so that `cuda_home` may name the machine's toolkit
    needs_nvcc: bool = False  # whether it can not work without nvcc
    # module of its functions -> API key of the generator, without arguments, of the kernel module that these call
    compiled: Mapping[str, str] = field(default_factory=dict)
    # API key of a generator -> seconds that the module builds alone on 16 cores; only their order matters
    build_seconds: Mapping[str, float] = field(default_factory=dict)
    # generators of modules whose longest file takes about as long as all files of all modules
    long_files: frozenset[str] = frozenset()
    # environment variable -> folder in the stack's cache
    caches: Mapping[str, str] = field(default_factory=dict)
    variables: tuple[str, ...] = ()  # prefixes of environment variables that workers for trusted code get

    @property
    def label(self) -> str:
        """Its name for people."""
        return self.truths[0].label if self.truths else self.name

    def places(self, key: str) -> tuple[str, ...]:
        """Places of an API; a key `module:attribute`, used by one op_type alone, is a place itself."""
        return (key,) if ":" in key else self.apis[key]

    def preparation(self) -> Callable[[], None] | None:
        """The function that `prepare` names; None: there is none."""
        if not self.prepare:
            return None
        module, _, name = self.prepare.partition(":")
        function: Callable[[], None] = getattr(importlib.import_module(module), name)
        return function

    @property
    def environments(self) -> tuple[str, ...]:
        """The environments that may be built for it."""
        return (self.cpu, self.name) if self.cpu else (self.name,)


# All records.


def _order(stack: Stack) -> tuple[bool, bool, int]:
    return not stack.main, not stack.truths, min((truth.priority for truth in stack.truths), default=0)


_found = (importlib.import_module(f"{__name__}.{module.name}").STACK for module in pkgutil.iter_modules(__path__))
# The main stack first, then by their ground truths' priority, then those without any.
STACKS: Mapping[str, Stack] = MappingProxyType({stack.name: stack for stack in sorted(_found, key=_order)})
# Ground truths in the specified order of priority.
TRUTHS: Mapping[str, GroundTruth] = {
    truth.name: truth
    for truth in sorted((one for stack in STACKS.values() for one in stack.truths), key=lambda one: one.priority)
}
STACK_OF: Mapping[str, str] = {truth.name: stack.name for stack in STACKS.values() for truth in stack.truths}
# The first ground truth of each stack, in that order.
FIRST_TRUTHS = tuple(name for name in TRUTHS if STACKS[STACK_OF[name]].truths[0].name == name)
(TAGGED,) = (name for name, stack in STACKS.items() if stack.tagged)
(MAIN,) = (name for name, stack in STACKS.items() if stack.main)
(READER,) = (name for name, stack in STACKS.items() if stack.reads_models)
# Stacks that run kernels.
KERNELS = tuple(name for name, stack in STACKS.items() if not stack.reads_models)
# Package of every stack with an origin; others count in cache keys by version only.
PACKAGES: Mapping[str, str] = {name: stack.package for name, stack in STACKS.items() if stack.origin is not None}
ENVIRONMENTS = tuple(name for stack in STACKS.values() for name in stack.environments)
# Those whose torch is PyTorch's CPU build, which is not the registry's file, so that it has no hash.
UNHASHED = frozenset(stack.name if stack.reads_models else stack.cpu for stack in STACKS.values()) - {""}


def truths_of(stack: str) -> tuple[str, ...]:
    """The ground truths of a stack, or of an environment of that name."""
    owner = next((one for one in STACKS.values() if stack in one.environments), None)
    return tuple(truth.name for truth in owner.truths) if owner else ()


def distribution(name: str) -> str:
    """The distribution of a stack; any other name is returned as it is."""
    return STACKS[name].distribution if name in STACKS else name
