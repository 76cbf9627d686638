"""The library: functions, cases and outputs judged as the engine does; gradients; the pytest plugin."""

from __future__ import annotations

import functools
import math
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import forked
import numpy as np
import pytest
import torch
from solution_judge import forked_environment
from torch.nn import functional

import traceproof
from traceproof import TraceproofError, api
from traceproof.dataset.definition import Definition
from traceproof.ops import registry
from traceproof.ops.base import Tensors, Value, rounded
from traceproof.reasons import Skip, Verdict
from traceproof.solutions import judging

pytestmark = pytest.mark.usefixtures("one_thread")
DATASET = Path(__file__).parent / "dataset"
NAME = "rmsnorm_h96"
# Sizes of the axes that a form has no default for, or whose default makes cases that take long.
# fmt: off
AXES = {
    "hidden_size": 256, "num_heads": 3, "head_dim": 64, "vocab_size": 500, "channels": 48, "width": 4, "N": 256,
    "K": 128, "num_blocks": 2, "head_size": 64, "rotary_dim": 32, "num_qo_heads": 4, "num_kv_heads": 2,
    "num_q_heads": 2, "num_v_heads": 4, "head_dim_ckv": 64, "head_dim_kpe": 32, "topk": 64, "nheads": 4,
    "dstate": 16, "ngroups": 2, "top_k": 2, "num_local_experts": 4, "intermediate_size": 128, "num_experts": 32,
}
# fmt: on


def axes_of(form: api.NamedForm) -> dict[str, int]:
    """Small sizes for a form."""
    return {name: AXES[name] for name in form.parameters if name in AXES}


def norm(hidden_states: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    x = hidden_states.float()
    y = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    return (y * weight.float()).to(hidden_states.dtype)


X, W = torch.linspace(-2, 3, 4 * 64).view(4, 64).bfloat16(), torch.ones(64, dtype=torch.bfloat16)
ROWS = torch.ones(2, 1, 4, dtype=torch.bfloat16)


def wrong(hidden_states: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return norm(hidden_states, weight, eps=1e-5)


def swapped(weight: torch.Tensor, hidden_states: torch.Tensor) -> torch.Tensor:
    return norm(hidden_states, weight)


def by_oracle(definition: Definition) -> Callable[..., Tensors]:
    """A function that gives what the oracle says, rounded once; of a sampler, the likeliest token."""
    op, unknown = registry.for_definition(definition)
    assert unknown is None

    def function(*inputs: Value) -> Tensors:
        values = dict(zip(definition.inputs, inputs, strict=True))
        found = op.oracle(definition, values)
        if "samples@probs" in found:
            tokens, probs = found["samples@tokens"], found["samples@probs"]
            drawn = torch.multinomial(probs, 1) if len(probs) else torch.empty(0, 1, dtype=torch.int64)
            return {"samples": tokens.gather(1, drawn).squeeze(1)}
        whole = {name for name, spec in definition.outputs.items() if "int" in spec.dtype}
        return rounded(definition, {k: v.round() if k in whole else v for k, v in found.items()})

    return function


@pytest.mark.slow
@pytest.mark.parametrize("form", api.forms().values(), ids=api.forms())
def test_each_form_has_an_oracle_that_accepts_right_and_refuses_zeros(form: api.NamedForm) -> None:
    definition = form.definition("bfloat16", axes_of(form))
    assert registry.for_definition(definition)[1] is None
    right = by_oracle(definition)
    assert all(case.inputs for case in traceproof.cases(definition, sizes=("small",), device="cpu"))
    report = traceproof.check(right, definition, cases=["small-0"], device="cpu")
    assert report, str(report)
    zeros = traceproof.check(
        lambda *given: {name: torch.zeros_like(value) for name, value in right(*given).items()},
        definition,
        cases=["small-0"],
        device="cpu",
    )
    assert not zeros
    assert zeros.failures


def test_a_report_says_what_is_wrong_where_and_how_to_repeat_it() -> None:
    assert traceproof.check(norm, "rmsnorm", hidden_size=96)
    report = traceproof.check(wrong, "rmsnorm", hidden_size=96)
    assert not report
    told = str(report)
    for text in (
        "WRONG: wrong for rmsnorm_h96",
        "adversarial-tiny (batch_size=5), output: numerics",
        "(limit 2x)",
        "looks like: as with: eps x 10",
        "again: traceproof.check(wrong, 'rmsnorm', hidden_size=96, cases=['adversarial-tiny'])",
    ):
        assert text in told, told
    assert ": oracle " in told
    again = traceproof.check(wrong, "rmsnorm", hidden_size=96, cases=["adversarial-tiny"])
    assert {row.case for row in again.rows} == {"adversarial-tiny"}
    assert not again


def test_a_function_may_write_to_outputs_and_what_it_leaves_unwritten_shows() -> None:
    def writes(hidden_states: torch.Tensor, weight: torch.Tensor, output: torch.Tensor) -> None:
        output.copy_(norm(hidden_states, weight))

    def leaves(hidden_states: torch.Tensor, weight: torch.Tensor, output: torch.Tensor) -> None:
        output[..., 1:] = norm(hidden_states, weight)[..., 1:]

    assert traceproof.check(writes, "rmsnorm", hidden_size=96)
    assert "nan" in {str(row.reason) for row in traceproof.check(leaves, "rmsnorm", hidden_size=96).failures}


def test_a_decorator_may_give_a_function_more_arguments() -> None:
    def with_room(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        @functools.wraps(function)
        def called(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            return function(torch.empty(4), x, weight)

        return called

    @with_room
    def in_room(room: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return norm(x, weight, len(room) * 2.5e-7)

    @torch.no_grad()
    def writes(x: torch.Tensor, weight: torch.Tensor, output: torch.Tensor) -> None:
        output.copy_(norm(x, weight))

    for function in (in_room, writes):
        assert traceproof.check(function, "rmsnorm", hidden_size=96, cases=["small-0"], device="cpu")


def test_an_output_whose_size_no_input_has_may_be_written_to() -> None:
    def gather(inp: torch.Tensor, output: torch.Tensor) -> None:
        output.view(2, *inp.shape).copy_(inp)

    of = traceproof.definition("pcie_ipc_all_gather_tp2_h48", dataset=DATASET)
    report = traceproof.check(gather, of, sizes=("small",), device="cpu")
    assert report, str(report)


def test_what_a_function_does_beside_is_refused_and_an_exception_is_told() -> None:
    def mutates(hidden_states: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        result = norm(hidden_states, weight)
        hidden_states.zero_()
        return result

    def raises(hidden_states: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        raise ValueError(f"no rows of {weight.numel()}: {hidden_states.dtype}")

    kept: list[torch.Tensor] = []

    def remembers(hidden_states: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        kept.append(norm(hidden_states, weight))
        same = (one for one in kept if one.shape == hidden_states.shape)
        return next(same).clone()

    found = {
        function.__name__: {
            str(row.reason) for row in traceproof.check(function, "rmsnorm", hidden_size=96).failures
        }
        for function in (mutates, raises, remembers)
    }
    assert found["mutates"] == {"mutated_input"}
    assert found["raises"] == {"exception"}
    assert found["remembers"]


def test_a_function_that_ends_the_process_is_refused() -> None:
    def ends(*_: torch.Tensor) -> torch.Tensor:
        sys.exit(0)

    told = str(traceproof.check(ends, "rmsnorm", hidden_size=96, cases=["small-0"], device="cpu"))
    assert "SystemExit: 0" in told


def reference(definition: Definition) -> Callable[..., torch.Tensor]:
    """The function in a definition of our own."""
    found: dict[str, Any] = {}
    exec(definition.reference, found)  # noqa: S102 - a file of these tests
    function: Callable[..., torch.Tensor] = found["run"]
    return function


def on_copies(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same function, which leaves its inputs as they are."""
    return lambda *inputs: function(*(x.clone() if isinstance(x, torch.Tensor) else x for x in inputs))


def test_an_input_that_a_call_writes_to_is_judged() -> None:
    step = traceproof.definition("selective_state_update_d48_s16", dataset=DATASET)
    run, chosen = reference(step), ["small-0", "small-1"]
    assert traceproof.check(run, step, cases=chosen, device="cpu")
    report = traceproof.check(on_copies(run), step, cases=chosen, device="cpu")
    assert {row.output for row in report.failures} == {"state"}
    for case in traceproof.cases(step, cases=chosen, device="cpu"):
        assert {row.output for row in case.judged(on_copies(run)(*case.inputs.values())).failures} == {"state"}
        before = {name: x.clone() if isinstance(x, torch.Tensor) else x for name, x in case.inputs.items()}
        outputs = run(*case.inputs.values())
        case.check(outputs)
        traceproof.assert_right(step, before, {"out": outputs, "state": case.inputs["state"]})
        with pytest.raises(AssertionError, match="state: numerics"):
            traceproof.assert_right(step, before, {"out": outputs, "state": before["state"]})
        with pytest.raises(TraceproofError, match="also writes to state"):
            traceproof.assert_right(step, before, outputs)


def test_an_answer_that_is_remembered_is_told_beside_a_state_that_no_call_writes_to() -> None:
    step, answers = traceproof.definition("selective_state_update_d48_s16", dataset=DATASET), list[torch.Tensor]()
    run = reference(step)

    def remembers(*inputs: torch.Tensor) -> torch.Tensor:
        answers[:] = answers or [run(*inputs)]
        return answers[0].clone()

    report = traceproof.check(remembers, step, cases=["small-0"], device="cpu")
    assert {row.reason for row in report.failures} == {"cached_answer"}


def test_an_output_that_is_an_input_modified_in_place_may_be_returned() -> None:
    append = traceproof.definition("dsv41_fp4_quantize_append_sparse_mla_cache_2d_hnd", dataset=DATASET)
    assert append.outputs_in_place == {"cache_out"}
    report = traceproof.check(reference(append), append, cases=["small-0", "small-1"], device="cpu")
    assert report, str(report)


def test_memory_to_work_in_may_be_written_to() -> None:
    reduce = traceproof.definition("decode_cp_lse_reduce_d32", dataset=DATASET)
    text = reduce.reference.replace("    powers", "    workspace.fill_(7)\n    powers")
    reduce = reduce.model_copy(update={"reference": text})
    assert "fill_" in text
    for report in (
        traceproof.check(reference(reduce), reduce, cases=["small-0"], device="cpu"),
        traceproof.verify(reduce, sizes=(), device="cpu"),
    ):
        assert report, str(report)


def test_outputs_are_held_against_the_inputs_as_they_were_drawn() -> None:
    for case in traceproof.cases("silu_and_mul", hidden_size=96, sizes=("small",), device="cpu"):
        [x] = case.inputs.values()
        gate, up = x.fill_(0.5).float().chunk(2, dim=-1)
        found = {str(row.reason) for row in case.judged((functional.silu(gate) * up).to(x.dtype)).failures}
        assert found == ({"mutated_input", "numerics"} if x.numel() else set())


def test_cases_have_inputs_and_what_is_expected_and_judge_outputs_and_functions() -> None:
    seen = []
    for case in traceproof.cases("rmsnorm", hidden_size=96, sizes=("small",), device="cpu"):
        assert case.inputs["hidden_states"].shape == (case.axes["batch_size"], 96)
        assert case.expected["output"].dtype == torch.float64
        case.check(norm(*case.inputs.values()))
        case.check(norm)
        seen.append(case.id)
        if case.axes["batch_size"]:
            with pytest.raises(AssertionError, match="WRONG: outputs for rmsnorm_h96"):
                case.check(2 * norm(*case.inputs.values()))
    assert seen[:2] == ["small-0", "small-1"]
    assert "adversarial-tiny" in seen


def test_outputs_that_somebody_else_computed_need_no_axes() -> None:
    x, w = torch.randn(5, 64).half(), torch.ones(64).half()
    traceproof.assert_right("rmsnorm", [x, w], norm(x, w))
    traceproof.assert_right("rmsnorm", {"weight": w, "hidden_states": x}, {"output": norm(x, w, 1e-5)}, eps=1e-5)
    with pytest.raises(AssertionError, match=r"given \(batch_size=5\), output: numerics"):
        traceproof.assert_right("rmsnorm", [x, w], norm(x, w) * 1.01)
    with pytest.raises(AssertionError, match=r"dtype is torch\.float32"):
        traceproof.assert_right("rmsnorm", [x, w], norm(x, w).float())


@pytest.mark.parametrize(
    ("form", "dtype", "largest"), [("fp8", torch.float8_e4m3fn, 448), ("int8", torch.int8, 127)]
)
def test_a_block_of_zeros_may_have_any_scale(form: str, dtype: torch.dtype, largest: int) -> None:
    rows = torch.arange(-64, 64).repeat(3, 1).bfloat16()
    rows[1, :64] = 0
    blocks = rows.float().view(3, 2, 64)
    for least in (0.0, 1e-10, 1.0):
        scale = (blocks.abs().amax(-1) / largest).clamp_min(least / largest)
        codes = torch.where(scale[..., None] > 0, blocks / scale[..., None], 0.0).view(3, 128)
        outputs = {"q": codes.round().to(dtype) if form == "int8" else codes.to(dtype), "scale": scale}
        traceproof.assert_right(f"quantize_{form}", [rows], outputs, num_blocks=2)
        outputs["q"][1, 3] = 100
        with pytest.raises(AssertionError, match="q: "):
            traceproof.assert_right(f"quantize_{form}", [rows], outputs, num_blocks=2)


def test_probabilities_may_be_multiplied_by_the_reciprocal_of_their_sum() -> None:
    definition = traceproof.definition("top_k_renorm_probs_v256", dataset=DATASET)
    probs = torch.linspace(1, 9, 50 * 256).view(50, 256) / 2000
    for k in (1, 3):
        kept = probs.where(probs >= probs.sort(-1).values[:, -k, None], 0.0)
        traceproof.assert_right(definition, [probs, k], kept * kept.sum(-1, keepdim=True).reciprocal())


def test_tensors_that_require_gradients_and_a_tensor_alone_are_judged_as_any_other() -> None:
    x, weight = X.clone().requires_grad_(), W.clone().requires_grad_()
    traceproof.assert_right("rmsnorm", [x, weight], norm(x, weight))
    with pytest.raises(AssertionError, match="numerics"):
        traceproof.assert_right("rmsnorm", [x, weight], 1.1 * norm(x, weight))
    traceproof.assert_right("softcap", X, 30 * torch.tanh(X / 30))


def test_a_device_may_be_pytorchs() -> None:
    [case, *_] = traceproof.cases("rmsnorm", hidden_size=64, sizes="small", device=torch.device("cpu"))
    case.check(norm)
    assert traceproof.check(norm, "rmsnorm", hidden_size=64, sizes="small", device=torch.device("cpu"))


def test_sizes_and_constants_may_be_numbers_of_numpy() -> None:
    plain = traceproof.definition("rmsnorm", hidden_size=64, eps=0.5)
    axes: dict[str, Any] = {"hidden_size": np.int64(64), "eps": np.float32(0.5)}
    assert traceproof.definition("rmsnorm", **axes) == plain


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (lambda: traceproof.definition("rmsnorm"), "hidden_size is missing"),
        (lambda: traceproof.definition("rmsnorm", hidden=3), "hidden is none of them"),
        (lambda: traceproof.definition("rmsnorm", hidden_size=-3), "hidden_size is -3"),
        (lambda: traceproof.definition("rmsnorm", hidden_size=64.0), "sizes that are whole numbers"),
        (lambda: traceproof.definition("rmsnorm", hidden_size=1 << 41), "can not have these sizes"),
        (lambda: traceproof.definition("rmsnorm", hidden_size=8, eps=math.nan), "eps is nan"),
        (lambda: traceproof.definition("nowhere.py"), "nowhere.py is no problem"),
        (lambda: traceproof.check(norm, "rmsnorm", hidden_size=8, tolerance=-1.0), "the tolerance is -1.0"),
        (lambda: traceproof.check(norm, "rmsnorm", hidden_size=8, seed=1 << 70), "the seed is"),
        (lambda: traceproof.check(norm, "rmsnorm", hidden_size=8, cases="small-9"), "case 'small-9' is in none"),
        (lambda: traceproof.check(norm, "rmsnorm", hidden_size=8, gradients="gate"), "not gate"),
        (lambda: next(traceproof.cases("rmsnorm", hidden_size=8, device="gpu")), "cpu or cuda"),
        (
            lambda: traceproof.assert_right("rmsnorm", [X, W], norm(X, W).float().numpy()),
            "an output is of type nd",
        ),
        (
            lambda: traceproof.assert_right("rmsnorm", [X, W], norm(X, W), tolerance=math.nan),
            "the tolerance is nan",
        ),
        (lambda: traceproof.definition("gemm_fp8", N=128, K=128, block=64.0), "block is 64.0"),
        (lambda: traceproof.definition("rmsnorm", hidden_size=8, dtype="bfloat"), "close to it: bfloat16"),
        (lambda: traceproof.check(norm, "rmsnorm", hidden_size=8, sizes=("tiny",)), "tiny"),
        (lambda: traceproof.check(norm, "rmsnorm", hidden_size=8, device="gpu"), "cpu or cuda"),
        (lambda: traceproof.definition("gqa_paged"), "gqa_paged_decode, gqa_paged_prefill"),
        (lambda: traceproof.definition("rmsnrm"), "there is no form rmsnrm"),
        (lambda: traceproof.check(lambda a: a, "rmsnorm", hidden_size=8), "hidden_states, weight in this order"),
        (lambda: traceproof.check(norm, "rmsnorm", hidden_size=8, cases=["x"]), "x"),
        (lambda: traceproof.assert_right("rmsnorm", [torch.ones(2, 3), torch.ones(4)], []), "hidden_size is 3"),
        (lambda: traceproof.assert_right("rmsnorm", [torch.ones(2, 3)], []), "weight is missing"),
        (lambda: traceproof.assert_right("rmsnorm", [2.0, torch.ones(3)], []), "hidden_states is a float, not"),
        (
            lambda: traceproof.assert_right("rmsnorm", [X.float().numpy(), W], X),
            "is a ndarray, no tensor or number",
        ),
        (
            lambda: traceproof.assert_right(
                "rope_neox", [ROWS, ROWS, torch.ones(5, 4), torch.tensor([3, 99])], [ROWS, ROWS]
            ),
            "not be computed of these inputs: IndexError: index 99",
        ),
        (
            lambda: traceproof.assert_right(
                "gqa_paged_decode",
                [ROWS, ROWS[None], ROWS[None], *[torch.ones(2, dtype=torch.int32)] * 3, 1.0],
                ROWS,
            ),
            "it is not so that len_indptr",
        ),
        (
            lambda: traceproof.assert_right("top_p_sampling", [X.float(), X[:, 0].float()], W),
            "draws at random, and is",
        ),
        (lambda: traceproof.assert_right("rmsnorm", {"y": torch.ones(2, 3)}, []), "there is no y"),
        (lambda: traceproof.assert_right("rmsnorm", None, X), "the inputs of rmsnorm are a NoneType"),  # type: ignore[arg-type]
        (lambda: traceproof.assert_right("rmsnorm", [X, W], norm), "norm is a function, not outputs"),
        (lambda: traceproof.definition(5), "5 is no definition"),  # type: ignore[arg-type]
        (lambda: traceproof.definition("rmsnorm", hidden_size=0), "hidden_size is 0"),
        (lambda: traceproof.definition("rmsnorm", hidden_size=8, dtype=torch.int32), "not have the dtype int32"),
        (lambda: traceproof.definition("rmsnorm", hidden_size=8, dtype="float64"), "not have the dtype float64"),
        (lambda: traceproof.check(norm, "rmsnorm", hidden_size=8, seed="1"), "the seed is '1'"),  # type: ignore[arg-type]
        (lambda: traceproof.check(norm, "rmsnorm", hidden_size=8, tolerance="1"), "the tolerance is '1'"),  # type: ignore[arg-type]
        (lambda: traceproof.check(X, "rmsnorm", hidden_size=8), "Tensor is no function"),  # type: ignore[arg-type]
        (lambda: traceproof.check(norm), "norm does not say which definition"),
        (lambda: traceproof.check(swapped, "rmsnorm", hidden_size=8), "hidden_states, weight"),
    ],
)
def test_bad_use_is_told(call: Callable[[], object], told: str) -> None:
    with pytest.raises(TraceproofError, match=told):
        call()


def test_an_exception_is_told_from_where_the_function_begins() -> None:
    def raises(hidden_states: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        raise ValueError(f"no rows of {weight.numel()}: {hidden_states.dtype}")

    told = str(traceproof.check(raises, "rmsnorm", hidden_size=96, cases=["small-0"], device="cpu"))
    assert "in raises" in told
    assert "engine.py" not in told


def test_a_definition_of_a_dataset_or_a_file_is_judged_with_its_reference() -> None:
    found = traceproof.definition(NAME, dataset=DATASET)
    assert found == traceproof.definition(DATASET / "definitions" / "rmsnorm" / f"{NAME}.json")
    report = traceproof.verify(NAME, dataset=DATASET, sizes=("small",), device="cpu")
    assert report, str(report)
    assert {row.implementation for row in report.rows} >= {"reference", "torch"}
    assert "torch" in traceproof.verify("rmsnorm", hidden_size=96, sizes=("small",), device="cpu").name.split(", ")


def test_a_file_may_have_the_name_of_a_module(tmp_path: Path) -> None:
    text = "import random\n\ndef run(logits):\n    return logits.tanh() * (0 * random.random() + 1)\n"
    (tmp_path / "random.py").write_text(text, encoding="utf-8")
    options: dict[str, Any] = {"vocab_size": 96, "cap": 1, "dtype": "float32", "cases": ["small-0"]}
    for _ in range(2):
        assert traceproof.check(tmp_path / "random.py", "softcap", device="cpu", **options)
    assert "Random" in vars(sys.modules["random"])


@pytest.mark.slow
def test_a_file_is_judged_isolated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judging, "Environment", forked_environment)
    file = tmp_path / "mine.py"
    source = "import torch\n\n\ndef run(hidden_states, weight):\n    x = hidden_states.float()\n"
    source += "    y = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS)\n"
    source += "    return (y * weight.float()).to(hidden_states.dtype)\n"
    for eps, accepted in ((1e-6, True), (1e-5, False)):
        file.write_text(source.replace("EPS", str(eps)), encoding="utf-8")
        options: dict[str, Any] = {"sizes": ("small",), "weak": True, "hidden_size": 96}
        found = traceproof.judge_file(file, "rmsnorm", demand=["errors"], **options)
        assert bool(found) == accepted
        assert "demand=('errors',)" in found.repeat
        assert [one.demanded for one in found.properties if one.name == "errors"] == [True] * accepted
        assert ("ACCEPTED: mine for rmsnorm_h96" in str(found)) == accepted
    with pytest.raises(TraceproofError, match="not error"):
        traceproof.judge_file(file, "rmsnorm", demand=["error"], **options)
    monkeypatch.setattr(judging, "IDLE_SECONDS", 0.05)
    assert not traceproof.judge_file(file, "rmsnorm", **options)
    until = time.monotonic() + 300
    while api._judge()._worker is not None:  # its processes end, and the next solution starts them again
        assert time.monotonic() < until
        time.sleep(0.05)
    assert not traceproof.judge_file(file, "rmsnorm", **options)


def test_importing_it_imports_nothing_else() -> None:
    text = (
        "import sys; had = {*sys.modules}; import traceproof; print({*sys.modules} - had); "
        "assert len(traceproof.__all__) <= 8"
    )
    done = subprocess.run([sys.executable, "-c", text], check=True, capture_output=True, text=True)
    assert done.stdout == "{'traceproof'}\n"


# Forms of which nothing of floating point comes out that is no choice and no code.
WITHOUT = {"quantize_int8", "quantize_fp8", "top_k_sampling", "top_p_sampling", "top_k_top_p_sampling"}
GDN = ["medium-0", "adversarial-slow", "adversarial-saturated", "adversarial-tiny", "edge-default-scale"]
PREFILL = ["small-0", "small-1", "medium-0", "medium-1", "adversarial-ties", "adversarial-long"]
Backward = Callable[[torch.Tensor], torch.Tensor]
IN_PLACE = {"gemm", "gdn_decode", "gdn_prefill"}  # whose oracles are not to be differentiated by themselves


class PassedBack(torch.autograd.Function):
    """Its input, and what a function makes of the gradient."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: torch.Tensor, way: Backward) -> torch.Tensor:
        ctx.way = way  # type: ignore[attr-defined]
        return x.clone()

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.way(gradients[0]), None  # type: ignore[attr-defined]


def passed_back(x: torch.Tensor, way: Backward) -> torch.Tensor:
    found: torch.Tensor = PassedBack.apply(x, way)  # type: ignore[no-untyped-call]
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    "form", [one for key, one in api.forms().items() if key not in WITHOUT | IN_PLACE], ids=lambda one: one.key
)
def test_a_right_gradient_of_every_form_passes_and_one_that_is_a_tenth_off_is_refused(form: api.NamedForm) -> None:
    definition = form.definition("bfloat16", axes_of(form))
    right = by_oracle(definition)

    def wrong(*inputs: object) -> object:
        return right(
            *(
                passed_back(x, lambda g: g * 1.1) if isinstance(x, torch.Tensor) and x.requires_grad else x
                for x in inputs
            )
        )

    for function, fine in ((right, True), (wrong, False)):
        report = traceproof.check(
            function, definition, sizes=("small",), cases=["small-1"], gradients=True, device="cpu"
        )
        assert report.gradients
        assert bool(report) == fine, str(report)


def test_functions_of_pytorch_have_right_gradients_in_all_cases() -> None:
    def norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return functional.rms_norm(x, x.shape[-1:], weight, 1e-6)

    def rounded_before_the_weight(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        y = x.float()
        return weight * (y * torch.rsqrt(y.square().mean(-1, keepdim=True) + 1e-6)).to(x.dtype)

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
        seen = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril(k.shape[2] - q.shape[2])
        found = functional.scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=True)
        return found[0].transpose(0, 1)

    def delta(*given: Any) -> tuple[torch.Tensor, torch.Tensor]:  # noqa: ANN401 - tensors and a number
        q, k, v, state, log, a, bias, b = (x.float() for x in given[:8])
        decay = torch.exp(-log.exp() * functional.softplus(a + bias))[:, 0, :, None, None]
        q, k = (x[:, 0].repeat_interleave(v.shape[2] // x.shape[2], 1) for x in (q, k))
        state = state * decay
        error = (v[:, 0] - (state @ k[..., None])[..., 0]) * b[:, 0].sigmoid()[..., None]
        state = state + error[..., None] * k[:, :, None, :]
        output = (state @ q[..., None])[:, None, ..., 0] * (given[8] or 32**-0.5)
        return output.to(given[2].dtype), state

    for function, of, axes in (
        (delta, "gdn_decode", {"cases": GDN, "num_q_heads": 2, "num_v_heads": 4, "head_size": 32}),
        (norm, "rmsnorm", {"hidden_size": 256}),
        (rounded_before_the_weight, "rmsnorm", {"hidden_size": 256}),
        (
            lambda x: functional.silu(x[..., :96].float()).mul(x[..., 96:]).to(x.dtype),
            "silu_and_mul",
            {"hidden_size": 96},
        ),
        (lambda a, b: a @ b.T, "gemm", {"N": 64, "K": 128}),
        (attend, "single_prefill", {"cases": PREFILL, "num_qo_heads": 4, "num_kv_heads": 2, "head_dim": 64}),
    ):
        report = traceproof.check(function, of, gradients=True, device="cpu", sizes=("small", "medium"), **axes)
        assert {row.verdict for row in report.gradients} <= {Verdict.PASS, Verdict.SKIP}, str(report)


class Silu(torch.autograd.Function):
    """silu(gate) * up, whose backward takes silu's slope for its sigmoid."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        gate, up = x.float().chunk(2, -1)
        return (functional.silu(gate) * up).to(x.dtype)

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, *gradients: torch.Tensor) -> torch.Tensor:
        [x] = ctx.saved_tensors  # type: ignore[attr-defined]
        gate, up = x.float().chunk(2, -1)
        parts = (gradients[0] * up * gate.sigmoid(), gradients[0] * functional.silu(gate))
        return torch.cat(parts, -1).to(x.dtype)


def silu(x: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = Silu.apply(x)  # type: ignore[no-untyped-call]
    return found


def checked(function: Callable[..., object], **options: object) -> traceproof.Report:
    return traceproof.check(
        function,
        "silu_and_mul",
        hidden_size=96,
        sizes=("small",),
        device="cpu",
        **options,  # type: ignore[arg-type]
    )


def test_a_wrong_backward_is_told_and_refused_on_request() -> None:
    told = checked(silu)
    assert told
    assert [row.output for row in told.gradients] == ["gradient of input"]
    assert told.gradients[0].bad
    assert "(not demanded)" in str(told)
    refused = checked(silu, gradients=True)
    assert not refused
    assert {row.output for row in refused.failures} == {"gradient of input"}
    assert "again: traceproof.check(silu, 'silu_and_mul', hidden_size=96, sizes=('small',), gradients=True" in str(
        refused
    )
    [case] = traceproof.cases("silu_and_mul", hidden_size=96, cases=["small-1"], device="cpu")
    case.check(silu)
    with pytest.raises(AssertionError, match="gradient of input: numerics"):
        case.check(silu, gradients=True)


def test_gradients_of_outputs_need_not_be_contiguous_and_are_not_to_be_written_to() -> None:
    def as_if_dense(gradient: torch.Tensor) -> torch.Tensor:
        return gradient.as_strided(gradient.shape, (gradient.shape[1], 1)).clone()

    for way, told in (
        (torch.Tensor.clone, ""),
        (as_if_dense, "given gradients of outputs that are not contiguous"),
        (lambda gradient: gradient.mul_(2) / 2, "it writes to the gradient of an output"),
    ):
        report = checked(
            lambda x, way=way: passed_back((functional.silu(x[:, :96].float()) * x[:, 96:]).to(x.dtype), way),
            gradients=True,
        )
        assert bool(report) == (not told), str(report)
        assert told in str(report)


def test_what_takes_no_part_in_autograd_has_no_gradient_and_is_refused_on_request() -> None:
    def detached(x: torch.Tensor) -> torch.Tensor:
        return silu(x.detach())

    def raises(x: torch.Tensor) -> torch.Tensor:
        if x.requires_grad:
            raise RuntimeError("no backward here")
        return silu(x)

    for function, told in ((detached, "it takes no part in autograd"), (raises, "no backward here")):
        assert not checked(function).gradients
        assert checked(function)
        assert told in str(checked(function, gradients=["input"]))
        assert not checked(function, gradients=["input"])
    with pytest.raises(TraceproofError, match="has the inputs input, not weight"):
        checked(silu, gradients=["weight"])


def test_a_choice_has_no_gradient() -> None:
    def quantize(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        blocks = x.float().view(len(x), 2, -1)
        scale = blocks.abs().amax(-1).clamp_min(1e-10) / 127
        return (blocks / scale[..., None]).round().clamp(-128, 127).to(torch.int8).view(x.shape), scale

    report = traceproof.check(
        quantize, "quantize_int8", gradients=True, device="cpu", sizes=("small",), hidden_size=96, num_blocks=2
    )
    rows = [row for row in report.gradients if row.verdict is Verdict.SKIP]
    assert {row.reason for row in rows} <= {Skip.NO_ORACLE}


TESTS = """import pytest
import torch


def norm(x, weight, eps):
    y = x.float()
    return (y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps) * weight.float()).to(x.dtype)


@pytest.mark.traceproof("rmsnorm", hidden_size=96, sizes=["small"])
@pytest.mark.traceproof("rmsnorm", hidden_size=64, sizes=["small"], cases=["small-0"])
def test_right(case):
    case.check(lambda x, weight: norm(x, weight, 1e-6))


@pytest.mark.traceproof("rmsnorm", hidden_size=96, cases=["adversarial-tiny"])
def test_wrong(case):
    case.check(norm(**{"x": case.inputs["hidden_states"], "weight": case.inputs["weight"]}, eps=1e-5))


@pytest.mark.traceproof("rmsnorm", hidden_size=96, device="cuda", cases=["small-0"])
def test_on_gpu(case):
    case.check(lambda x, weight: norm(x, weight, 1e-6))


def test_unmarked(case):
    pass


@pytest.mark.traceproof("rmsnorm", hidden_size=96, sizes=["small"], isolated=True)
@pytest.mark.parametrize("text", ["hidden_states", "open('x')"])
def test_isolated(case, text, tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(f"def run(hidden_states, weight):\\n    return {text}\\n")
    case.check(file)


@pytest.mark.traceproof("rmsnorm", hidden_size=96, isolated=True)
def test_needs_gpu(case, tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("import triton\\n\\n\\ndef run(hidden_states, weight):\\n    return hidden_states\\n")
    case.check(file)
"""


def ran(folder: Path, *options: str, python: str | None = None) -> str:
    """What pytest says of the tests in a folder."""
    python = python or forked.interpreter()
    command = [python, "-m", "pytest", "-p", "traceproof.pytest_plugin", "-p", "no:cacheprovider", "-rfEs"]
    command += ["--rootdir", str(folder)]
    source = str(Path(__file__).parents[1] / "src")
    environment = {"PATH": "/usr/bin:/bin", "PYTHONPATH": source, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [*command, *options, str(folder)], cwd=folder, env=environment, check=False, capture_output=True, text=True
    )
    return done.stdout + done.stderr


@pytest.mark.slow
def test_a_marked_test_runs_per_case_beside_others_and_tells(tmp_path: Path) -> None:
    (tmp_path / "test_mine.py").write_text(TESTS, encoding="utf-8")
    told = ran(tmp_path, "-n", "1")
    assert "3 failed, 8 passed, 2 skipped, 1 error" in told, told
    for text in (
        "WRONG: outputs for rmsnorm_h96: 1 cases, 1 of 1 results bad",
        "looks like: as with: eps x 10",
        "again: pytest 'test_mine.py::test_wrong[rmsnorm_h96-adversarial-tiny]'",
        "no_cuda: there is no GPU here",
        "WRONG: mine for rmsnorm_h96 on cpu",
        "adversarial-tiny (batch_size=5), output: numerics",
        ", 'rmsnorm', hidden_size=96, sizes=('small',), hidden_seed=",
        "none (), *: refused",
        "mine.py is a triton kernel, which needs a GPU, and this machine has none",
        "test_unmarked has no @pytest.mark.traceproof(...)",
    ):
        assert text in told, told


def test_it_imports_nothing_where_no_test_has_the_mark(tmp_path: Path) -> None:
    names = "{'torch', 'pydantic', 'traceproof.api'}"
    text = f"import sys\n\n\ndef test_nothing():\n    assert not {names} & sys.modules.keys()\n"
    (tmp_path / "test_other.py").write_text(text, encoding="utf-8")
    assert "1 passed" in ran(tmp_path, python=sys.executable)


def test_a_marked_test_that_takes_no_case_is_told(tmp_path: Path) -> None:
    mark = 'import pytest\n\n\n@pytest.mark.traceproof("rmsnorm", hidden_size=96, cases=["small-0"])\n'
    judged = "class TestNorm:\n    def test_one(self, case):\n        assert case.axes\n\n"
    judged += "    def test_two(self):\n        pass\n"
    (tmp_path / "test_mine.py").write_text(mark + judged, encoding="utf-8")
    assert "2 passed" in ran(tmp_path)
    (tmp_path / "test_mine.py").write_text(f"{mark}def test_three():\n    pass\n", encoding="utf-8")
    assert "test_mine.py::test_three, @pytest.mark.traceproof: it takes no `case`" in ran(tmp_path)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ('"rmsnorm", hidden_siz=96', "hidden_siz is none of them"),
        ('"rmsnorm", hidden_siz=96, isolated=True', "hidden_siz is none of them"),
        ("isolated=True", "missing 1 required positional argument: 'of'"),
    ],
)
def test_a_mark_with_a_wrong_argument_is_told_without_a_traceback(tmp_path: Path, options: str, told: str) -> None:
    text = f"import pytest\n\n\n@pytest.mark.traceproof({options})\ndef test_one(case):\n    pass\n"
    (tmp_path / "test_mine.py").write_text(text, encoding="utf-8")
    said = ran(tmp_path)
    assert "test_mine.py::test_one, @pytest.mark.traceproof: " in said
    assert told in said
    assert "pytest_plugin.py" not in said
    assert "During handling" not in said
