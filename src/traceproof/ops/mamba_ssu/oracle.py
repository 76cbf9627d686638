"""mamba_ssu: one decode step of a selective state space model, states picked out of a cache."""

import math
from collections.abc import Iterable, Mapping, Sequence

import torch

from traceproof.dataset.definition import Definition
from traceproof.draw import Draw, HostDraw
from traceproof.ops import far
from traceproof.ops.base import Op, Tensors, Unsupported, Values, ordered, rounded, specified, tensor
from traceproof.ops.cases import STRESS, Case
from traceproof.ops.common.gates import FAST_EXP, FAST_EXP_FACTOR, plain_softplus, softplus
from traceproof.ops.compare import Close, Comparison
from traceproof.ops.far import Far

BATCHES = {"small": (1, 2), "medium": (4, 16), "large": (32, 64)}
PAD = -1  # in state_batch_indices: no state, none is written
INPUTS = ("state", "x", "dt", "A", "B", "C", "D", "dt_bias", "state_batch_indices")
PER_HEAD = ("dt", "A", "D", "dt_bias")  # one value per head, spread over the other axes: kernels read but one


class MambaSsu(Op):
    """A step of the recurrence.

    state' = state * exp(dt * A) + dt * B * x and y = C . state' + D * x, with dt = softplus(dt + dt_bias). Heads
    share B and C in groups of consecutive heads. Slots that no row names stay as they are. A row whose index is
    -1 has no slot: it starts from a zero state, and its state is dropped.
    """

    op_type = "mamba_ssu"

    def check(self, definition: Definition) -> None:
        """Known: a state cache [slots, heads, head_dim, dstate], one token per row, all inputs of INPUTS."""
        if set(definition.inputs) != set(INPUTS):
            raise Unsupported(f"inputs are {list(definition.inputs)}, not {list(INPUTS)}")
        if list(definition.outputs) != ["output", "new_state"]:
            raise Unsupported(f"outputs are {list(definition.outputs)}")
        ranks = {
            "state": 4,
            "x": 3,
            "dt": 3,
            "A": 3,
            "B": 3,
            "C": 3,
            "D": 2,
            "dt_bias": 2,
            "state_batch_indices": 1,
        }
        found = {name: len(definition.inputs[name].shape or ()) for name in ranks}
        if found != ranks:
            raise Unsupported(f"numbers of axes are {found}, not {ranks}")
        slots, heads, *_ = definition.inputs["state"].shape or ()
        groups = (definition.inputs["B"].shape or ())[1]
        const = definition.const_axes
        if heads not in const or groups not in const or const[heads] % const[groups]:
            raise Unsupported(f"{heads} and {groups} are not const, or the heads do not divide into the groups")
        if set(definition.var_axes) != {slots, (definition.inputs["x"].shape or ())[0]}:
            raise Unsupported(f"the var axes are {list(definition.var_axes)}")

    def cases(self, definition: Definition, *, sizes: Sequence[str], seed: int) -> Iterable[Case]:
        """The specification's batches, in a cache with slots to spare; padding rows; slow and saturated gates."""
        for size in sizes:
            for index, batch in enumerate(BATCHES[size]):
                yield Case(f"{size}-{index}", size, self._axes(definition, batch, batch + batch // 2 + 3), seed)
        yield Case("edge-empty", "edge", self._axes(definition, 0, 2), seed)
        yield Case("edge-single", "edge", self._axes(definition, 1, 1), seed)
        yield Case("edge-padding", "edge", self._axes(definition, 5, 6), seed, {"padding": [1, 4]})
        for kind in ("tiny", "outlier", "slow", "long", "saturated"):
            yield Case(f"adversarial-{kind}", "adversarial", self._axes(definition, 3, 5), seed, {"kind": kind})

    def stress(self, definition: Definition, *, seed: int) -> Iterable[Case]:
        """Five rows in a cache of which half the slots in use lie far away."""
        params = {far.SIZE: self.enlarged(definition).size(definition, 6)}
        yield Case("stress-far", STRESS, self._axes(definition, 5, 6), seed, params)

    def enlarged(self, definition: Definition) -> Far:
        """The cache of states."""
        return Far(axis=(definition.inputs["state"].shape or ())[0], slots=("state_batch_indices",), copies=1)

    @staticmethod
    def _axes(definition: Definition, batch: int, slots: int) -> dict[str, int]:
        rows = (definition.inputs["x"].shape or ())[0]
        return {name: batch if name == rows else slots for name in definition.var_axes}

    def inputs(self, definition: Definition, case: Case, draw: Draw) -> Values:
        """Gates in the range that Mamba-2 initialises them to: A in -[1, 16], softplus(dt_bias) in [1e-3, 0.1]."""
        shapes, dtypes = specified(definition, case, definition.inputs)
        kind = case.params.get("kind")
        wide: dict[str, torch.Tensor] = {
            name: draw.normal(name, shapes[name], scale=1e-3 if kind == "tiny" else 1.0)
            for name in ("state", "x", "B", "C")
        }
        if kind == "outlier":
            wide["x"][..., 0], wide["B"][..., 1], wide["C"][..., 1] = 100.0, 30.0, 30.0
        rows, heads, _ = shapes["dt"]
        # Softplus: 6e-6; nearly its argument, short of exp's overflow guard at 20; and beyond that.
        bias = {"slow": -12.0, "long": 8.0, "saturated": 25.0}.get(str(kind))
        per_head = {
            "dt": draw.normal("dt", (rows, heads)),
            "A": draw.uniform("A", (heads,), low=-16.0, high=-1.0),
            "D": draw.normal("D", (heads,)),
            "dt_bias": draw.uniform("dt_bias", (heads,), low=-6.9, high=-2.25),
        }
        if bias is not None:
            per_head["dt_bias"] = torch.full((heads,), bias, device=draw.device)
        for name in PER_HEAD:
            value = per_head[name]
            extra = len(shapes[name]) - value.dim()
            wide[name] = value.reshape(value.shape + (1,) * extra).expand(shapes[name])
        values: Values = {name: tensor.to(dtypes[name]).contiguous() for name, tensor in wide.items()}
        values["state_batch_indices"] = self._slots(definition, case, draw).to(dtypes["state_batch_indices"])
        return ordered(definition, values)

    @staticmethod
    def _slots(definition: Definition, case: Case, draw: Draw) -> torch.Tensor:
        """Distinct slots in no order, with gaps; PAD in the rows that the case names."""
        slots, *_ = definition.shape_of(definition.inputs["state"], case.axes) or ()
        rows, *_ = definition.shape_of(definition.inputs["x"], case.axes) or ()
        host = HostDraw(definition=definition.name, case=case.id, seed=case.seed)
        chosen = host.shuffled("slots", range(slots))[:rows]
        for row in case.params.get("padding", []):
            chosen[row] = PAD
        return torch.tensor(chosen, dtype=torch.int64, device=draw.device)

    def oracle(self, definition: Definition, inputs: Values) -> Tensors:
        """The step in float64."""
        del definition
        return _step(inputs, torch.float64)

    def floor(self, definition: Definition, inputs: Values) -> Tensors:
        """The step in float32 from the stored inputs; output and new state rounded once, as kernels store them."""
        low = _step(inputs, torch.float32)
        return rounded(definition, low)

    def comparisons(self, definition: Definition) -> Mapping[str, Comparison]:
        """Close: products in float32, one rounding when stored; a float32 state feels hardware exponentials."""
        kinds: dict[str, Comparison] = {}
        for name, spec in definition.outputs.items():
            fast = spec.dtype == "float32"
            kinds[name] = Close(factor=FAST_EXP_FACTOR, reason=FAST_EXP) if fast else Close()
        return kinds

    def memory(self, definition: Definition, case: Case) -> int:
        """All tensors once as stored, the cache four times more in float64, the rows' states thrice."""
        total = super().memory(definition, case)
        return total + 24 * math.prod(definition.shape_of(definition.inputs["state"], case.axes) or ())


def _step(inputs: Values, dtype: torch.dtype) -> Tensors:
    """Output [rows, heads, head_dim] and new_state [slots, heads, head_dim, dstate] in `dtype`."""
    cache, x, dt, a, b, c, d, bias = (tensor(inputs, name).to(dtype) for name in INPUTS[:-1])
    index = tensor(inputs, "state_batch_indices").to(torch.int64)
    heads, groups = x.shape[1], b.shape[1]
    b, c = (rows.repeat_interleave(heads // groups, dim=1) for rows in (b, c))
    named = index != PAD
    state = torch.zeros((len(x), *cache.shape[1:]), dtype=dtype, device=x.device)
    state[named] = cache[index[named]]
    step = (softplus if dtype == torch.float64 else plain_softplus)(dt + bias)
    state = state * torch.exp(step[..., None] * a) + (step * x)[..., None] * b[:, :, None, :]
    output = (state * c[:, :, None, :]).sum(-1) + d * x
    new_cache = cache.clone()
    new_cache[index[named]] = state[named]
    return {"output": output, "new_state": new_cache}


OP = MambaSsu()
