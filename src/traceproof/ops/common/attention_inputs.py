"""Queries, keys and values that make a wrong attention show.

Normal data alone hide much: over 2,048 keys the softmax is flat, the output near 0, and one token more or less is
lost in the rounding. So in the pattern `lean` each query head leans to one key that a bug is likely to get wrong:
the last visible one, the one after it that the mask hides, the first, both sides of the last page boundary, or
any. The lean is chosen so that this key takes about half the weight, whatever the length; the other half stays
spread over all other tokens.

Patterns: `lean`; `plain` (normal data, as kernels are usually tested); `negative` (all logits near -120, so that a
softmax that does not subtract the row's maximum divides 0 by 0); `outlier` (one key channel 32 times the others);
`below`, `above` (raw products near -60,000 and 60,000, beyond what masks have been filled with); `deep` (logits in
base 2 near -60,000, for masks that are filled after the scale); `equal` (all keys alike);
`tiny` (everything at the amplitude, values too); `ties` (integers in -1..1, so that many logits are equal, the
largest too).

Rows that no sequence may read (the rest of a last page, pages of nobody) hold poison: ordinary keys, so that they
get an ordinary weight whatever the query is, with values of 50. Not NaN: a kernel may multiply a masked row by a
weight of 0, which is right and would give NaN.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from traceproof.draw import Draw
from traceproof.ops.cases import Case

POISON = 50.0
LEAN = 0.75  # logit of the leaned-to key per doubling of the length: exp(0.75 n) slightly beats 2**n other keys
FLAT = 2.0  # deviation of logits up to which all keys share the weight; above, the largest few have it all
NEGATIVE = 120.0  # beyond 104, where exp(-x) is 0 in float32 even as a subnormal number
RAW = 60000.0  # of products of queries and keys before the softmax scale; float16 ends at 65,504
SIGNS: Mapping[str, int] = {"negative": -1, "below": -1, "deep": -1, "above": 1}
OUTLIER = 32.0  # a power of two, so that scaling is exact in every dtype
MEAN_ABS = math.sqrt(2 / math.pi)  # mean of |x|, x standard normal


@dataclass(frozen=True, slots=True)
class Style:
    """How one case draws its data."""

    pattern: str  # see the module's text
    amplitude: float  # factor on queries and keys
    width: int  # size of a key
    scale: float  # the softmax scale

    @classmethod
    def of(cls, case: Case, *, width: int, scale: float) -> "Style":
        """The style that a case asks for."""
        params: dict[str, Any] = dict(case.params)
        pattern = str(params["pattern"])
        amplitude = float(params["amplitude"])
        if pattern in SIGNS:
            product = {"negative": NEGATIVE / scale, "deep": RAW * math.log(2.0) / scale}.get(pattern, RAW)
            amplitude = math.sqrt(product / (MEAN_ABS * MEAN_ABS * width))
        return cls(pattern, amplitude, width, scale)

    @property
    def energy(self) -> float:
        """The logit of a key of normal data with itself."""
        return self.amplitude * self.amplitude * self.width * self.scale

    def tensor(
        self, draw: Draw, name: str, shape: Sequence[int], dtype: torch.dtype, *, sign: int = 1
    ) -> torch.Tensor:
        """Queries (sign 1) or keys (the sign that the pattern's products have)."""
        if self.pattern == "ties":
            return draw.integers(name, shape, torch.int32, low=-1, high=2).to(dtype)
        drawn = draw.normal(name, shape, dtype, scale=self.amplitude)
        return drawn.abs() * sign if self.pattern in SIGNS else drawn

    def keys(
        self, draw: Draw, name: str, shape: Sequence[int], dtype: torch.dtype, *, outlier: bool
    ) -> torch.Tensor:
        """Keys [..., D]; `outlier` tells whether this tensor holds the outlier column of that pattern."""
        keys = self.tensor(draw, name, shape, dtype, sign=SIGNS.get(self.pattern, 1))
        if self.pattern == "equal" and keys.numel():
            keys.copy_(keys.reshape(-1, keys.shape[-1])[0].clone().expand_as(keys))
        if self.pattern == "outlier" and outlier:
            keys[..., keys.shape[-1] // 3] *= OUTLIER
        return keys

    def values(self, draw: Draw, name: str, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Values [..., Dv]: normal, at the amplitude only in the pattern `tiny`."""
        return draw.normal(name, shape, dtype, scale=self.amplitude if self.pattern == "tiny" else 1.0)


@dataclass(frozen=True, slots=True)
class Lean:
    """Which key each query head leans to, and how far."""

    rows: torch.Tensor  # int64 [T, Hq], rows of the flattened keys
    # float32 [T], the factor on the key that is added to the query; 0 where no key is visible
    weights: torch.Tensor

    def added(self, queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        """Sum of queries [T, Hq, D] and weights * keys [S, Hkv, D] at `rows`, in the queries' dtype."""
        heads, kv_heads = self.rows.shape[1], keys.shape[1]
        head = torch.arange(heads, device=keys.device) // max(1, heads // kv_heads)
        chosen = keys[self.rows, head].to(torch.float32)
        chosen *= self.weights[:, None, None]  # two roundings on every device: no fused multiply-add
        return (queries.to(torch.float32) + chosen).to(queries.dtype)


@dataclass(frozen=True, slots=True)
class Sequences:
    """Where the tokens of every sequence lie, and how many of them each query sees."""

    rows: torch.Tensor  # int64 [sum of lengths], rows of the flattened keys, sequence after sequence
    first: list[int]  # for every query, where its sequence starts in `rows`
    visible: list[int]  # for every query, how many tokens it sees
    lengths: list[int]  # for every query, the length of its sequence
    page_size: int  # tokens a page


def lean(draw: Draw, style: Style, sequences: Sequences, *, heads: int) -> Lean | None:
    """The lean of every query head; None where the pattern has none or there is nothing to lean to."""
    if style.pattern != "lean" or len(sequences.rows) == 0 or not sequences.visible:
        return None
    count, page, device = len(sequences.visible), sequences.page_size, draw.device
    visible, lengths = (
        torch.tensor(part, dtype=torch.int64, device=device)[:, None]
        for part in (sequences.visible, sequences.lengths)
    )
    last = (visible - 1).clamp(min=0)
    boundary = last // page * page
    random = draw.integers("lean", (count, heads), torch.int64, low=0, high=1 << 31) % visible.clamp(min=1)
    after = torch.minimum(visible, lengths - 1).clamp(min=0)
    choices = (last, torch.zeros_like(last), after, boundary, (boundary - 1).clamp(min=0), random)
    query = torch.arange(count, device=device)[:, None]
    kind = (query + torch.arange(heads, device=device)[None, :]) % len(choices)
    target = torch.zeros((count, heads), dtype=torch.int64, device=device)
    for index, choice in enumerate(choices):
        target = torch.where(kind == index, choice, target)
    target += torch.tensor(sequences.first, dtype=torch.int64, device=device)[:, None]
    steep = max(1.0, style.energy / math.sqrt(style.width) / FLAT)
    factors = [LEAN * steep * length.bit_length() / style.energy for length in sequences.visible]
    weights = torch.tensor(factors, dtype=torch.float32, device=device)
    return Lean(sequences.rows[target.clamp(max=len(sequences.rows) - 1)], weights)
