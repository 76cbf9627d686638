"""Metamorphic relations: right references keep them, references with a planted violation do not."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import definitions as small
import op_support as ops
import pytest

from relations.building import Relation
from relations.op_types import RELATIONS, relations_of
from relations.trial import cases_of, try_relation, try_relations
from traceproof.dataset.definition import Definition
from traceproof.ops import registry
from traceproof.run.case import SolvedCase, solve
from traceproof.run.untrusted import loaded
from traceproof.sandbox import Limits, Pool

OWN = [ops.definitions(op_type)[0] for op_type in registry.known() if ops.definitions(op_type)]
DECODE = ops.load("gqa_paged", "gqa_paged_decode_h40_kv8_d128_ps16")
PREFILL = ops.load("gdn", "gdn_prefill_qk2_v4_d32_k_last")
POOL: list[Pool] = []
CASES = ("small-1", "edge-empty-row", "edge-empty-sequence", "edge-no-state", "adversarial-rows")


def subjects(definition: Definition, *names: str) -> list[SolvedCase]:
    """A few cases, drawn and solved."""
    return [solve(definition, case) for case in cases_of(definition, 0) if case.id in (names or CASES)]


@pytest.fixture(scope="module", autouse=True)
def workers(pool: Pool) -> Iterator[None]:
    POOL.append(pool)
    yield
    POOL.clear()


def tried(definition: Definition, relations: Iterable[Relation], cases: list[SolvedCase]) -> list[dict[str, Any]]:
    """What becomes of relations; each has a worker of its own."""
    found = []
    for relation in relations:
        with loaded(definition, POOL[0], limits=Limits(seconds=60)) as source:
            found.append(try_relation(relation, cases, source))
    return found


def broken(definition: Definition, *names: str) -> set[str]:
    """The relations that a reference breaks."""
    found = tried(definition, relations_of(definition), subjects(definition, *names))
    return {row["relation"] for row in found if row["agreement"] == "broken"}


def changed(definition: Definition, old: str, new: str) -> Definition:
    """The definition with a planted violation in its reference."""
    assert old in definition.reference
    return definition.model_copy(update={"reference": definition.reference.replace(old, new)})


def norm(body: str) -> Definition:
    return Definition.model_validate(small.rmsnorm("rmsnorm_h32", small.GOOD.replace("    return (", body)))


def test_every_op_type_with_an_oracle_has_relations() -> None:
    assert RELATIONS.keys() <= set(registry.known())
    assert all(relations_of(definition) for definition in OWN)


@pytest.mark.slow
@pytest.mark.parametrize("definition", OWN, ids=lambda definition: definition.name)
def test_right_references_keep_their_relations(definition: Definition) -> None:
    found = tried(definition, relations_of(definition), subjects(definition))
    assert not [row for row in found if row["agreement"] == "broken" or row["failing"]]
    least = 3 if definition.op_type in RELATIONS else 2  # of any op_type: those of a batch
    assert sum(row["cases"] > 0 for row in found) >= least


GROUPED = "q[row].float().reshape(num_kv_heads, -1, head_dim)"
CROSSED = "q[row].float().reshape(-1, num_kv_heads, head_dim).transpose(0, 1)"
MERGED = "KV split and merged by LSE"
BATCH = {"batch order", "batch split and concatenated"}
SAMPLER = ops.load("sampling", "top_k_sampling_from_probs_v1000")
EXPERTS = ops.load("moe", "trtllm_fp4_block_scale_routed_moe_topk4_e16_h512_i256")
STATE = PREFILL.reference.rsplit("return output, ", 1)[1].split()[0]
LOST = " * ~(cu_seqlens[1:] == cu_seqlens[:-1])[:, None, None, None]"
# What is planted, in which case it shows, and the relations that it breaks.
PLANTED: dict[str, tuple[Definition, str, set[str]]] = {
    "place in the batch": (norm("    y = y * (1 + 0.1 * torch.arange(len(y))[:, None])\n    return ("), "", BATCH),
    "size of the batch": (norm("    y = y * len(y)\n    return ("), "", {"batch split and concatenated"}),
    "place of a page": (
        changed(DECODE, "].long()", "].long().sort().values"),
        "medium-0",
        {"pages permuted", MERGED},
    ),
    "natural logarithm": (changed(DECODE, " / math.log(2.0)", ""), "", {MERGED, "softmax shift"}),
    "scale of its own": (
        changed(DECODE, "* sm_scale", "* 0.08"),
        "",
        {"q doubled, softmax scale halved", "softmax shift"},
    ),
    "head map": (changed(DECODE, GROUPED, CROSSED), "", {"heads permuted", "softmax shift"}),
    "large eps": (changed(norm("    return ("), "1e-6", "1e4"), "", {"x doubled, far from eps"}),
    "state of an empty sequence": (
        changed(PREFILL, f"return output, {STATE}", f"return output, {STATE}{LOST}"),
        "edge-empty-sequence",
        {"cut in time, state handed on"},
    ),
    "preferred row": (
        changed(
            SAMPLER, "        picked = ", "        weights = weights if row else weights ** 8\n        picked = "
        ),
        "medium-0",
        {"rows permuted"},
    ),
    "weight of an expert": (
        changed(EXPERTS, "result * weights", "result * (1 + local / 16) * weights"),
        "",
        {"experts permuted"},
    ),
}


@pytest.mark.parametrize(("definition", "case", "relations"), PLANTED.values(), ids=PLANTED)
def test_a_planted_violation_breaks_its_relation(definition: Definition, case: str, relations: set[str]) -> None:
    assert broken(definition, *filter(None, [case])) == relations


@pytest.mark.slow
def test_relations_run_in_a_worker_and_a_crash_breaks_the_relation_at_hand() -> None:
    # So many iterators inside one another exhaust the stack.
    nesting = "for _ in range(400_000):\n            it = itertools.chain(it, ())"
    nested = f"it = iter([])\n        {nesting}\n        next(it, None)"
    deadly = norm(f"    if len(y) == 1:\n        import itertools\n        {nested}\n    return (")
    limits = Limits(seconds=60)
    good = list(try_relations(norm("    return ("), POOL[0], limits=limits, seed=0))
    bad = list(try_relations(deadly, POOL[0], limits=limits, seed=0))
    names = [relation.name for relation in relations_of(norm("    return ("))]
    assert [found.relation for found in good] == [found.relation for found in bad] == names
    assert not any(found.broken for found in good)
    assert all("crash" in found.evidence for found in bad if found.broken)
    assert bad[1].broken  # a split leaves one row
