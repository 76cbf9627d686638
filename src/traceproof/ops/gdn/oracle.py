"""gdn: the gated delta rule, as decode, as verification of draft tokens (mtp), and as prefill."""

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from functools import partial

import torch

from traceproof.dataset.definition import Definition
from traceproof.draw import Draw, HostDraw
from traceproof.ops import far
from traceproof.ops.base import Op, Tensors, Unsupported, Values, ordered, rounded, specified, tensor
from traceproof.ops.cases import Case
from traceproof.ops.common.gates import FAST_EXP, FAST_EXP_FACTOR, plain_softplus, sigmoid, softplus
from traceproof.ops.common.quant import Rounding, exact, to_bf16
from traceproof.ops.compare import Close, Comparison
from traceproof.ops.far import Far
from traceproof.ops.gdn.forms import BUFFER, Form, Layout, Plan, axes, layout, plans, stressed
from traceproof.ops.gdn.recurrence import Tokens, recur

# A chunk of 64 tokens passes through five products, the floor's token through two; measured with chunked
# computations of our own (tests/test_ops_gdn.py, ops/gdn/chunked.py): up to 3.2 times the floor for the output,
# 4.8 for the state. A token changes a state by a matrix of rank one, so one row of it holds one rounding.
FORGOTTEN = 90.0  # exp(-90) is nothing in float32; sums with it still tell neighbours' decays apart
CHUNKED = "chunked kernels round the operands of five products in bfloat16, the floor those of two"


class GatedDeltaRule(Op):
    """States are [.., V, K] ("k last"), value heads share query and key heads in consecutive groups.

    A scale of 0 or None stands for 1 / sqrt(K). A state of None stands for zeros. In mtp the named slots of the
    pool take the state after the last token, the others stay; `intermediate_states_buffer`, where given, is
    scratch that the call may overwrite and that no output shows. A sequence without tokens keeps its state.
    """

    op_type = "gdn"

    def check(self, definition: Definition) -> None:
        """Known: the three forms of `forms.layout`."""
        layout(definition)

    def cases(self, definition: Definition, *, sizes: Sequence[str], seed: int) -> Iterable[Case]:
        """The specification's batches and lengths; chunk boundaries; slow, saturated and outlying gates."""
        found = layout(definition)
        optional = definition.inputs[found.state].optional
        for plan in plans(found, sizes, optional_state=optional, buffer=BUFFER in definition.inputs):
            yield _case(definition, found, plan, seed)

    def stress(self, definition: Definition, *, seed: int) -> Iterable[Case]:
        """See `forms.stressed`."""
        found, enlarged = layout(definition), self.enlarged(definition)
        for plan in stressed(found, partial(enlarged.size, definition)):
            yield _case(definition, found, plan, seed)

    def enlarged(self, definition: Definition) -> Far:
        """The pool of states, the requests of a decode with theirs, or the tokens before those that are judged."""
        found = layout(definition)
        axis = (definition.inputs[found.state].shape or ())[0]
        if found.form is Form.PREFILL:
            return Far(axis=(definition.inputs["q"].shape or ())[0], bounds=("cu_seqlens",), copies=3)
        if found.form is Form.MTP:
            return Far(axis=axis, slots=("initial_state_indices",), copies=1)
        return Far(axis=axis, copies=4)

    def inputs(self, definition: Definition, case: Case, draw: Draw) -> Values:
        """Normal q, v and state, k of norm 1 as models feed it, gates from slow to fast."""
        found = layout(definition)
        shapes, dtypes = specified(definition, case, definition.inputs)
        kind = case.params.get("kind")
        small = 1e-3 if kind == "tiny" else 1.0
        drawn: dict[str, torch.Tensor] = {
            "q": draw.normal("q", shapes["q"]),
            "k": _unit(draw.normal("k", shapes["k"])),
            "v": draw.normal("v", shapes["v"], scale=small),
            **_gates(draw, shapes, kind),
        }
        if kind == "outlier":
            # Several columns of v, not alike: were it one, a row of the output would be one number, and what the
            # floor loses there a matter of luck.
            drawn["q"][..., 1] = 100.0
            drawn["v"][..., 1::4] *= 300.0
        if found.form is Form.PREFILL and far.SIZE in case.params:
            _forget(drawn, case.params.get(far.BEFORE, [0]))
        if not case.params.get("no_state"):
            drawn[found.state] = draw.normal(found.state, shapes[found.state], scale=small)
        lengths = case.params["lengths"]
        if found.form is Form.PREFILL:
            bounds = [sum(lengths[:count]) for count in range(len(lengths) + 1)]
            drawn["cu_seqlens"] = torch.tensor(bounds, device=draw.device)
        if found.form is Form.MTP:
            host = HostDraw(definition=definition.name, case=case.id, seed=case.seed)
            slots = host.shuffled("slots", range(shapes[found.state][0]))[: len(lengths)]
            drawn["initial_state_indices"] = torch.tensor(slots, dtype=torch.int64, device=draw.device)
            if case.params.get("buffer"):
                drawn[BUFFER] = torch.zeros(shapes[BUFFER], device=draw.device)
        scale = float(case.params.get("scale", found.key_size**-0.5))
        values: Values = {found.state: None, BUFFER: None, "scale": scale}
        values |= {name: tensor.to(dtypes[name]).contiguous() for name, tensor in drawn.items()}
        return ordered(definition, values)

    def oracle(self, definition: Definition, inputs: Values) -> Tensors:
        """The recurrence in float64."""
        return _run(layout(definition), inputs, torch.float64, exact)

    def floor(self, definition: Definition, inputs: Values) -> Tensors:
        """The recurrence in float32 from the stored inputs, softplus as kernels write it, outputs rounded once.

        Decode and mtp kernels multiply in float32. Prefill kernels put a chunk's products on tensor cores: state
        and correction are rounded to bfloat16 as they enter a product, while the state that is carried on stays
        in float32.
        """
        found = layout(definition)
        rounding = to_bf16 if found.form is Form.PREFILL else exact
        low = _run(found, inputs, torch.float32, rounding)
        return rounded(definition, low)

    def comparisons(self, definition: Definition) -> Mapping[str, Comparison]:
        """Close: chunks in bfloat16 round more often than the floor; float32 states feel hardware exponentials."""
        found = layout(definition)
        if found.form is Form.PREFILL:
            return {"output": Close(4.0, reason=CHUNKED), found.final: Close(12.0, row_axes=2, reason=CHUNKED)}
        fast = definition.outputs[found.final].dtype == "float32"
        state = Close(factor=FAST_EXP_FACTOR, reason=FAST_EXP) if fast else Close()
        return {"output": Close(), found.final: state}

    def memory(self, definition: Definition, case: Case) -> int:
        """Tensors as the default has it, and the states four times more in float64."""
        found = layout(definition)
        states = definition.shape_of(definition.inputs[found.state], case.axes) or ()
        return super().memory(definition, case) + 32 * math.prod(states)

    def mutated(self, definition: Definition) -> frozenset[str]:
        """The scratch of mtp."""
        return frozenset({BUFFER} & definition.inputs.keys())


def _case(definition: Definition, found: Layout, plan: Plan, seed: int) -> Case:
    params = {"lengths": list(plan.lengths), **plan.params}
    return Case(plan.id, plan.size, axes(definition, found, plan), seed, params)


def _forget(drawn: Tensors, tokens: list[int]) -> None:
    """Let some tokens forget the state, and with it whatever comes before them."""
    drawn["a"][tokens] = FORGOTTEN / drawn["A_log"].exp() - drawn["dt_bias"]


def _unit(x: torch.Tensor) -> torch.Tensor:
    """Vectors of norm 1: drawn numbers are multiples of 2**-12, so their squares sum exactly in any order."""
    wide = x.to(torch.float64)
    return (wide / (wide * wide).sum(-1, keepdim=True).sqrt()).to(torch.float32)


def _gates(draw: Draw, shapes: Mapping[str, tuple[int, ...]], kind: str | None) -> dict[str, torch.Tensor]:
    """A = exp(A_log) from 1/16 to 16 and softplus(dt_bias) from 0.0025 to 1.3, as models have them."""
    gates = {
        "A_log": draw.uniform("A_log", shapes["A_log"], low=-2.77, high=2.77),
        "dt_bias": draw.uniform("dt_bias", shapes["dt_bias"], low=-6.0, high=1.0),
        "a": draw.normal("a", shapes["a"]),
        "b": draw.normal("b", shapes["b"]),
    }
    if kind == "slow":
        gates["A_log"].fill_(-9.0)
        gates["b"] += 4.0
    if kind == "saturated":
        gates["a"] = torch.where(gates["a"] > 0, 30.0, -30.0)
        gates["b"] = torch.where(gates["b"] > 0, 20.0, -20.0)
    return gates


def _run(found: Layout, inputs: Values, dtype: torch.dtype, rounding: Rounding) -> Tensors:
    q, k, v, a, b, dt_bias, A_log = (
        tensor(inputs, name).to(dtype) for name in ("q", "k", "v", "a", "b", "dt_bias", "A_log")
    )
    step = (softplus if dtype == torch.float64 else plain_softplus)(a + dt_bias)
    scale = inputs["scale"]
    if scale is not None and not isinstance(scale, int | float):
        raise Unsupported(f"scale is a {type(scale).__name__}, not a number")
    tokens = Tokens(
        q=q.reshape(-1, *q.shape[-2:]),
        k=k.reshape(-1, *k.shape[-2:]),
        v=v.reshape(-1, *v.shape[-2:]),
        decay=torch.exp(-torch.exp(A_log) * step).reshape(-1, found.value_heads),
        rate=sigmoid(b).reshape(-1, found.value_heads),
        scale=float(scale or found.key_size**-0.5),
    )
    if found.form is Form.PREFILL:
        bounds = tensor(inputs, "cu_seqlens").tolist()
    else:
        bounds = [row * q.shape[1] for row in range(len(q) + 1)]
    lengths = [end - start for start, end in itertools.pairwise(bounds)]
    given = inputs[found.state]
    shape = (len(lengths), found.value_heads, found.value_size, found.key_size)
    pool = given.to(dtype) if isinstance(given, torch.Tensor) else torch.zeros(shape, dtype=dtype, device=q.device)
    state = pool
    if found.form is Form.MTP:
        slots = tensor(inputs, "initial_state_indices").to(torch.int64)
        state = pool[slots]
    output, final = recur(tokens, starts=bounds[:-1], lengths=lengths, state=state, rounding=rounding)
    if found.form is Form.MTP:
        final = pool.index_copy(0, slots, final)
    return {"output": output.view(v.shape), found.final: final}


OP = GatedDeltaRule()
