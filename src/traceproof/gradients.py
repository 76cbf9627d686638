"""Gradients of functions that support autograd, compared with the gradient of the oracle's float64 formula.

A random weight per output element makes a scalar of the outputs, which is differentiated by every floating-point
input. The oracle itself is differentiated, with inputs in float64; so are naive computations at a kernel's
precision, the errors of whose gradients are the baseline error. No op is listed: what PyTorch can not
differentiate (a choice, a quantised output) has no gradient here, and the row says so.
"""

import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch.autograd.graph import allow_mutation_on_saved_tensors
from torch.utils._python_dispatch import TorchDispatchMode

from traceproof.dataset.definition import Definition
from traceproof.draw import Draw
from traceproof.judge.arbitration import RIGHT
from traceproof.judge.output import Expected, Ruling, judge_output
from traceproof.ops import registry
from traceproof.ops.base import TORCH_DTYPES, Tensors, Values
from traceproof.ops.compare import Close, Comparison, Quantised
from traceproof.reasons import Error, Failure, Skip, Verdict
from traceproof.run.case import CPU, SolvedCase, make_inputs, place
from traceproof.run.schema import PlannedCase, PlannedDefinition, VerdictRow
from traceproof.run.tensors import plain_tensor
from traceproof.run.trusted import named_outputs

GRADIENT = "gradient of {}"  # name of a row's output, by the input
LARGEST = 32 << 20  # bytes that the one case may need if gradients are only reported
MOST = 2 << 30  # ... and each case if they are demanded: autograd keeps intermediate values of the formula
WIDE = frozenset({torch.float64, torch.float32, torch.float16, torch.bfloat16})
# PyTorch's unfused attention in 16 bits reaches 4.5, except in rows where one key has all the weight.
NARROW_GRADIENT = Close(factor=5.0, reason="what is saved for a backward is rounded, and so is what comes back")
WIDE_GRADIENT = Close(factor=16.0, reason="a float32 gradient is rounded no more than the sums before it")
PRODUCTS = frozenset({torch.ops.aten.mm.default, torch.ops.aten.bmm.default, torch.ops.aten.mv.default})
Call = Callable[[Values], Any]


class NarrowProducts(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While active, rounds operands and results of matrix products to a dtype, like unfused kernels."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._dtype = dtype

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401 - what the operation returns
        """Run one operation."""
        del types
        if func not in PRODUCTS:
            return func(*args, **(kwargs or {}))
        found = func(*(x.to(self._dtype).to(x.dtype) for x in args), **(kwargs or {}))
        return found.to(self._dtype).to(found.dtype)


@dataclass(frozen=True, slots=True)
class _Differentiated:
    """A computation's differentiable outputs, and the inputs (leaves) that they depend on."""

    leaves: Tensors
    outputs: Tensors

    @classmethod
    def from_call(
        cls, names: Collection[str], inputs: Values, dtype: torch.dtype | None, call: Call
    ) -> "_Differentiated":
        """Run `call` with detached copies of the inputs `names` as autograd leaves, cast to `dtype` if given.

        Outputs that require no gradient are left out. Raises what `call` raises.
        """
        leaves = {
            name: value.detach().to(dtype or value.dtype, copy=True).requires_grad_()
            for name in names
            if isinstance(value := inputs[name], torch.Tensor)
        }
        found: Mapping[str, Any] = call({**inputs, **leaves})
        tensors = {name: value for name, value in found.items() if isinstance(value, torch.Tensor)}
        return cls(leaves, {name: value for name, value in tensors.items() if value.requires_grad})

    def gradients(self, weights: Tensors) -> dict[str, torch.Tensor | None]:
        """Gradients by input of the sum of outputs times `weights`; None: no weighted output depends on it."""
        chosen = {name: value for name, value in self.outputs.items() if name in weights}
        given = [weights[name].to(value.dtype).to(value.device) for name, value in chosen.items()]
        found = torch.autograd.grad([*chosen.values()], [*self.leaves.values()], given, allow_unused=True)
        return dict(zip(self.leaves, found, strict=True))


def chosen(cases: Collection[PlannedCase], *, demanded: bool) -> list[PlannedCase]:
    """Cases to take gradients of: if demanded all that fit, else the largest ordinary one."""
    fitting = [
        one
        for one in cases
        if one.skip is None
        and not one.hidden
        and not one.trials
        and one.memory <= MOST
        and all(one.case.axes.values())
    ]
    if demanded:
        return fitting
    ordinary = [one for one in fitting if one.case.size not in {"edge", "adversarial"} and one.memory <= LARGEST]
    return [max(ordinary, key=lambda one: one.memory)] if ordinary else fitting[:1]


def rows(  # noqa: PLR0913 - one call, spelled out
    call: Call,
    entry: PlannedDefinition,
    planned: PlannedCase,
    *,
    name: str,
    device: torch.device,
    demanded: bool | Collection[str],
) -> Iterator[VerdictRow]:
    """A row for each differentiable input of a case; none if the function does not support autograd.

    Args:
        call: the function, of the inputs by name.
        entry: what it computes; it has an oracle.
        planned: the case.
        name: the function's name in rows.
        device: of the function's inputs.
        demanded: whether missing autograd support is a failure; or the only inputs to take.
    """
    for of, ruling in _rulings(call, entry.parsed, planned, device=device, demanded=demanded):
        yield entry.row(planned, name, {"device": str(device)}, "", output=GRADIENT.format(of), **ruling.fields)


def _rulings(
    call: Call,
    definition: Definition,
    planned: PlannedCase,
    *,
    device: torch.device,
    demanded: bool | Collection[str],
) -> Iterator[tuple[str, Ruling]]:
    """(input, ruling); ("inputs", ruling) for all together if there are no gradients to compare."""
    op, _ = registry.for_definition(definition)
    drawn = make_inputs(op, definition, planned.case, device=CPU)
    wanted = drawn.keys() if isinstance(demanded, bool) else demanded
    names = [one for one in wanted if isinstance(value := drawn[one], torch.Tensor) and value.dtype in WIDE]
    try:
        with torch.enable_grad():
            given = place(drawn, device)
            ours = _Differentiated.from_call(
                names, given, None, lambda values: named_outputs(definition, call(values))
            )
    except Exception as error:  # noqa: BLE001 - the user's code may raise anything, which the row reports
        if demanded:
            message = f"with inputs that require a gradient: {type(error).__name__}: {error}"
            yield "inputs", Ruling(Verdict.ERROR, Error.EXCEPTION, message, {})
        return
    if not ours.outputs:
        if demanded:
            message = "it takes no part in autograd: no output has a gradient"
            yield "inputs", Ruling(Verdict.FAIL, Failure.PRESENCE, message, {})
        return
    subject = SolvedCase(definition=definition, op=op, case=planned.case, inputs=drawn, oracle={}, seed=0)
    expected = _expected(subject, names, ours.outputs.keys())
    if isinstance(expected, str):
        yield "inputs", Ruling(Verdict.SKIP, Skip.NO_ORACLE, expected, {})
        return
    weights, right = expected
    try:
        found = {one: None if x is None else plain_tensor(x) for one, x in ours.gradients(weights).items()}
    except Exception as error:  # noqa: BLE001 - likewise, in its backward
        message = f"in its backward: {type(error).__name__}: {error}"
        yield "inputs", Ruling(Verdict.ERROR, Error.EXCEPTION, message, {})
        return
    for one, what in right.items():
        absent = Ruling(Verdict.FAIL, Failure.PRESENCE, f"no gradient reaches {one}", {})
        yield one, absent if found[one] is None else judge_output(found[one], what, tolerance=None)


def _expected(
    subject: SolvedCase, names: Collection[str], outputs: Collection[str]
) -> tuple[Tensors, dict[str, Expected]] | str:
    """(weights of the outputs, expected gradient of each input); or a text on why there is none."""
    definition, op, case, inputs = subject.definition, subject.op, subject.case, subject.inputs
    kinds, dtypes = (
        op.comparisons(definition),
        {one: TORCH_DTYPES[x.dtype] for one, x in definition.outputs.items()},
    )
    quantised = any(isinstance(kinds.get(name), Quantised) for name in outputs)
    draw = Draw(definition=definition.name, case=case.id, seed=case.seed, device=CPU)
    ways: list[Call] = [
        partial(op.baseline, definition),
        lambda given: op.varied(RIGHT, replace(subject, inputs=given)) or {},
    ]
    held = [inputs[name] for name in names]
    narrowest = min((x.dtype for x in held if isinstance(x, torch.Tensor)), key=lambda dtype: dtype.itemsize)
    try:
        with torch.enable_grad(), allow_mutation_on_saved_tensors(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # formulas convert tensors that require a gradient to Python numbers
            exact = _Differentiated.from_call(names, inputs, torch.float64, partial(op.oracle, definition))
            weights = {
                name: draw.normal(f"weights of {name}", value.shape, dtypes[name])
                for name, value in exact.outputs.items()
                if name in outputs and dtypes[name] in WIDE
            }
            if not weights:
                return "the formula has no gradient by these inputs"
            right = exact.gradients(weights)
            told = [(weights[one] * exact.outputs[one].detach().nan_to_num()).norm() for one in weights]
            near = []
            for way in ways:  # per element, the baseline is the one with the largest error
                low = _Differentiated.from_call(names, inputs, None, way)
                with NarrowProducts(narrowest):
                    near += [low.gradients(weights)] if weights.keys() <= low.outputs.keys() else []
    except (RuntimeError, ValueError) as error:
        return f"PyTorch does not differentiate the formula: {error}"
    if not all(value is None or bool(value.isfinite().all()) for value in right.values()):
        return "the formula's gradient is not finite here"
    found = {}
    for name, value in right.items():
        if value is None:
            continue
        spec = definition.inputs[name]
        dtype = TORCH_DTYPES[spec.dtype]
        # One float32 rounding of an element's contribution to the scalar: a kernel may lose as much in the slope
        # of a sigmoid that is nearly 1.
        least = 2.0**-24 * sum(map(float, told)) / max(value.numel(), 1) ** 0.5
        baseline = value.to(dtype).double()
        baseline = torch.where((baseline - value).abs() < least, value + least, baseline)
        for one in near:
            other = one[name]
            if other is not None:
                farther = other.isfinite() & ((other - value).abs() > (baseline - value).abs())
                baseline = torch.where(farther, other.double(), baseline)
        comparison: Comparison = WIDE_GRADIENT if dtype is torch.float32 else NARROW_GRADIENT
        found[name] = Expected(
            shape=definition.shape_of(spec, case.axes),
            dtype=dtype,
            oracle={"": value, "baseline": baseline},
            comparison=Quantised(reason="as its outputs") if quantised else comparison,
        )
    return weights, found
