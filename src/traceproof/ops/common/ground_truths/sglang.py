"""SGLang's Triton attention: decode over a cache, and the extension of a cached prefix by new tokens.

Both read a cache token by token, so page tables become token indices. A query that sees no key is no case of a
server and is not handed over: its output is 0, its log-sum-exp minus infinity.
"""

import math
from collections.abc import Callable, Sequence
from itertools import pairwise

import torch

from traceproof.ops.adapter import SM80, Adapter, Api, Definition, Outputs, Signature, Values, dim, scalar, tensor

DTYPES = frozenset({"float16", "bfloat16"})  # products of float32 would be TF32
SPLITS = 8  # parts that a row's keys are cut into, SGLang's default
TILE = 16  # query heads that a program of the decode kernel has
LATENT = frozenset({(576, 512), (288, 256)})  # widths at which values are the first part of a tile of keys
NARROWEST = 16  # channels that a tensor core multiplies

Cache = tuple[torch.Tensor, torch.Tensor]  # keys [slots, key heads, width], values [slots, key heads, their width]
Operands = tuple[torch.Tensor, Cache, Sequence[torch.Tensor]]  # queries, the cache, and the slots of each row
Accepts = Callable[[Definition], bool]


def decoding(signature: Signature, accepts: Accepts, operands: Callable[[Values], Operands]) -> Adapter:
    """Adapter of the decode kernel."""
    return _adapter("decode_attention", decode, signature, accepts, operands)


def extending(signature: Signature, accepts: Accepts, operands: Callable[[Values], Operands]) -> Adapter:
    """Adapter of the kernel that extends a cached prefix."""
    return _adapter("extend_attention", extend, signature, accepts, operands)


def _adapter(
    key: str,
    kernel: Callable[[Api, Values, Operands], Outputs],
    signature: Signature,
    accepts: Accepts,
    operands: Callable[[Values], Operands],
) -> Adapter:
    def call(api: Api, definition: Definition, inputs: Values) -> Outputs:
        outputs = kernel(api, inputs, operands(inputs))
        return {name: outputs[name] for name in definition.outputs}

    return Adapter(f"triton_ops.{key}_fwd", signature, call, (key,), accepts=accepts, dtypes=DTYPES, sm=SM80)


def heads_fit(definition: Definition, query: str, kv_heads: int) -> bool:
    """Whether the decode kernel has its heads right, and multiplies on tensor cores.

    Beyond TILE query heads per key head, a tile must not reach into the next key head's. Where each has a key head
    of its own, another kernel rounds every product of a query and a key to their dtype before it sums them.
    """
    heads = dim(definition, query, -2) or 0
    if not kv_heads or not heads or heads % kv_heads:
        return False
    ratio = heads // kv_heads
    return ratio > 1 and (ratio <= TILE or ratio % TILE == 0 or kv_heads == 1)


def wide(definition: Definition, *names: str) -> bool:
    """Whether the heads of these inputs have a size of their own that a tensor core takes."""
    return all((dim(definition, name, -1) or 0) >= NARROWEST for name in names)


def decode(api: Api, inputs: Values, operands: Operands) -> Outputs:
    """One query per row [rows, heads, width], which sees all of the row's tokens.

    The kernel keeps the log-sum-exp of every part it cuts a row into, by e; the row's is put together here.
    """
    q, (keys, values), rows = operands
    output, lse = _blank(q, values)
    kept = [row for row, tokens in enumerate(rows) if len(tokens)]
    if kept:
        place = torch.tensor(kept, device=q.device)
        queries = q[place]
        shape = (*queries.shape[:2], SPLITS)
        parts = torch.full(shape, -math.inf, dtype=torch.float32, device=q.device)
        attended = torch.empty((*shape[:2], values.shape[-1]), dtype=q.dtype, device=q.device)
        api["decode_attention"](
            queries,
            keys,
            values,
            attended,
            _bounds([len(rows[row]) for row in kept], q.device),
            torch.cat([rows[row] for row in kept]),
            torch.empty((*shape, values.shape[-1]), dtype=torch.float32, device=q.device),
            parts,
            torch.full(shape[:1], SPLITS, dtype=torch.int32, device=q.device),
            SPLITS,
            scalar(inputs, "sm_scale"),
            1.0,
            1.0,
            has_mla=(keys.shape[-1], values.shape[-1]) in LATENT,
        )
        output[place], lse[place] = attended, torch.logsumexp(parts, -1) / math.log(2)
    return {"output": output, "lse": lse}


def extend(api: Api, inputs: Values, operands: Operands) -> Outputs:
    """Causal: the last query of a row sees all its tokens. The queries' own tokens are the last ones of the row.

    What comes before them is the cached prefix. With fewer tokens than queries, the first queries see none.
    """
    q, (keys, values), rows = operands
    output, lse = _blank(q, values)
    ends = tensor(inputs, "qo_indptr").tolist()[1:]
    starts = tensor(inputs, "qo_indptr").tolist()[:-1]
    counts = [min(end - start, len(row)) for start, end, row in zip(starts, ends, rows, strict=True)]
    if sum(counts):
        place = torch.cat(
            [torch.arange(end - count, end, device=q.device) for end, count in zip(ends, counts, strict=True)]
        )
        own = torch.cat([row[len(row) - count :] for row, count in zip(rows, counts, strict=True)])
        before = [row[: len(row) - count] for row, count in zip(rows, counts, strict=True)]
        queries = q[place]
        attended = torch.empty((*queries.shape[:2], values.shape[-1]), dtype=q.dtype, device=q.device)
        natural = torch.empty(queries.shape[:2], dtype=torch.float32, device=q.device)
        api["extend_attention"](
            queries,
            keys[own].contiguous(),
            values[own].contiguous(),
            attended,
            keys,
            values,
            _bounds(counts, q.device),
            _bounds([len(row) for row in before], q.device),
            torch.cat(before),
            None,
            True,  # noqa: FBT003 - is_causal, positional in SGLang
            None,
            max(counts),
            1.0,
            1.0,
            sm_scale=scalar(inputs, "sm_scale"),
            lse_extend=natural,
        )
        output[place], lse[place] = attended, natural / math.log(2)
    return {"output": output, "lse": lse}


def ragged(inputs: Values) -> list[torch.Tensor]:
    """Each row's token positions where rows of keys lie end to end."""
    indptr = tensor(inputs, "kv_indptr")
    return [torch.arange(start, end, device=indptr.device) for start, end in pairwise(indptr.tolist())]


def _blank(q: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and log-sum-exp of queries that see nothing."""
    output = torch.zeros((*q.shape[:2], values.shape[-1]), dtype=q.dtype, device=q.device)
    return output, torch.full(q.shape[:2], -math.inf, dtype=torch.float32, device=q.device)


def _bounds(lengths: Sequence[int], device: torch.device) -> torch.Tensor:
    """Where rows of these lengths begin, and where the last one ends; int64, as offsets are multiplied with it."""
    return torch.tensor([0, *lengths], device=device).cumsum(0)
