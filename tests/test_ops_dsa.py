"""Sparse attention: lists of indices and the top-k indexer; every planted bug shows on the cases we plan."""

from __future__ import annotations

import math
from collections.abc import Callable

import planted_attention as planted
import pytest
import torch

from traceproof.dataset.definition import Definition
from traceproof.draw import Draw, fingerprint
from traceproof.judge import gates
from traceproof.ops import registry
from traceproof.ops.base import TORCH_DTYPES, Op, Unsupported, Values
from traceproof.ops.cases import Case
from traceproof.ops.common.attention_inputs import POISON

CPU = torch.device("cpu")
HEADS, DIM, PAGE, TOPK = 8, 128, 16, 64


pytestmark = pytest.mark.usefixtures("one_thread")


def indexer(*, packed: int = DIM + 4, kv_heads: int = 1) -> Definition:
    inputs: planted.Shapes = {
        "q_index_fp8": (["batch_size", "heads", "dim"], "float8_e4m3fn"),
        "k_index_cache_fp8": (["num_pages", "page_size", "kv_heads", "packed"], "int8"),
        "weights": (["batch_size", "heads"], "float32"),
        "seq_lens": (["batch_size"], "int32"),
        "block_table": (["batch_size", "max_num_pages"], "int32"),
    }
    sizes = {"heads": HEADS, "dim": DIM, "page_size": PAGE, "kv_heads": kv_heads, "packed": packed, "topk": TOPK}
    outputs: planted.Shapes = {"topk_indices": (["batch_size", "topk"], "int32")}
    return planted.build("indexer", "dsa_paged", inputs, outputs, sizes)


def op(definition: Definition) -> Op:
    return registry.get("dsa_paged").of_form(definition)


def drawn(definition: Definition, case: Case) -> Values:
    return op(definition).inputs(
        definition, case, Draw(definition=definition.name, case=case.id, seed=case.seed, device=CPU)
    )


def cases(definition: Definition, *sizes: str) -> list[Case]:
    return list(op(definition).cases(definition, sizes=sizes or ("small", "medium"), seed=0))


def tensor(inputs: Values, name: str) -> torch.Tensor:
    value = inputs[name]
    assert isinstance(value, torch.Tensor)
    return value


def keys_of(cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys [pages, page_size, DIM] and scales [pages, page_size], float32, read byte by byte from the layout."""
    raw = cache.contiguous().view(torch.uint8).reshape(len(cache), -1)
    keys = raw[:, : PAGE * DIM].contiguous().view(torch.float8_e4m3fn).float().view(-1, PAGE, DIM)
    return keys, raw[:, PAGE * DIM :].contiguous().view(torch.float32)


def index(inputs: Values, **wrong: bool) -> torch.Tensor:
    """The indexer as a kernel computes it, in float32, with what `wrong` names done wrong."""
    keys, scales = keys_of(tensor(inputs, "k_index_cache_fp8"))
    if wrong.get("scales_by_token"):  # as if each token's 128 bytes were followed by its scale
        raw = tensor(inputs, "k_index_cache_fp8").view(torch.uint8).reshape(-1, PAGE, DIM + 4)
        keys = raw[..., :DIM].contiguous().view(torch.float8_e4m3fn).float()
        scales = raw[..., DIM:].contiguous().view(torch.float32).squeeze(-1)
    if wrong.get("no_scales"):
        scales = torch.ones_like(scales)
    scaled = (keys * scales[..., None]).nan_to_num()
    weights = tensor(inputs, "weights").clone()
    if wrong.get("dead_head"):
        weights[:, HEADS // 2] = 0
    chosen = torch.full((len(weights), TOPK), -1, dtype=torch.int32)
    for row, length in enumerate(tensor(inputs, "seq_lens").tolist()):
        taken = length + bool(wrong.get("one_more") and length) - bool(wrong.get("one_less") and length)
        if wrong.get("whole_pages"):
            taken = -(-length // PAGE) * PAGE
        table = tensor(inputs, "block_table")[row].long()
        if wrong.get("no_table"):
            table = torch.arange(len(table)).clamp(max=len(scaled) - 1)
        tokens = scaled[table].view(-1, DIM)[:taken]
        logits = tensor(inputs, "q_index_fp8")[row].float() @ tokens.T
        positive = logits if wrong.get("no_relu") else torch.relu(logits)
        scores = positive.sum(0) if wrong.get("no_weights") else weights[row] @ positive
        if wrong.get("padding_scores_zero"):
            scores = torch.nn.functional.pad(scores, (0, len(table) * PAGE - taken))
        count = min(TOPK, len(scores)) - bool(wrong.get("k_less") and len(scores))
        best = torch.topk(scores, count, largest=not wrong.get("smallest")).indices
        named = table[best // PAGE] * PAGE + best % PAGE
        if wrong.get("local"):
            named = best
        if wrong.get("repeated") and count > 1:
            named[1] = named[0]
        chosen[row, :count] = named.to(torch.int32)
    return chosen


def accepted(definition: Definition, inputs: Values, chosen: torch.Tensor) -> bool:
    entries = {name.partition("@")[2]: value for name, value in op(definition).oracle(definition, inputs).items()}
    return gates.index_set(chosen, entries, -1).ok


BUGS = (
    "scales_by_token",
    "no_scales",
    "dead_head",
    "one_more",
    "one_less",
    "whole_pages",
    "no_table",
    "no_relu",
    "no_weights",
    "padding_scores_zero",
    "k_less",
    "smallest",
    "local",
    "repeated",
)


@pytest.mark.parametrize("case", cases(indexer()), ids=lambda case: case.id)
def test_a_right_indexer_passes(case: Case) -> None:
    definition = indexer()
    inputs = drawn(definition, case)
    assert accepted(definition, inputs, index(inputs))
    assert accepted(definition, inputs, op(definition).oracle(definition, inputs)["topk_indices"])


@pytest.mark.parametrize("bug", BUGS)
def test_every_planted_bug_of_an_indexer_shows(bug: str) -> None:
    definition = indexer()
    every = [drawn(definition, case) for case in cases(definition)]
    assert not all(accepted(definition, inputs, index(inputs, **{bug: True})) for inputs in every)


def test_indexer_lengths_lie_on_both_sides_of_topk_and_of_a_page() -> None:
    definition = indexer()
    lengths = {length for case in cases(definition) for length in case.params["seq_lens"]}
    assert {0, 1, PAGE - 1, PAGE, PAGE + 1, TOPK - 1, TOPK, TOPK + 1, 2 * TOPK} <= lengths
    for case in cases(definition, "small", "medium", "large"):
        assert case.axes["max_num_pages"] * PAGE >= TOPK
        assert op(definition).memory(definition, case) > 0


def test_indexer_inputs_fit_the_definition_and_repeat() -> None:
    definition = indexer()
    for case in cases(definition):
        first, second = drawn(definition, case), drawn(definition, case)
        assert list(first) == list(definition.inputs)
        for name, spec in definition.inputs.items():
            value = tensor(first, name)
            assert tuple(value.shape) == definition.shape_of(spec, case.axes), (case.id, name)
            assert value.dtype == TORCH_DTYPES[spec.dtype]
            assert fingerprint(value) == fingerprint(tensor(second, name))
        keys, scales = keys_of(tensor(first, "k_index_cache_fp8"))
        assert torch.isfinite(keys).all()
        assert (scales > 0).all()
        table = tensor(first, "block_table")
        assert int(table.min()) >= 0
        assert int(table.max()) < case.axes["num_pages"]


def test_scales_spread_over_powers_of_two() -> None:
    definition = indexer()
    (case,) = (case for case in cases(definition) if case.id == "adversarial-plain")
    _, scales = keys_of(tensor(drawn(definition, case), "k_index_cache_fp8"))
    exponents = set(torch.frexp(scales[scales < 4]).exponent.tolist())
    assert exponents == {-1, 0, 1, 2}


def test_when_relu_cuts_everything_any_choice_is_right_but_not_any_number() -> None:
    definition = indexer()
    (case,) = (case for case in cases(definition) if case.id == "adversarial-zero")
    inputs = drawn(definition, case)
    assert (
        not op(definition).oracle(definition, inputs)["topk_indices@scores"].clamp(min=-1).max(dim=1).values.any()
    )
    assert accepted(definition, inputs, index(inputs, smallest=True))
    assert not accepted(definition, inputs, index(inputs, k_less=True))


@pytest.mark.parametrize("change", [{"packed": DIM + 8}, {"kv_heads": 2}])
def test_unknown_layouts_are_said_to_be_unknown(change: dict[str, int]) -> None:
    with pytest.raises(Unsupported, match="last axes"):
        op(indexer(**change)).check(indexer(**change))


def test_sparse_lists_are_distinct_padded_and_never_name_the_ends_of_the_pool() -> None:
    definition = planted.sparse()
    counts = set()
    for case in cases(definition):
        inputs = drawn(definition, case)
        lists = tensor(inputs, "sparse_indices")
        pool = case.axes["num_pages"] * planted.PAGE
        for row, valid in zip(lists, case.params["valid"], strict=True):
            named = row[row >= 0]
            assert len(named) == len(torch.unique(named)) == valid
            assert not len(named) or (int(named.min()) > 0 and int(named.max()) < pool - 1)
            assert (row[row < 0] == -1).all()
            counts.add(valid)
        cache = tensor(inputs, "ckv_cache").flatten(0, 1)
        unnamed = torch.ones(pool, dtype=torch.bool)
        unnamed[lists[lists >= 0].long()] = False
        assert (cache[unnamed, cache.shape[1] // 2] == POISON).all()
    assert {0, 1, planted.TOPK - 1, planted.TOPK} <= counts


def test_sparse_holes_lie_between_the_indices() -> None:
    definition = planted.sparse()
    (case,) = (case for case in cases(definition) if case.id == "adversarial-holes")
    first = tensor(drawn(definition, case), "sparse_indices")[0]
    assert (first.diff().sign() != 0).any()
    padding = (first == -1).nonzero().flatten()
    assert int(padding.min()) < case.params["valid"][0]


def negative_as_last(inputs: Values) -> Values:
    return {**inputs, "sparse_indices": tensor(inputs, "sparse_indices").clamp(min=-1) % pool_of(inputs)}


def negative_as_first(inputs: Values) -> Values:
    return {**inputs, "sparse_indices": tensor(inputs, "sparse_indices").clamp(min=0)}


def pages_for_tokens(inputs: Values) -> Values:
    """Indices taken for page numbers."""
    lists = tensor(inputs, "sparse_indices")
    wrong = (lists * planted.PAGE).clamp(max=pool_of(inputs) - 1)
    return {**inputs, "sparse_indices": torch.where(lists < 0, lists, wrong)}


def first_hole_ends_the_list(inputs: Values) -> Values:
    lists = tensor(inputs, "sparse_indices")
    return {**inputs, "sparse_indices": torch.where((lists < 0).cumsum(-1) > 0, -1, lists)}


def pool_of(inputs: Values) -> int:
    return math.prod(tensor(inputs, "ckv_cache").shape[:2])


@pytest.mark.parametrize(
    "bug",
    [negative_as_last, negative_as_first, pages_for_tokens, first_hole_ends_the_list],
    ids=lambda bug: bug.__name__,
)
def test_wrong_readings_of_the_lists_show(bug: Callable[[Values], Values]) -> None:
    definition = planted.sparse()
    shown = []
    for case in cases(definition):
        inputs = drawn(definition, case)
        exact, floor = op(definition).oracle(definition, inputs), op(definition).floor(definition, inputs)
        wrong = op(definition).oracle(definition, bug(inputs))["output"]
        error, lost = (wrong - exact["output"]).abs().max(), (floor["output"] - exact["output"]).abs().max()
        shown.append(float(error) > 10 * float(lost) + 1e-6)
    assert any(shown)


def test_inputs_that_leave_one_choice_are_not_told_apart() -> None:
    """With fewer tokens than topk all are chosen, whatever the scores: the same page means the same answer."""
    definition = indexer()
    case = next(case for case in cases(definition) if case.axes["batch_size"])
    inputs = drawn(definition, case)
    short = inputs | {"seq_lens": torch.full_like(tensor(inputs, "seq_lens"), TOPK // 2)}
    other = short | {"weights": torch.flip(tensor(short, "weights"), (-1,))}
    assert not op(definition).tells_apart(definition, short, other)
    table = tensor(short, "block_table")
    assert op(definition).tells_apart(definition, short, short | {"block_table": table.flip(-1)})
