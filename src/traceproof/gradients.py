"""Gradients of functions that support autograd, compared with the gradient of the oracle's float64 formula.

A random weight per output element makes a scalar of the outputs, which is differentiated by every floating-point
input. The oracle itself is differentiated, with inputs in float64; so are naive computations at a kernel's
precision, the errors of whose gradients are the baseline error. No op is listed: what PyTorch can not
differentiate (a choice, a quantised output) has no gradient here, and the row says so.
"""

import math
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
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

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: ANN401
        """Run one operation."""
        del types
        if func not in PRODUCTS:
            return func(*args, **(kwargs or {}))
        product = func(*(x.to(self._dtype).to(x.dtype) for x in args), **(kwargs or {}))
        return product.to(self._dtype).to(product.dtype)


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
        outputs: Mapping[str, Any] = call({**inputs, **leaves})
        tensors = {name: value for name, value in outputs.items() if isinstance(value, torch.Tensor)}
        return cls(leaves, {name: value for name, value in tensors.items() if value.requires_grad})

    def gradients(self, weights: Tensors, *, strided: bool = False) -> dict[str, torch.Tensor | None]:
        """Gradients by input of the sum of outputs times `weights`; None: no weighted output depends on it.

        `strided`: NaN lies between the elements of the weights. Raises ValueError: weights were written to.
        """
        weighted = {name: value for name, value in self.outputs.items() if name in weights}
        factors = [weights[name].to(value.dtype).to(value.device) for name, value in weighted.items()]
        if strided:
            factors = [torch.stack([one, torch.full_like(one, math.nan)], -1)[..., 0] for one in factors]
        leaves, before = [*self.leaves.values()], [one.clone() for one in factors]
        gradients = torch.autograd.grad([*weighted.values()], leaves, factors, allow_unused=True)
        if not all(map(torch.equal, factors, before)):
            raise ValueError("it writes to the gradient of an output, which others may read, too")
        return dict(zip(self.leaves, gradients, strict=True))


def cases_with_gradients(cases: Collection[PlannedCase], *, demanded: bool) -> list[PlannedCase]:
    """Cases to take gradients of: if demanded all that fit, else the largest ordinary one."""
    runnable = [one for one in cases if one.skip is None and not one.hidden and not one.trials]
    fitting = [one for one in runnable if one.memory <= MOST and all(one.case.axes.values())]
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
    inputs = make_inputs(op, definition, planned.case, device=CPU)
    considered = inputs.keys() if isinstance(demanded, bool) else demanded
    names = [key for key in considered if isinstance(value := inputs[key], torch.Tensor) and value.dtype in WIDE]
    on_device = place(inputs, device)

    def called() -> _Differentiated:
        with torch.enable_grad():
            return _Differentiated.from_call(
                names, on_device, None, lambda values: named_outputs(definition, call(values))
            )

    try:
        user = called()
    except Exception as raised:  # noqa: BLE001 - the user's code may raise anything, which the row reports
        if demanded:
            yield _error(f"with inputs that require a gradient: {type(raised).__name__}: {raised}")
        return
    if not user.outputs:
        if demanded:
            message = "it takes no part in autograd: no output has a gradient"
            yield "inputs", Ruling(Verdict.FAIL, Failure.PRESENCE, message, {})
        return
    subject = SolvedCase(definition=definition, op=op, case=planned.case, inputs=inputs, oracle={}, seed=0)
    try:
        weights, expected = _expected(subject, names, user.outputs.keys())
    except NoGradientError as unknown:
        yield "inputs", Ruling(Verdict.SKIP, Skip.NO_ORACLE, str(unknown), {})
        return
    yield from _compared(called, user, weights, expected)


def _error(message: str) -> tuple[str, Ruling]:
    return "inputs", Ruling(Verdict.ERROR, Error.EXCEPTION, message, {})


def _compared(
    called: Callable[[], _Differentiated],
    user: _Differentiated,
    weights: Tensors,
    expected: Mapping[str, Expected],
) -> Iterator[tuple[str, Ruling]]:
    """(input, ruling): the worse one of two backwards, of which the second one is given other strides."""
    rulings: dict[str, Ruling] = {}
    for layout in ("", ", given gradients of outputs that are not contiguous"):
        try:
            user = called() if layout else user  # what a backward needs is freed by the first one
            of_inputs = user.gradients(weights, strided=bool(layout))
            gradients = {key: None if x is None else plain_tensor(x) for key, x in of_inputs.items()}
        except Exception as raised:  # noqa: BLE001 - likewise, in its backward
            yield _error(f"in its backward{layout}: {type(raised).__name__}: {raised}")
            return
        for name in (name for name in expected if name not in rulings or rulings[name].verdict is Verdict.PASS):
            if gradients[name] is None:
                ruling = Ruling(Verdict.FAIL, Failure.PRESENCE, f"no gradient reaches {name}", {})
            else:
                ruling = judge_output(gradients[name], expected[name], tolerance=None)
            if not layout or ruling.verdict is not Verdict.PASS:
                rulings[name] = replace(ruling, message=ruling.message + layout)
    yield from rulings.items()


class NoGradientError(Exception):
    """The formula has no gradient to compare with; the text says why."""


@dataclass(frozen=True, slots=True)
class _OfFormula:
    """Gradients by input of the sum of outputs times `weights`."""

    weights: Tensors  # by output
    exact: Mapping[str, torch.Tensor | None]  # of the oracle, float64
    computed: Sequence[Mapping[str, torch.Tensor | None]]  # of naive computations at a kernel's precision
    magnitude: float  # sum over outputs of the norm of an output times its weights


def _of_formula(subject: SolvedCase, names: Collection[str], outputs: Collection[str]) -> _OfFormula:
    """Differentiate the formula by the inputs `names`. Raises NoGradientError: it has no finite gradient."""
    definition, op, case, inputs = subject.definition, subject.op, subject.case, subject.inputs
    dtypes = {name: TORCH_DTYPES[spec.dtype] for name, spec in definition.outputs.items()}
    draw = Draw(definition=definition.name, case=case.id, seed=case.seed, device=CPU)
    naive: list[Call] = [
        partial(op.baseline, definition),
        lambda values: op.varied(RIGHT, replace(subject, inputs=values)) or {},
    ]
    in_use = [value.dtype for name in names if isinstance(value := inputs[name], torch.Tensor)]
    narrowest = min(in_use, key=lambda dtype: dtype.itemsize)
    try:
        with torch.enable_grad(), allow_mutation_on_saved_tensors(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # formulas convert tensors that require a gradient to Python numbers
            oracle = _Differentiated.from_call(names, inputs, torch.float64, partial(op.oracle, definition))
            weights = {
                name: draw.normal(f"weights of {name}", value.shape, dtypes[name])
                for name, value in oracle.outputs.items()
                if name in outputs and dtypes[name] in WIDE
            }
            if not weights:
                raise NoGradientError("the formula has no gradient by these inputs")
            exact = oracle.gradients(weights)
            norms = [(weights[output] * oracle.outputs[output].detach().nan_to_num()).norm() for output in weights]
            computed = []
            for call in naive:
                low = _Differentiated.from_call(names, inputs, None, call)
                if weights.keys() <= low.outputs.keys():
                    with NarrowProducts(narrowest):
                        computed.append(low.gradients(weights))
    except (RuntimeError, ValueError) as error:
        raise NoGradientError(f"PyTorch does not differentiate the formula: {error}") from error
    if not all(value is None or bool(value.isfinite().all()) for value in exact.values()):
        raise NoGradientError("the formula's gradient is not finite here")
    return _OfFormula(weights, exact, computed, sum(map(float, norms)))


def _expected(
    subject: SolvedCase, names: Collection[str], outputs: Collection[str]
) -> tuple[Tensors, dict[str, Expected]]:
    """(weights of the outputs, expected gradient of each input). Raises NoGradientError: there is none."""
    definition, formula = subject.definition, _of_formula(subject, names, outputs)
    kinds = subject.op.comparisons(definition)
    quantised = any(isinstance(kinds.get(name), Quantised) for name in outputs)
    expected = {}
    for name, exact in formula.exact.items():
        if exact is None:
            continue
        spec = definition.inputs[name]
        dtype = TORCH_DTYPES[spec.dtype]
        # One float32 rounding of an element's contribution to the scalar: a kernel may lose as much in the slope
        # of a sigmoid that is nearly 1.
        least = 2.0**-24 * formula.magnitude / max(exact.numel(), 1) ** 0.5
        baseline = exact.to(dtype).double()
        baseline = torch.where((baseline - exact).abs() < least, exact + least, baseline)
        for gradients in formula.computed:  # per element, the baseline is the one with the largest error
            computed = gradients[name]
            if computed is not None:
                farther = computed.isfinite() & ((computed - exact).abs() > (baseline - exact).abs())
                baseline = torch.where(farther, computed.double(), baseline)
        comparison: Comparison = WIDE_GRADIENT if dtype is torch.float32 else NARROW_GRADIENT
        expected[name] = Expected(
            shape=definition.shape_of(spec, subject.case.axes),
            dtype=dtype,
            oracle={"": exact, "baseline": baseline},
            comparison=Quantised(reason="as its outputs") if quantised else comparison,
        )
    return formula.weights, expected
