"""What an op is: the one place that knows an op_type."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypedDict, Union

from traceproof.dataset.definition import DType
from traceproof.lazy import torch
from traceproof.ops import far
from traceproof.ops.cases import LOSSLESS_ROWS, STRESS, Case, Further
from traceproof.ops.compare import Close, Comparison, IndexSet
from traceproof.ops.far import Far

if TYPE_CHECKING:
    from traceproof.dataset.constants import Rule
    from traceproof.dataset.definition import Definition, TensorSpec
    from traceproof.draw import Draw
    from traceproof.ops.adapter import Adapter
    from traceproof.ops.extraction import Extraction
    from traceproof.ops.formula import Variant
    from traceproof.ops.lossless import Exactly

Value = Union["torch.Tensor", int, float, bool, None]
Values = dict[str, Value]
Given = Mapping[str, Any]  # the same, for calls of packages
Tensors = dict[str, "torch.Tensor"]

KINDS = frozenset(DType)
# Of an axis of a scaled-down definition: so many elements that rounding errors add up as they do in a kernel.
SCALED_DOWN_LEAST = 256


class Dtypes(Mapping[str, "torch.dtype"]):
    """PyTorch's dtypes by the schema's names, for those that PyTorch has."""

    def __getitem__(self, name: str) -> torch.dtype:
        """The dtype of that name. Raises KeyError: PyTorch has none."""
        if name not in KINDS or not hasattr(torch, name):
            raise KeyError(name)
        found: torch.dtype = getattr(torch, name)
        return found

    def __iter__(self) -> Iterator[str]:
        return (kind for kind in DType if hasattr(torch, kind))

    def __len__(self) -> int:
        return len(list(iter(self)))


TORCH_DTYPES = Dtypes()


def dtype_of(spec: TensorSpec) -> torch.dtype:
    """The dtype of an input or output as PyTorch has it."""
    return TORCH_DTYPES[spec.dtype]


def tensor(inputs: Given, name: str) -> torch.Tensor:
    """An input that must be a tensor. Raises TypeError: it is none."""
    value = inputs[name]
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"{name} is a {type(value).__name__}, not a tensor")
    return value


def scalar(inputs: Given, name: str) -> float:
    """An input that must be a Python number, or a tensor of one element. Raises TypeError: it is neither."""
    value = inputs[name]
    if isinstance(value, torch.Tensor):
        return float(value.item())
    if value is None:
        raise TypeError(f"{name} is None, not a number")
    return float(value)


class Unsupported(Exception):  # noqa: N818 - a finding, not an error
    """This op has no oracle for a definition of this form; the text says which part it does not know."""


class Facts(TypedDict, total=False):
    """Facts of an op that the driver reads; see `Op`."""

    long: bool
    compiles_late: tuple[str, ...]
    staged: bool
    coupled: bool
    without_api: Callable[[Definition], bool]


class Op(ABC):
    """An op_type: its cases, its inputs, its oracle.

    An op chooses by the definition's axes, inputs and outputs, never by parts of its name. Constants that
    are no input (an eps, a number of groups) come with all that states them as `definition.constants`; it never
    reads the reference.
    """

    op_type: str
    # What the driver reads, which has no PyTorch.
    family: str = ""  # `verify_<family>` and `nox -s test_<family>` cover it
    # its references take the longest and so decide when a run is done: they start first, and more of them run side
    # by side
    long: bool = False
    # ground truths that compile something for most of its cases when called; they start first
    compiles_late: tuple[str, ...] = ()
    staged: bool = False  # its definitions have a tag `stage:<stage>`
    coupled: bool = False  # the parts of a batch are not independent: one alone need not give what it gives in it
    # whether FlashInfer has no call for a definition, although it has some for the op_type
    without_api: Callable[[Definition], bool] = staticmethod(lambda _: False)
    rules: tuple[Rule, ...] = ()  # where each constant is stated that is no input
    extraction: Extraction | None = None  # how its calls are found in a model
    variants: Sequence[Variant] = ()  # equivalent ways of computing it; generic mutants are made from the first
    mutants: Sequence[Variant] = ()  # bugs that a kernel could have
    # values of inputs for which every right kernel is exact until it rounds the output; empty: none are known.
    # They name all inputs of floating point but scalars that change nothing. See `ops.lossless`
    lossless: Callable[[Definition], Mapping[str, Exactly]] = staticmethod(lambda _: {})
    # whether right kernels are as exact on a GPU, where divisions are approximate and products may be split
    exact_on_gpu: Callable[[Definition], bool] = staticmethod(lambda _: True)
    # what is enlarged in cases of far addresses, by the axis of the rows, where they are computed by themselves
    far: Callable[[Definition, str], Far] = staticmethod(lambda _, rows: Far(axis=rows))
    inputs_summed: Sequence[str] = ()  # see `summed`

    @cached_property
    def truths(self) -> dict[str, list[Adapter]]:
        """Calls of packages that compute it, by ground truth, in order of preference."""
        return {}

    def of_form(self, definition: Definition) -> Op:
        """The op of the form that a definition has, where an op_type has several that share nothing."""
        del definition
        return self

    def check(self, definition: Definition) -> None:  # noqa: B027 - knowing every form is a fine default
        """Say whether `oracle` knows this form of the op.

        Raises Unsupported: it does not; the definition is then judged without numerics.
        """

    @abstractmethod
    def cases(self, definition: Definition, *, sizes: Sequence[str], seed: int) -> Iterable[Case]:
        """The cases of `sizes`, and the edge and adversarial ones, in a fixed order."""

    def stress(self, definition: Definition, *, seed: int) -> Iterable[Case]:
        """The cases of size class `stress`, in a fixed order.

        The default, where rows are computed by themselves: so many that 32 bits do not count a tensor's elements.
        """
        enlarged = self.enlarged(definition)
        plain = next(
            (case for case in self.cases(definition, sizes=("small",), seed=seed) if not case.params), None
        )
        if enlarged is not None and plain is not None:
            axes = {**plain.axes, enlarged.axis: far.ROWS}
            yield Case("stress-far", STRESS, axes, seed, {far.SIZE: enlarged.size(definition, far.ROWS, axes)})

    def boundaries(self, definition: Definition, *, seed: int) -> Iterable[Case]:
        """Cases, for kernels alone, in which the element at which a loop begins or ends decides the row.

        The default: none. Cases of attention lean to such keys, those of experts to the first and the last.
        """
        del definition, seed
        return ()

    def enlarged(self, definition: Definition) -> Far | None:
        """What is enlarged in cases of far addresses; None: nothing can be. The default: rows, as `far` says."""
        rows = self.row_axis(definition)
        return None if rows is None else self.far(definition, rows)

    def planned(self, definition: Definition, *, sizes: Sequence[str], seed: int) -> Iterator[Case]:
        """All cases of sizes out of ALL_SIZES."""
        yield from self.cases(definition, sizes=[size for size in sizes if size != STRESS], seed=seed)
        if STRESS in sizes:
            yield from self.stress(definition, seed=seed)

    def of_size(self, definition: Definition, case: Case, count: int, *, long: bool) -> Case:
        """A case like this one with `count` rows, tokens or sequences; `long`: one sequence of so many.

        The default adds the same number to all axes, so that what must be no smaller than another one stays so. A
        case that lists lengths is left as it is.
        """
        del definition, long
        if any(isinstance(value, list | tuple) for value in case.params.values()):
            return case
        more = max(0, count - min(case.axes.values(), default=0))
        return replace(case, axes={name: size + more for name, size in case.axes.items()})

    def unusual(self, definition: Definition) -> Mapping[str, Sequence[str]]:
        """What hidden cases put into inputs (`run.case.put_unusual`), and the inputs that it befalls."""
        del definition
        return {}

    def lossless_case(self, definition: Definition, base: Case) -> Case:
        """The sizes of the case with these values, from an ordinary one. The default: LOSSLESS_ROWS rows."""
        return self.of_size(definition, base, LOSSLESS_ROWS, long=False)

    def errors(self, definition: Definition, inputs: Values) -> Iterator[tuple[str, Values]]:
        """Inputs that the definition rules out, each with what is wrong: a kernel has to raise, or to be right.

        The default: another dtype of the first tensor of 16-bit floats, and a tensor whose last axis is one short.
        """
        tensors = {name: one for name in definition.inputs if isinstance(one := inputs[name], torch.Tensor)}
        narrow = {torch.bfloat16: torch.float16, torch.float16: torch.bfloat16}
        first = next((name for name, one in tensors.items() if one.dtype in narrow), None)
        if first is not None:
            for dtype in (torch.float32, narrow[tensors[first].dtype]):
                yield (
                    f"{first} in {str(dtype).removeprefix('torch.')}",
                    {**inputs, first: tensors[first].to(dtype)},
                )
        for name, one in tensors.items():
            if one.dim() and one.shape[-1] > 1 and one.is_floating_point():
                yield f"the last axis of {name} one short", {**inputs, name: one[..., :-1].contiguous()}

    def no_inputs(self, definition: Definition) -> str | None:
        """Why no inputs can be drawn for a definition, whatever the case; None: they can."""
        del definition
        return None

    @abstractmethod
    def inputs(self, definition: Definition, case: Case, draw: Draw) -> Values:
        """The definition's inputs in its order: tensors on `draw.device`, Python scalars, or None if optional."""

    @abstractmethod
    def oracle(self, definition: Definition, inputs: Values) -> Tensors:
        """The outputs in float64 (integers stay integers), written independently of any reference.

        Entries named `<output>@<what>` carry what a comparison needs beside the value.
        """

    def baseline(self, definition: Definition, inputs: Values) -> Tensors:
        """Outputs judged by `Close`, computed naively at the kernel's precision, in the definition's dtypes."""
        del definition, inputs
        return {}

    def varied(self, variant: Variant, subject: Subject) -> Tensors | None:
        """What a variant or a mutant gives for a case, in the outputs' dtypes; None where it does not apply."""
        raise NotImplementedError(f"{self.op_type} does not say how {variant.name} computes {subject.case.id}")

    def expected(self, definition: Definition, inputs: Values) -> Tensors:
        """The oracle's entries, and the baselines as `<output>@baseline`."""
        baselines = self.baseline(definition, inputs)
        return {
            **self.oracle(definition, inputs),
            **{f"{name}@baseline": value for name, value in baselines.items()},
        }

    def comparisons(self, definition: Definition) -> Mapping[str, Comparison]:
        """How each output is compared. The default is Close: one rounding of the output is the whole baseline."""
        return {name: Close() for name in definition.outputs}

    def memory(self, definition: Definition, case: Case) -> int:
        """Estimated peak in bytes of running the reference or the oracle once, inputs included.

        The default: all inputs and outputs once as stored and twice in float64.
        """
        return sum(
            math.prod(definition.shape_of(spec, case.axes) or ()) * (spec.dtype.bits + 128) // 8
            for spec in (*definition.inputs.values(), *definition.outputs.values())
        )

    def oracle_memory(self, definition: Definition, case: Case) -> int:
        """Estimated peak in bytes of the oracle alone, where a reference needs far more."""
        return self.memory(definition, case)

    def smaller(self, definition: Definition, fixed: Collection[str]) -> Mapping[str, int]:
        """Sizes of const axes in a smaller definition that means the same (`ops.scaled_down`); empty: none.

        The default divides all large axes of tensors but `fixed` ones by one power of two, so that their ratios
        stay.
        """
        specs = (*definition.inputs.values(), *definition.outputs.values())
        used = {axis for spec in specs for axis in spec.shape or ()}
        axes = {name: size for name, size in definition.const_axes.items() if name in used and name not in fixed}
        return scaled_down({name: size for name, size in axes.items() if size >= 2 * SCALED_DOWN_LEAST})

    def trials(self, definition: Definition, case: Case) -> int:
        """How often an implementation runs the case, stacked along a new first axis; 0: once, no such axis."""
        del definition, case
        return 0

    def further(self, definition: Definition, case: Case) -> Further | None:
        """How a sampler draws on after its trials, in calls with repeated rows; None: it does not."""
        del definition, case
        return None

    def tells_apart(self, definition: Definition, one: Values, other: Values) -> bool:
        """Whether what is expected of two sets of inputs differs: few candidates may leave only one choice.

        True where the oracle can not say.
        """
        try:
            self.check(definition)
        except Unsupported:
            return True
        sets = {name for name, kind in self.comparisons(definition).items() if isinstance(kind, IndexSet)}
        first, second = (
            {
                name: value.sort(-1).values if name in sets else value
                for name, value in self.oracle(definition, inputs).items()
                if name in definition.outputs
            }
            for inputs in (one, other)
        )
        return not first or any(not torch.equal(value, second[name]) for name, value in first.items())

    def row_axis(self, definition: Definition) -> str | None:
        """Var axis whose rows are independent: the oracle of some rows is those rows of the oracle.

        None, the default: there is no such axis. Every output must have it as its first one.
        """
        del definition
        return None

    def summed(self, definition: Definition) -> tuple[str, ...]:
        """Inputs over whose last axis the op sums, where zeros in all of them add nothing (`judge.precision`)."""
        return tuple(name for name in self.inputs_summed if name in definition.inputs)

    def mutated(self, definition: Definition) -> frozenset[str]:
        """Inputs that a call may write to. The default: those that an output is written to."""
        return definition.in_place

    def judged(self, definition: Definition) -> dict[str, TensorSpec]:
        """All that a call gives: the outputs, then inputs that it writes to and that no output stands for."""
        written = sorted(self.mutated(definition) - definition.in_place)
        return {**definition.outputs, **{name: definition.inputs[name] for name in written}}


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """One case, drawn and solved."""

    definition: Definition
    op: Op
    case: Case
    inputs: Values
    oracle: Tensors  # the oracle's entries and baselines, as `output` or `output@what`; empty: there is no oracle
    seed: int  # of this round; what is random in a way of computing starts from it

    @property
    def trials(self) -> int:
        """How often a sampling op is run; 0: it is no such op."""
        return self.op.trials(self.definition, self.case)

    def tensor(self, name: str) -> torch.Tensor:
        """An input that is a tensor."""
        return tensor(self.inputs, name)

    def with_inputs(self, **changes: Value) -> Values:
        """The inputs with some replaced."""
        return {**self.inputs, **changes}


def scaled_down(sizes: Mapping[str, int]) -> dict[str, int]:
    """All sizes divided by the largest power of two that leaves whole numbers of at least SCALED_DOWN_LEAST."""
    factor = 1
    while sizes and all(
        size % (2 * factor) == 0 and size // (2 * factor) >= SCALED_DOWN_LEAST for size in sizes.values()
    ):
        factor *= 2
    return {name: size // factor for name, size in sizes.items()}


def specified(
    definition: Definition, case: Case, names: Iterable[str]
) -> tuple[dict[str, tuple[int, ...]], dict[str, torch.dtype]]:
    """Shapes of some inputs in a case, () for a scalar's, and their dtypes."""
    specs = {name: definition.inputs[name] for name in names}
    shapes = {name: definition.shape_of(spec, case.axes) or () for name, spec in specs.items()}
    return shapes, {name: dtype_of(spec) for name, spec in specs.items()}


def rounded(definition: Definition, values: Tensors) -> Tensors:
    """The definition's outputs out of these, each in its dtype."""
    return {name: values[name].to(dtype_of(spec)) for name, spec in definition.outputs.items()}


def ordered(definition: Definition, values: Mapping[str, Any]) -> Values:
    """`values` in the order of the definition's inputs. Raises KeyError: an input is missing."""
    return {name: values[name] for name in definition.inputs}
