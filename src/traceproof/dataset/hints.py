"""What names and descriptions say: about an input's values, and about FlashInfer's sizes, modes and dtypes."""

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from enum import StrEnum
from typing import Any

from traceproof.dataset.constraints import names
from traceproof.dataset.definition import DType


class Role(StrEnum):
    """The kind of values that an input takes."""

    DATA = "data"  # any number
    OFFSETS = "offsets"  # ascending from 0: indptr, cumulative lengths
    INDICES = "indices"  # of rows, pages, experts, slots
    LENGTHS = "lengths"  # of sequences, at least 1
    MASK = "mask"  # true or false, packed or not
    SCALE = "scale"  # positive, near 1
    SEED = "seed"  # any integer


# The first role with a word in the name applies. The words are the dataset's and FlashInfer's.
WORDS: Mapping[Role, str] = {
    Role.SEED: "seed philox",
    Role.OFFSETS: "indptr cu cumsum offsets",
    Role.LENGTHS: "len lens length lengths seqlen seqlens",
    Role.INDICES: "indices index ids idx positions position pos table tables slot slots",
    Role.MASK: "mask bitmap",
    Role.SCALE: "scale scales sf temperature",
}


def role_of(name: str) -> Role:
    """The role of an input, by its name."""
    words = re.split(r"[_\d]+", name.lower())
    return next((role for role, known in WORDS.items() if not set(words).isdisjoint(known.split())), Role.DATA)


# Relations to another axis in an axis' name, in which `one` stands for that axis or `one_size`.
RELATIONS: tuple[tuple[re.Pattern[str], str], ...] = (
    # `K_div_2`, `K_div_block_size`, `N_mul_2`, `batch_size_plus_1_kv`, `num_experts_plus_one`
    (re.compile(r"(?P<one>\w+?)_div_(?P<by>\d+(?=_|$)|\w+)"), "{one} == {name} * {by}"),
    (re.compile(r"(?P<one>\w+?)_mul_(?P<by>\d+(?=_|$)|\w+)"), "{name} == {one} * {by}"),
    (re.compile(r"(?P<one>\w+?)_plus_(?P<by>\d+(?=_|$)|\w+)"), "{name} == {one} + {by}"),
    (re.compile(r"(?P<one>\w+)_doubled\Z"), "{name} == 2 * {one}"),
    (re.compile(r"(?P<one>\w+)_half\Z"), "{one} == 2 * {name}"),
    (re.compile(r"num_packed_(?P<one>\w+)\Z"), "{one} == 2 * {name}"),  # two 4-bit values per byte
    (re.compile(r"(?P<one>\w+)_padded\Z"), "{name} >= {one}"),
)
BLOCKS = re.compile(r"num(?:_(?P<format>fp4|mxint4))?_(?P<one>\w+)_blocks")
BLOCK: Mapping[str | None, int] = {None: 128, "fp4": 16, "mxint4": 32}  # values per scale, by format
LISTED = re.compile(r"\(([^()]*)\)")  # sizes in a description, one per axis: `(32, N//128, 1)`
OVER = re.compile(r"\bover (\d+) values\b")  # in the description of a scales tensor
# Constraints among experts' axes. Kernels load 16 bytes at a time, which are 32 4-bit values.
EXPERTS = (
    "hidden_size % 32 == 0",
    "intermediate_size % 32 == 0",
    "num_local_experts <= num_experts",
    "top_k <= num_experts",
    "top_k <= num_local_experts",
    "gemm1_out_size == 2 * intermediate_size",
    "num_experts % n_group == 0 and num_experts >= 2 * n_group",
    "topk_group <= n_group",
    "top_k * n_group <= num_experts * topk_group",
)
TEXT = re.compile(r"[\w-]+")  # a mode in a tag: `partition-strategy:tp_n_tp_k`
MODE = re.compile(r"(\d+)=\w+\.?")  # the mode that a definition is of, in a description: `2=MxFp8.`
# The only size of an axis, in a description: `(must be 1)`, `Always 1;`, `DeepSeek-V3 hidden dim (7168).`
ONLY = re.compile(r"\b(?:must|required to) be (\d+)\b|\balways (\d+)\b|\((\d+)\)\.?$", re.IGNORECASE)
INDICES = frozenset({Role.OFFSETS, Role.INDICES, Role.LENGTHS, Role.SEED})
# Words in the description of a tensor without dtype; the first match counts.
DTYPES: tuple[tuple[re.Pattern[str], DType], ...] = (
    (re.compile(r"\buint8\b"), DType.UINT8),
    (re.compile(r"\bint32\b|\bexpert ids\b"), DType.INT32),
    (re.compile(r"\bint64\b"), DType.INT64),
    (
        re.compile(r"\bpacked E2M1\b|Packed (FP4|E2M1|4-bit)|(FP4|Int4)-packed|scale bytes|\bLogical E8M0\b"),
        DType.UINT8,
    ),
    (re.compile(r"\bbf16\.?$"), DType.BFLOAT16),
    (re.compile(r"\bU?E8M0\b.{0,40} scales?\b"), DType.FLOAT8_E8M0FNU),
    (re.compile(r"\b[Ff]loat32\b|\bFP32\b"), DType.FLOAT32),
    (
        re.compile(r"\bfloat8_e4m3fn\b|\(float8\)|\bE4M3 (scales|buffer)\b|FP8[- ]quantized|FP8 weights"),
        DType.FLOAT8_E4M3FN,
    ),
)


def stated_constraints(
    axes: Mapping[str, Any], inputs: Mapping[str, Any], tags: object = ()
) -> Iterator[tuple[str, str]]:
    """Constraints on axes, integers and texts that names, descriptions and tags state: (constraint, source)."""
    for name in axes:
        for pattern, relation in RELATIONS:
            parts = match.groupdict() if (match := pattern.match(name)) else {}
            axis, by = _axis(parts.get("one", ""), axes), parts.get("by", "1").replace("one", "1")
            if axis and (by in axes or by.isdigit()):
                yield relation.format(name=name, one=axis, by=by), f"the name of axes.{name}"
        yield from _blocks(name, axes, inputs)
        only = ONLY.search(str(axes[name].get("description"))) if isinstance(axes[name], dict) else None
        if only and "value" not in axes[name]:
            yield f"{name} == {only[only.lastindex or 0]}", f"the description of axes.{name}"
    for constraint in EXPERTS if {"num_experts", "num_local_experts"} & set(axes) else ():
        if names(constraint) <= set(axes):
            yield constraint, "the names of experts' axes"
    yield from _described(axes, inputs, tags if isinstance(tags, list) else [])


def _described(
    axes: Mapping[str, Any], inputs: Mapping[str, Any], tags: Iterable[object]
) -> Iterator[tuple[str, str]]:
    """Constraints that descriptions of inputs, and tags, state."""
    for name, spec in inputs.items():
        if not isinstance(spec, dict):
            continue
        mode = MODE.fullmatch(str(spec.get("description"))) if spec.get("shape") is None else None
        modes = [f"{name} == {mode[1]}"] if mode else []
        for constraint in (*modes, *_listed(spec, axes)):
            yield constraint, f"the description of inputs.{name}"
    for tag in tags:
        word, _, value = str(tag).partition(":")
        spec = inputs.get(word.replace("-", "_"))
        if isinstance(spec, dict) and spec.get("dtype") == DType.STRING and TEXT.fullmatch(value):
            yield f"{word.replace('-', '_')} == {value!r}", f"the tag {tag}"


def _listed(spec: Mapping[str, Any], axes: Mapping[str, Any]) -> Iterator[str]:
    """Sizes that a description lists, one per axis, as in `(32, 4, N//128, 1)`."""
    shape = [str(axis) for axis in spec["shape"]] if isinstance(spec.get("shape"), list) else []
    for match in LISTED.finditer(str(spec.get("description"))):
        sizes = [size.strip() for size in match[1].split(",")]
        known = all(size.isdigit() or set() < names(size) <= set(axes) for size in sizes)
        if len(sizes) == len(shape) and known:
            pairs = dict(zip(shape, sizes, strict=True)).items()
            open_ones = {axis for axis, kind in axes.items() if isinstance(kind, dict) and "value" not in kind}
            yield from (f"{axis} == {size}" for axis, size in pairs if axis in open_ones)


def _blocks(name: str, axes: Collection[str], inputs: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Constraint of an axis that counts blocks: values per scale, by a description or by the format."""
    match = BLOCKS.fullmatch(name)
    axis = _axis(match["one"], axes) if match else None
    if match is None or axis is None:
        return
    for where, spec in inputs.items():
        values = OVER.search(str(spec.get("description"))) if isinstance(spec, dict) else None
        if values and name in (spec.get("shape") or ()):
            yield f"{axis} == {values[1]} * {name}", f"the description of inputs.{where}"
            return
    block = "block_k" if "block_k" in axes else BLOCK[match["format"]]
    yield f"{axis} == {block} * {name}", f"the name of axes.{name}"


def _axis(word: str, axes: Collection[str]) -> str | None:
    """The axis called `word` or `word_size`; or None."""
    return next((name for name in (word, f"{word}_size") if name in axes), None)


def dtype_of(name: str, spec: Mapping[str, Any]) -> DType:
    """The dtype of an input without one: by its description, else what FlashInfer takes for its role."""
    description = str(spec.get("description"))
    if any("packed" in str(axis).split("_") for axis in spec.get("shape") or ()):
        return DType.UINT8
    role = role_of(name)
    by_role = {Role.MASK: DType.BOOL, Role.SCALE: DType.FLOAT32}.get(role, DType.BFLOAT16)
    plain = DType.INT32 if role in INDICES else by_role
    return next((dtype for words, dtype in DTYPES if words.search(description)), plain)
