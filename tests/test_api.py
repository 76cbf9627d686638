"""The library: definitions of forms; functions, cases and outputs judged as the engine does; reports that tell."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import traceproof
from traceproof import TraceproofError, api
from traceproof.dataset.definition import Definition
from traceproof.ops import registry
from traceproof.ops.base import Tensors, Value, rounded
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
    return {name: AXES[name] for name in form.named if name in AXES}


def norm(hidden_states: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    x = hidden_states.float()
    y = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    return (y * weight.float()).to(hidden_states.dtype)


def wrong(hidden_states: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return norm(hidden_states, weight, eps=1e-5)


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
    ("call", "told"),
    [
        (lambda: traceproof.definition("rmsnorm"), "hidden_size is missing"),
        (lambda: traceproof.definition("rmsnorm", hidden=3), "hidden is none of them"),
        (lambda: traceproof.definition("rmsnorm", hidden_size=-3), "hidden_size is -3"),
        (lambda: traceproof.definition("rmsnorm", hidden_size=8, dtype="bfloat"), "close to it: bfloat16"),
        (lambda: traceproof.check(norm, "rmsnorm", hidden_size=8, sizes=("tiny",)), "tiny"),
        (lambda: traceproof.check(norm, "rmsnorm", hidden_size=8, device="gpu"), "cpu or cuda"),
        (lambda: traceproof.definition("gqa_paged"), "gqa_paged_decode, gqa_paged_prefill"),
        (lambda: traceproof.definition("rmsnrm"), "there is no form rmsnrm"),
        (lambda: traceproof.check(lambda a: a, "rmsnorm", hidden_size=8), "hidden_states, weight in this order"),
        (lambda: traceproof.check(norm, "rmsnorm", hidden_size=8, cases=["x"]), "x"),
        (lambda: traceproof.assert_right("rmsnorm", [torch.ones(2, 3), torch.ones(4)], []), "hidden_size is 3"),
        (lambda: traceproof.assert_right("rmsnorm", [torch.ones(2, 3)], []), "weight is missing"),
        (lambda: traceproof.assert_right("rmsnorm", {"y": torch.ones(2, 3)}, []), "there is no y"),
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


@pytest.mark.slow
def test_a_file_is_judged_isolated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
