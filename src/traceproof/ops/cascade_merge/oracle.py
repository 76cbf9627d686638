"""cascade_merge: v = sum_i 2^(s_i - s) v_i with s = log2(sum_i 2^s_i), of two states or many, per row and head."""

from collections.abc import Iterable

import torch

from traceproof.dataset.definition import Definition, TensorSpec
from traceproof.draw import Draw
from traceproof.ops.base import Tensors, Value, Values
from traceproof.ops.cases import STRESS, Case
from traceproof.ops.compare import Close
from traceproof.ops.formula import Form, FormulaOp, Wide


def merged(v: torch.Tensor, s: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """States [n i t d] with logarithms [n i t] as one; the largest is taken out, so that nothing overflows.

    States that are all empty are one that is empty: zeros, and minus infinity.
    """
    top = s.amax(1, keepdim=True)
    weights = torch.exp2(s - top.clamp_min(torch.finfo(s.dtype).min))
    total = weights.sum(1)
    some = torch.where(total > 0, total, 1.0)
    return (v * weights.unsqueeze(-1)).sum(1) / some.unsqueeze(-1), top.squeeze(1) + torch.log2(some)


def stacked(wide: Wide, first: str, second: str) -> torch.Tensor:
    """Two inputs along a new second axis."""
    return torch.stack([wide[first], wide[second]], 1)


def pair(wide: Wide) -> Tensors:
    """Two states."""
    v, s = merged(stacked(wide, "v_a", "v_b"), stacked(wide, "s_a", "s_b"))
    return {"v_merged": v, "s_merged": s}


def many(wide: Wide) -> Tensors:
    """All states of a row."""
    v, s = merged(wide["v"], wide["s"])
    return {"v_merged": v, "s_merged": s}


def in_place(wide: Wide) -> Tensors:
    """A state and another; rows that the mask leaves out stay."""
    v, s = merged(stacked(wide, "v", "v_other"), stacked(wide, "s", "s_other"))
    if "mask" in wide:
        kept = wide["mask"].bool()
        v = torch.where(kept[:, None, None], v, wide["v"])
        s = torch.where(kept[:, None], s, wide["s"])
    return {"v_out": v, "s_out": s}


class CascadeMerge(FormulaOp):
    """Logarithms as far apart as those of parts of a context are; in some cases states of a row are empty."""

    def stress(self, definition: Definition, *, seed: int) -> Iterable[Case]:
        """Far rows; rows of which no state has seen a key, which not every reference has an answer for."""
        yield from super().stress(definition, seed=seed)
        plain = next(iter(self.cases(definition, sizes=("medium",), seed=seed)))
        yield Case("stress-empty", STRESS, plain.axes, seed, {"nothing": True})

    def value(self, definition: Definition, name: str, spec: TensorSpec, case: Case, draw: Draw) -> Value:
        """Normal values; logarithms spread by 4, or as the case says; a mask of any bits."""
        shape = definition.shape_of(spec, case.axes) or ()
        if name == "mask":
            return draw.integers(name, shape, torch.int32, low=0, high=2).bool()
        made = super().value(definition, name, spec, case, draw)
        if name[0] != "s" or not isinstance(made, torch.Tensor):
            return made
        made = made * float(case.params.get("spread", 4.0)) + float(case.params.get("level", 3.0))
        if "nothing" in case.params:
            made[::2] = float("-inf")
        if "empty" in case.params and made.numel():
            flat = made[:, 0] if name == "s" and "num_states" in definition.axes else made
            if name in {"s", "s_a"} and (flat is made or made.shape[1] > 1):  # one state of a row has something
                flat[::2] = float("-inf")
        return made

    def floor(self, definition: Definition, inputs: Values) -> Tensors:
        """The formula in float32; of a logarithm, 8 roundings of the largest one that is merged.

        Where one state outweighs the others, the naive sum gives that one's logarithm without any rounding; other
        right ways convert between the bases 2 and e, and lose a rounding in each step.
        """
        floors = super().floor(definition, inputs)
        merged_s = list(definition.outputs)[1]
        exact = self.oracle(definition, inputs)[merged_s]
        given = [value for name, value in inputs.items() if name[0] == "s" and isinstance(value, torch.Tensor)]
        largest = max([1.0, *(float(value[value.isfinite()].abs().amax()) for value in given if value.numel())])
        floors[merged_s] = (exact + 8 * 2.0**-24 * largest).float()
        return floors


OP = CascadeMerge(
    "cascade_merge",
    Form("v_a[n t d] s_a[n t] v_b[n t d] s_b[n t] -> v_merged[n t d] s_merged[n t]", pair),
    Form("v[n i t d] s[n i t] -> v_merged[n t d] s_merged[n t]", many),
    Form("v[n t d] s[n t] v_other[n t d] s_other[n t] mask[n]? -> v_out[n t d] s_out[n t]", in_place),
    sizes={"i": (3, 1, 7, 2)},
    gates={"s_merged": Close(), "s_out": Close()},
    adversarial={
        "near": {"spread": 0.05},
        "far": {"spread": 60.0},
        "high": {"level": 300.0},  # above what 2^s holds in float32
        "empty": {"empty": 1.0},
    },
)
