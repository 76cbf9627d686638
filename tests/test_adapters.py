"""Adapters are chosen by form; each backend and tactic is called by itself; what is missing is a typed skip."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

import op_support as support
import planted_attention as planted
import pytest
import torch
from definitions import rmsnorm, write_files
from extract_support import drafts_of, named
from op_support import definitions

from traceproof.cli.tactics import TacticRow, table, ways
from traceproof.dataset import dialects
from traceproof.dataset.definition import Definition, Dialect
from traceproof.extract.pipeline import drafted
from traceproof.ops import lookup, registry
from traceproof.ops.adapter import Values, resolve
from traceproof.ops.families import gdn
from traceproof.ops.families.attention import flashinfer_outputs
from traceproof.reasons import Skip, Unavailable, Verdict
from traceproof.run.case import make_inputs
from traceproof.run.plan import PlanSelection, planned_alone
from traceproof.run.trusted import Implementation
from traceproof.sandbox import Reply, Status
from traceproof.stacks import FIRST_TRUTHS, STACKS, Stack
from traceproof.stacks.sglang import align
from traceproof.tactics import backends_of, choosing, refusal, says_unsupported, setup, with_backend
from traceproof.testgen.calls import solution

ROOT = Path(__file__).parent
FILES = sorted([*(ROOT / "dataset").rglob("definitions/*/*.json"), *(ROOT / "gpu").rglob("definitions/*/*.json")])


# Of objects that several processes make together, or two streams; or of another layout.
METHODS = {
    *(
        *("pcie_ipc_all_reduce_h64", "pcie_ipc_all_gather_tp2_h48", "pcie_ipc_reduce_scatter_tp4_h48"),
        "segment_gemm_run_k40_n24",  # a method
        "moe_finalize_rmsnorm_allreduce_k2_h64_hp64",
        "tp_moe_finalize_rmsnorm_k4_h96_hp112",
    ),
    "moe_mxfp4_partitioned_tp_n_tp_k_topk2_e4_h128_i128",
}


def read(path: Path) -> Definition:
    return dialects.read(json.loads(path.read_text(encoding="utf-8"))).definition


def test_outputs_are_those_that_the_call_returns_in_whatever_order_a_definition_has_them() -> None:
    entry = support.load("cascade_merge", "merge_state_h3_d64").as_json()
    entry["outputs"] = dict(reversed(entry["outputs"].items()))
    definition = Definition.model_validate(entry)
    adapter = lookup.adapter("flashinfer", definition)
    assert adapter is not None
    merged = {"v_merged": torch.ones(1), "s_merged": torch.zeros(1)}
    api = dict.fromkeys(adapter.apis, lambda **_: tuple(merged.values()))
    assert adapter.call(api, definition, dict.fromkeys(definition.inputs)) == merged


@pytest.mark.parametrize("truth", ["torch", "sglang"])
def test_matrices_of_a_product_are_taken_by_position(truth: str) -> None:
    path = next(path for path in FILES if path.parent.name == "gemm")
    entry = read(path).as_json()
    entry["inputs"] = dict(zip("BA", entry["inputs"].values(), strict=True))
    definition = Definition.model_validate(entry)
    adapter = lookup.adapter(truth, definition)
    assert adapter is not None
    api = {"linear": torch.nn.functional.linear, "matmul": lambda a, b, _: a @ b}
    values: Values = {"B": torch.ones(3, 8), "A": torch.ones(5, 8)}
    assert adapter.call(api, definition, values)["C"].shape == (3, 5)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_definition_has_a_ground_truth(path: Path) -> None:
    definition = read(path)
    dumped = definition.model_copy(update={"dialect": Dialect.TRACE_DUMP})  # as which it names a function
    found = (lookup.serving(stack, one) for stack in FIRST_TRUTHS for one in (definition, dumped))
    assert any(found) or definition.name in METHODS


@pytest.mark.parametrize("name", FIRST_TRUTHS)
def test_adapters_call_only_what_the_table_holds(name: str) -> None:
    table = STACKS[name].apis
    op_types = {read(path).op_type for path in FILES}
    used = {
        api for op_type in op_types for item in registry.get(op_type).truths.get(name, ()) for api in item.apis
    }
    assert used
    assert {api for api in used if ":" not in api} <= table.keys()


@pytest.mark.parametrize(
    ("distribution", "place", "reason"),
    [("pytest", "json:vanished", Skip.API_ABSENT), ("no-such-thing", "absent:loads", Skip.PACKAGE_ABSENT)],
)
def test_what_is_missing_is_a_typed_skip(distribution: str, place: str, reason: Skip) -> None:
    package = place.partition(":")[0]
    stack = Stack(name="s", package=package, distribution=distribution, apis={"call": (place,)})
    found = resolve(stack, ("call",))
    assert isinstance(found, Unavailable)
    assert found.reason is reason


@pytest.fixture
def broken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Stack:
    """A stack whose package is installed and needs one that is not."""
    files = {
        "frail/__init__.py": "",
        "frail/ops/__init__.py": "import undeclared\n",
        "frail/slip.py": "import json\njson.vanished\n",
        "frail-1.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: frail\nVersion: 1.0\n",
    }
    write_files(tmp_path, files)
    monkeypatch.syspath_prepend(str(tmp_path))
    apis = {"rule": ("frail.ops:rule",), "gone": ("frail.old.ops:rule",), "slip": ("frail.slip:rule",)}
    return Stack(name="s", package="frail", distribution="frail", apis=apis)


def test_an_installed_package_that_cannot_be_imported_is_an_error(broken: Stack) -> None:
    with pytest.raises(ImportError, match=r"frail 1\.0 can not be imported: frail\.ops: .*'undeclared'"):
        resolve(broken, ("rule",))
    with pytest.raises(AttributeError, match="vanished"):
        resolve(broken, ("slip",))


def test_a_module_that_a_version_does_not_have_is_a_skip(broken: Stack) -> None:
    found = resolve(broken, ("gone",))
    assert isinstance(found, Unavailable)
    assert found.reason is Skip.API_ABSENT
    assert "No module named 'frail.old'" in found.message


def test_the_newest_name_that_exists_is_taken() -> None:
    stack = Stack(name="s", package="json", distribution="pytest", apis={"call": ("json:vanished", "json:loads")})
    found = resolve(stack, ("call",))
    assert not isinstance(found, Unavailable)
    assert found["call"] is json.loads


@pytest.mark.parametrize("queries", [None, [0, 1, 3, 4]])
def test_the_stand_in_for_minus_infinity_is_mapped_in_rows_without_keys_alone(queries: list[int] | None) -> None:
    definition = read(next(path for path in FILES if path.stem.startswith("gqa_paged_decode")))
    inputs: Values = {"kv_indptr": torch.tensor([0, 0, 2, 2], dtype=torch.int32)}
    own = [0, 1, 2]
    if queries is not None:
        inputs["qo_indptr"] = torch.tensor(queries, dtype=torch.int32)
        own = [0, 1, 1, 2]
    lse = torch.tensor([[-5e4, -49998.4141], [-63742.9952, -5e4], [-5e4, 3.0]])[own]
    mapped = flashinfer_outputs(definition, inputs, (torch.zeros(1), lse))["lse"].isinf()
    assert mapped.tolist() == torch.tensor([[True, True], [False, False], [True, False]])[own].tolist()


MLA = planted.mla(prefill=False, page=64, heads=16, ckv=512, kpe=64)


def with_optional(definition: Definition, cache: str = "bfloat16", **further: str) -> Definition:
    """As FlashInfer's trace template has it: with what its wrapper's `run` may be given."""
    given = definition.as_json()
    for name, dtype in further.items():
        given["inputs"][name] = {"shape": None, "dtype": dtype, "optional": True}
    for name in {"ckv_cache", "kpe_cache"} & given["inputs"].keys():
        given["inputs"][name]["dtype"] = cache
    return Definition.model_validate(given | {"dialect": Dialect.TRACE_DUMP.value})


@pytest.mark.parametrize("name", ["flashinfer", "sglang", "torch"])
@pytest.mark.parametrize("op_type", ["gqa_paged", "mla_paged", "mla_ragged"])
def test_attention_that_may_be_asked_for_its_log_sum_exp_has_the_same_adapter(op_type: str, name: str) -> None:
    found = [one for path in FILES if path.parent.name == op_type and "sm_scale" in (one := read(path)).inputs]
    definition = next(iter(found), MLA)
    plain, asked = (
        lookup.adapter(name, one) for one in (definition, with_optional(definition, return_lse="int32"))
    )
    assert plain is not None
    assert asked is plain


@pytest.mark.parametrize("name", ["flashinfer", "torch"])
def test_scales_of_a_cache_in_fp8_have_no_adapter(name: str) -> None:
    scales = dict.fromkeys(("ckv_scale", "kpe_scale"), "float32")
    assert lookup.adapter(name, with_optional(MLA, **scales)) is not None
    assert lookup.adapter(name, with_optional(MLA, "float8_e4m3fn", **scales)) is None


def test_pairs_are_sorted_into_blocks_of_one_expert() -> None:
    ids = torch.tensor([[2, 3, -1], [1, 2, -1]])
    tokens, experts, total = (torch.zeros(n, dtype=torch.int32) for n in (12, 6, 1))
    align(ids, 5, 2, tokens, experts, total)
    assert tokens.tolist() == [2, 5, 3, 6, 0, 4, 1, 6, 6, 6, 6, 6]
    assert experts.tolist() == [-1, 1, 2, 3, -1, -1]
    assert total.item() == 8


@pytest.mark.parametrize("case", ["small-1", "edge-empty", "edge-empty-sequence", "edge-no-state"])
def test_no_empty_sequence_reaches_the_kernel_that_would_wait_for_its_tokens(case: str) -> None:
    def kernel(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **given: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        bounds, before = given["cu_seqlens"], given["initial_state"]
        assert q.shape[0] == k.shape[0] == v.shape[0] == bounds[-1]
        assert bounds.diff().gt(0).all()
        assert before.shape == given["output_state"].shape
        return v, before + 1

    definition = support.load("gdn", "gdn_prefill_qk2_v4_d32_k_last")
    inputs = support.inputs_of(definition, support.case_named(definition, case))
    found = gdn._flashinfer_prefill({"gdn_prefill": kernel}, definition, inputs)
    grown = support.tensor(inputs, "cu_seqlens").diff().gt(0).float()[:, None, None, None]
    before = inputs["state"] if inputs["state"] is not None else torch.zeros_like(found["new_state"])
    assert torch.equal(found["new_state"], before + grown)
    assert torch.equal(found["output"], support.tensor(inputs, "v"))


FORMS = ("gemma_rmsnorm_h2048", "gemma_fused_add_rmsnorm_h2048")
CALLED = {
    ("flashinfer", FORMS[0]): "norm.gemma_rmsnorm",
    ("flashinfer", FORMS[1]): "norm.gemma_fused_add_rmsnorm",
    ("flashinfer", "fused_add_rmsnorm_h2048"): "norm.fused_add_rmsnorm",
    ("sglang", FORMS[0]): "layernorm.minimax_m3_rmsnorm.gemma_rmsnorm",
    ("sglang", FORMS[1]): "layernorm.minimax_m3_rmsnorm.gemma_fused_add_rmsnorm",
    ("sglang", "fused_add_rmsnorm_h2048"): "layernorm.norm.fused_add_rmsnorm",
    ("sglang_native", FORMS[0]): "GemmaRMSNorm.forward_native",
    ("sglang_native", FORMS[1]): None,
}


def definition(name: str) -> Definition:
    """What extraction writes of a stored reading."""
    model = "qwen3_next" if name.startswith("gemma") else "qwen3_30b"
    return drafted(drafts_of(named(model))[name])


@pytest.mark.parametrize(("truth", "name"), list(CALLED))
def test_the_call_is_of_the_definitions_form(truth: str, name: str) -> None:
    found = lookup.adapter(truth, definition(name))
    assert (found.name if found is not None else None) == CALLED[truth, name]
    if truth == "flashinfer" and found is not None:
        text = solution(definition(name), truth, None).sources[0].content
        assert f"from flashinfer.norm import {found.apis[0]} as" in text


@pytest.mark.parametrize("name", [*FORMS, "wide_output"])
def test_pytorch_adds_the_offset_and_gives_the_dtype_that_the_definition_names(name: str) -> None:
    described = rmsnorm(name)
    described["outputs"]["output"]["dtype"] = "float32"
    wanted = definition(name) if name in FORMS else Definition.model_validate(described)
    op, _ = registry.for_definition(wanted)
    torch_norm = Implementation("torch")
    assert torch_norm.unavailable(wanted) is None
    case = next(iter(op.cases(wanted, sizes=("small",), seed=0)))
    inputs = make_inputs(op, wanted, case, device=torch.device("cpu"))
    expected = op.oracle(wanted, dict(inputs))["output"]
    given = torch_norm.run(wanted, dict(inputs))["output"]
    assert str(given.dtype) == f"torch.{wanted.outputs['output'].dtype}"
    assert torch.allclose(given.double(), expected, rtol=2**-7, atol=1e-6)
    assert ("1.0" in solution(wanted, "torch", None).sources[0].content) == (name in FORMS)


STACK = Stack(
    name="one",
    package="one",
    distribution="one",
    backends={"listed": ("fa2", "fa3")},
    tuner="tuner_of_tests:Tuner",
)


@dataclass
class Runner:
    """Doubles by tactic 2, else does not."""

    def get_valid_tactics(self, inputs: Sequence[torch.Tensor], profile: Any) -> list[int]:  # noqa: ANN401
        """Of these sizes."""
        assert [tuple(one) for one in profile[0]] == [tuple(value.shape) for value in inputs]
        return [1, 2]

    def __call__(self, inputs: Sequence[torch.Tensor], tactic: int) -> torch.Tensor:
        """One call."""
        return inputs[0] * (2 if tactic == 2 else 1)


class Tuner:
    """As FlashInfer's: it chooses by times, which nobody foresees."""

    def choose_one(self, custom_op: str, *_: Any) -> Any:  # noqa: ANN401
        """A runner and a tactic, of an operation's runners, configuration and inputs."""
        raise AssertionError(f"{custom_op} is timed")


@pytest.fixture
def tuner(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Tuner]]:
    module = ModuleType("tuner_of_tests")
    vars(module).update(Tuner=Tuner, StaticDim=int, OptimizationProfile=lambda *given: given)
    monkeypatch.setitem(sys.modules, "tuner_of_tests", module)
    yield Tuner
    with pytest.raises(AssertionError, match="is timed"):  # it is as it was
        Tuner().choose_one("one", [], None, [])


def called(value: torch.Tensor, times: int = 1) -> list[torch.Tensor]:
    """What a package does: it asks its tuner in each of its operations."""
    chosen = [Tuner().choose_one("scale", [Runner()], None, [value]) for _ in range(times)]
    return [runner([value], tactic) for runner, tactic in chosen]


def test_each_tactic_is_called_where_it_was_listed(tuner: type[Tuner]) -> None:
    del tuner
    one = torch.ones(3, 5)
    with choosing(STACK) as answers:
        assert [float(value.max()) for value in called(one, times=2)] == [1.0, 1.0]
    assert [name for _, name in answers.listed] == ["Runner 1", "Runner 2"] * 2
    assert [place for place, _ in answers.listed][1::2] == [("scale", 0, 1), ("scale (2)", 0, 1)]
    with choosing(STACK, ["scale (2)", 0, 1]) as answers:
        assert [float(value.max()) for value in called(one, times=2)] == [1.0, 2.0]
    assert answers.answered
    with choosing(STACK, ["scale", 0, 7]) as answers:
        called(one)
    assert not answers.answered


def test_a_package_without_a_tuner_is_called_as_it_is() -> None:
    with choosing(Stack(name="one", package="one", distribution="one", tuner="not_there:Tuner")) as answers:
        pass
    assert answers.answered
    assert not answers.listed


def test_backends_are_listed_and_asked_for() -> None:
    def product(value: int, backend: Literal["cudnn", "cutlass", "auto"] = "auto") -> tuple[int, str]:
        return value, backend

    product.__annotations__["backend"] = Literal["cudnn", "cutlass", "auto"] | None  # an object, not its text
    api = {"listed": lambda backend="auto": backend, "product": product, "plain": len}
    assert backends_of(api, STACK) == ["fa2", "fa3", "cudnn", "cutlass"]
    asked = with_backend(api, "cutlass")
    assert (asked["listed"](), asked["product"](3), asked["plain"]([1])) == ("cutlass", (3, "cutlass"), 1)


def test_what_needs_another_package_is_a_skip_and_the_rest_is_a_finding() -> None:
    absent = refusal(ModuleNotFoundError("No module named 'cudnn'"))
    assert absent is not None
    assert absent.reason is Skip.PACKAGE_ABSENT
    assert refusal(RuntimeError("invalid configuration")) is None
    for text in ("'tileiras' compiler not found: `pip install cuda-tile`", "Failed to load cubin for prefill"):
        absent = refusal(RuntimeError(text))
        assert absent is not None
        assert absent.reason is Skip.PACKAGE_ABSENT


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (ValueError("page_size=1 must be >= 8 and divide the tile"), True),
        (ValueError("backend='x' requires kv_layout='HND'; got 'NHD'"), True),
        (NotImplementedError("return_lse=True requires the graph backend; it is not supported by this one"), True),
        (NotImplementedError("single-token prefill does not write every head; use another backend"), True),
        (type("_PlanUnsupportedError", (RuntimeError,), {})("x backend requires a packed query view"), True),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), False),
        (RuntimeError("TMA descriptor must be aligned"), False),
        (ValueError("cannot convert float NaN to integer"), False),
    ],
)
def test_a_backend_that_does_not_take_what_it_is_asked_is_told_from_one_that_fails(
    error: Exception, *, said: bool
) -> None:
    assert says_unsupported(error) == said


def test_a_worker_calls_and_judges_each_way() -> None:
    [definition] = [one for one in definitions("rmsnorm") if one.name == "rmsnorm_h96"]
    order: dict[str, Any] = {
        "implementation": "torch",
        "device": "cpu",
        "dataset": ".",
        "selection": {"sizes": ["small"], "seed": 0},
    }
    said = definition.as_json()
    asked = ok(setup(order), said)
    rows = [TacticRow(definition=definition.name, implementation="torch", **row) for row in ways(asked)]
    op, _ = registry.for_definition(definition)
    assert op.op_type == "rmsnorm"
    planned = planned_alone(definition, PlanSelection(sizes=("small",))).cases
    assert {row.case for row in rows} == {one.id for one in planned if not one.hidden}
    assert {row.verdict for row in rows} == {Verdict.PASS}
    order["implementation"] = "flashinfer"
    [row] = ways(ok(setup(order), said))
    assert row["reason"] in {Skip.NO_CUDA, Skip.PACKAGE_ABSENT, Skip.NEEDS_SM}


def ok(answer: Any, definition: object) -> Any:  # noqa: ANN401 - a handler
    return lambda item: Reply(status=Status.OK, value=answer({"definition": definition, **item}))


def test_a_way_that_fails_is_a_row_with_its_number() -> None:
    right = {"output": "y", "verdict": "pass", "reason": None, "message": "", "margin": 0.4}

    def asked(item: dict[str, Any]) -> Reply:
        if not item:
            return Reply(
                status=Status.OK, value={"cases": [{"id": "small-0"}, {"id": "small-1"}], "backends": ["fa2"]}
            )
        if item["tactic"]:
            return Reply(status=Status.CRASH, message="the worker exited with code 70")
        listed = [[["scale", 0, 4], "Runner 9"]] if item["backend"] else []
        return Reply(status=Status.OK, value={"rows": [right], "tactics": listed})

    found = [TacticRow(definition="d", implementation="flashinfer", **row) for row in ways(asked, ["small-0"])]
    assert [(row.backend, row.tactic, str(row.verdict)) for row in found] == [
        ("", "", "pass"),
        ("fa2", "", "pass"),
        ("fa2", "scale: Runner 9 (tactic 4 of runner 0)", "error"),
    ]
    assert found[-1].reason == "crash"
    assert "exited with code 70" in table(found)
    assert "wrong value" not in table(found)
    marked = found[-1].model_copy(
        update={"message": "no [heads, rows] below [/usr] :warning:"}
    )  # none of it is markup
    assert "no [heads, rows] below [/usr] :warning:" in table([marked])
    refused: dict[str, Any] = {
        "output": "*",
        "verdict": "skip",
        "reason": "unsupported",
        "message": "ValueError: q must be 3-D",
    }
    for name in ("d", "e"):
        row = TacticRow(
            definition=name, implementation="flashinfer", case="small-0", backend="fa2", tactic="", **refused
        )
        found.append(row)
    assert "fa2: q must be 3-D (d, e)" in table(found)
