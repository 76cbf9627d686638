"""rope: q and k rotated by the cosines and sines that a cache holds for each token's position."""

from collections.abc import Iterable, Sequence

import torch

from traceproof.dataset.definition import Definition
from traceproof.draw import Draw
from traceproof.ops.base import Op, Tensors, Unsupported, Values, ordered, rounded, specified
from traceproof.ops.cases import Case

TOKENS = {"small": (1, 16), "medium": (64, 250), "large": (512, 2048)}
HEADS = ((8, 2), (4, 4), (6, 1))  # of queries and of keys: shared, equal, a single one
POSITIONS = {"small": 64, "medium": 1024, "large": 8192}
GRID = 1 << 12  # steps of the tangent of half an angle


def pairs_halves(definition: Definition) -> bool:
    """Whether channel i is rotated with channel i + half (NeoX), not with its neighbour (GPT-J)."""
    return definition.constants.get("pairing") == "halves"


class Rope(Op):
    """The cache's row holds the cosines in its first half and the sines in its second.

    Channels beyond the cache's width pass through. Which channels form a pair is a constant.
    """

    op_type = "rope"

    def check(self, definition: Definition) -> None:
        """Known: q, k [tokens, heads, head_size], cos_sin_cache [positions, rotary], positions [tokens]."""
        if set(definition.inputs) != {"q", "k", "cos_sin_cache", "positions"}:
            raise Unsupported(f"inputs are {list(definition.inputs)}")
        if list(definition.outputs) != ["q_out", "k_out"]:
            raise Unsupported(f"outputs are {list(definition.outputs)}")
        q, k, cache, positions = (
            definition.inputs[name].shape or () for name in ("q", "k", "cos_sin_cache", "positions")
        )
        const = definition.const_axes
        if not (len(q) == len(k) == 3 and len(cache) == 2 and positions == q[:1] == k[:1]):
            raise Unsupported(f"shapes are q {q}, k {k}, cos_sin_cache {cache}, positions {positions}")
        if q[2] not in const or k[2] not in const or cache[1] not in const:
            raise Unsupported("head_size or rotary_dim is not const")
        rotary = const[cache[1]]
        if rotary % 2 or rotary > min(const[q[2]], const[k[2]]):
            raise Unsupported(f"rotary_dim {rotary} is odd or wider than a head")
        if definition.constants.get("pairing") is None:
            raise Unsupported("nobody states which channels are paired, and the reference shows both ways or none")

    def cases(self, definition: Definition, *, sizes: Sequence[str], seed: int) -> Iterable[Case]:
        """The specification's sequence lengths with several ratios of heads; long positions, equal positions."""
        for size in sizes:
            for index, tokens in enumerate(TOKENS[size]):
                axes = self._axes(definition, tokens, HEADS[index % len(HEADS)], POSITIONS[size])
                yield Case(f"{size}-{index}", size, axes, seed)
        yield Case("edge-empty", "edge", self._axes(definition, 0, (4, 2), 8), seed)
        yield Case("edge-single", "edge", self._axes(definition, 1, (1, 1), 1), seed)
        extremes = self._axes(definition, 9, (6, 1), 40_000)
        yield Case("adversarial-positions", "adversarial", extremes, seed, {"positions": "extreme"})
        few = self._axes(definition, 8, (4, 4), 32)
        yield Case("adversarial-tiny", "adversarial", few, seed, {"scale": 1e-3})
        yield Case("adversarial-outlier", "adversarial", few, seed, {"outlier": 300.0})

    @staticmethod
    def _axes(definition: Definition, tokens: int, heads: tuple[int, int], positions: int) -> dict[str, int]:
        """Values of the var axes, told by where they stand in the shapes."""
        q, k, cache = (definition.inputs[name].shape or () for name in ("q", "k", "cos_sin_cache"))
        values = {q[0]: tokens, q[1]: heads[0], k[1]: heads[1], cache[0]: positions}
        return {name: values.get(name, 1) for name in definition.var_axes}

    def row_axis(self, definition: Definition) -> str | None:
        """Tokens: each is rotated by its own position."""
        shape = definition.inputs["positions"].shape
        return shape[0] if shape else None

    def inputs(self, definition: Definition, case: Case, draw: Draw) -> Values:
        """Normal q and k; points of the unit circle; positions with repeats, 0 and the last one."""
        shapes, dtypes = specified(definition, case, definition.inputs)
        values: Values = {}
        for name in ("q", "k"):
            tensor = draw.normal(name, shapes[name], dtypes[name], scale=float(case.params.get("scale", 1.0)))
            if "outlier" in case.params:
                tensor[..., 1] = float(case.params["outlier"])
            values[name] = tensor
        count, rotary = shapes["cos_sin_cache"]
        values["cos_sin_cache"] = _circle(draw, count, rotary // 2).to(dtypes["cos_sin_cache"])
        positions = draw.integers("positions", shapes["positions"], torch.int64, low=0, high=count)
        if case.params.get("positions") == "extreme":
            positions[::3], positions[1::3] = count - 1, 0
        elif len(positions) > 2:
            positions[0], positions[-1], positions[1] = 0, count - 1, positions[2].clone()
        values["positions"] = positions.to(dtypes["positions"])
        return ordered(definition, values)

    def oracle(self, definition: Definition, inputs: Values) -> Tensors:
        """The rotation in float64."""
        return _rotate(definition, inputs, torch.float64)

    def floor(self, definition: Definition, inputs: Values) -> Tensors:
        """The rotation in float32, rounded once to the output's dtype, as kernels do it."""
        low = _rotate(definition, inputs, torch.float32)
        return rounded(definition, low)


def _circle(draw: Draw, count: int, half: int) -> torch.Tensor:
    """float32 [count, 2 * half]: cosines, then sines; row 0 is the angle 0, as in a real cache.

    A point of the circle is ((1 - t^2) / (1 + t^2), 2 t / (1 + t^2)) for t in [-1, 1], or its mirror image: only
    exact and correctly rounded operations, so that the bits are the same everywhere.
    """
    t = draw.integers("tangents", (count, half), torch.int64, low=-GRID, high=GRID + 1).to(torch.float64) / GRID
    mirrored = draw.integers("mirrored", (count, half), torch.int64, low=0, high=2).to(torch.bool)
    if count:
        t[0], mirrored[0] = 0.0, False
    square = t * t
    cos = (1 - square) / (1 + square)
    sin = 2 * t / (1 + square)
    return torch.cat([torch.where(mirrored, -cos, cos), sin], dim=-1).to(torch.float32)


def _rotate(definition: Definition, inputs: Values, dtype: torch.dtype) -> Tensors:
    q, k, cache, positions = (inputs[name] for name in ("q", "k", "cos_sin_cache", "positions"))
    assert isinstance(q, torch.Tensor)
    assert isinstance(k, torch.Tensor)
    assert isinstance(cache, torch.Tensor)
    assert isinstance(positions, torch.Tensor)
    half = cache.shape[-1] // 2
    rows = cache.to(dtype)[positions.to(torch.int64)].unsqueeze(1)  # one row per token, the same for all heads
    cos, sin = rows[..., :half], rows[..., half:]
    channel = torch.arange(half, device=q.device)
    if pairs_halves(definition):
        first, second = channel, channel + half
    else:
        first, second = 2 * channel, 2 * channel + 1
    outputs = {}
    for name, x in (("q_out", q), ("k_out", k)):
        source = x.to(dtype)
        out = source.clone()
        out[..., first] = source[..., first] * cos - source[..., second] * sin
        out[..., second] = source[..., second] * cos + source[..., first] * sin
        outputs[name] = out
    return outputs


OP = Rope()
