"""Scripts show what the bits of a package's kernel depend on, without this project; known bugs are refused."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from exploits.corpus import dataset

import known_bugs
import sanitize
from kernels.bugs_table import ABSENT, ACCEPTED, REFUSED
from kernels.measure import DEPENDS, HOLDS, UNMEASURED, measured
from kernels.planned import PlannedOnce
from kernels.recording import Recording, made_of
from traceproof.dataset.tree import read_tree
from traceproof.ops.answers import answers_of
from traceproof.solutions.cases import planned

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]
TESTS = Path(__file__).parent / "dataset"


def test_a_product_that_depends_on_its_batch_gets_a_script_that_shows_it(tmp_path: Path) -> None:
    definition = read_tree(dataset(tmp_path / "dataset")).definitions["gemm_f32"].definition
    seen = {one.property: one for one in measured("torch", definition, "cpu")}
    assert seen["determinism"].state == HOLDS
    assert seen["stream"].state == seen["graph"].state == UNMEASURED
    if seen["batch"].state == HOLDS:
        pytest.skip("this machine's product gives a row the same bits in every batch")
    assert seen["batch"].state == DEPENDS
    assert "traceproof" not in seen["batch"].script
    script = tmp_path / "shows.py"
    script.write_text(seen["batch"].script, encoding="utf-8")
    ran = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=False, env={})
    assert ran.returncode == 1, ran.stderr
    assert "result 0: other bits" in ran.stdout


def test_what_has_no_adapter_is_named() -> None:
    definition = read_tree(TESTS).definitions["moe_routing_softmax_e64_k6"].definition
    [seen] = measured("liger", definition, "cpu")
    assert (seen.state, seen.detail.partition(":")[0]) == (UNMEASURED, "no_adapter")


@pytest.mark.parametrize(
    "value", [torch.arange(5), torch.tensor(3), torch.zeros(2, 0), torch.tensor([True, False])]
)
def test_whole_numbers_are_spelt_out_as_they_are(value: torch.Tensor) -> None:
    made = eval(made_of(value), {"torch": torch})  # noqa: S307 - our own expression
    assert torch.equal(made, value)
    assert made.dtype == value.dtype


def test_a_part_of_a_known_tensor_is_written_as_one() -> None:
    recording = Recording()
    whole = torch.randn(6, 4)
    recording.call("torch.neg", torch.neg, [whole], {})
    recording.call("torch.neg", torch.neg, [whole[2:].clone()], {})
    assert recording.made[1] == "x3 = x1[2:6].clone()"
    assert recording.calls == ["r2 = torch.neg(x1)", "r4 = torch.neg(x3)"]


def test_a_known_bug_is_refused_as_a_solution_and_a_right_way_is_accepted(tmp_path: Path) -> None:
    given = known_bugs.settings(TESTS, 5)
    definition, cases = planned("rmsnorm_h96", given, tmp_path)
    found = answers_of("rmsnorm")
    assert found is not None
    dropped = next(one for one in found.wrong if one.name == "weight dropped")
    absent = next(one for one in found.wrong if one.name == "residual dropped")
    with known_bugs.pool(gpu=False) as workers:
        outcomes = [
            known_bugs._judged(definition, cases, one, given, workers, wrong=wrong, subjects={}).outcome
            for one, wrong in ((found.right[0], False), (dropped, True), (absent, True))
        ]
    assert outcomes == [ACCEPTED, REFUSED, ABSENT]


class Wrapper:
    """As packages have them: planned by sizes, then run."""

    plans = 0

    def plan(self, size: int) -> None:
        Wrapper.plans += 1
        self.size = size

    def run(self, value: int) -> int:
        return self.size * value

    @staticmethod
    def apply(value: int) -> int:
        return -value


def test_what_is_planned_once_is_run_again_without_a_plan() -> None:
    once = PlannedOnce({"wrapper": Wrapper, "negate": int.__neg__})
    given = []
    for size in (3, 5):
        api = once.api()
        wrapper = api["wrapper"]()
        wrapper.plan(size)
        given.append((wrapper.run(2), api["wrapper"].apply(2), api["negate"](2)))
        once.again()
    assert given == [(6, -2, -2), (6, -2, -2)]
    assert Wrapper.plans == 1
    assert once.plans


SANITIZER = """#!/bin/sh
echo "========= COMPUTE-SANITIZER"
shift 4
"$@"
grep -q "eps" {kernel} && echo "========= ERROR SUMMARY: 0 errors" && exit 0
echo "========= Invalid __global__ write of size 2 bytes"
echo "========= ERROR SUMMARY: 1 error"
exit 42
"""


@pytest.mark.parametrize(("text", "code"), [("eps = 1e-5", 0), ("", 1)])
def test_what_compute_sanitizer_finds_is_told(text: str, code: int, tmp_path: Path) -> None:
    kernel, program = tmp_path / "kernel.py", tmp_path / "compute-sanitizer"
    kernel.write_text(f"{text}\n\n\ndef run(hidden_states, weight):\n    return hidden_states\n", encoding="utf-8")
    program.write_text(SANITIZER.format(kernel=kernel), encoding="utf-8")
    program.chmod(0o755)
    script = Path(sanitize.__file__)
    command = [sys.executable, str(script), str(kernel), "--definition", "rmsnorm_h96", "--dataset", str(TESTS)]
    command += ["--sanitizer", str(program)]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.returncode == code, ran.stderr
    assert f"6 calls, memcheck: ERROR SUMMARY: {code} error" in ran.stdout
    assert ("Invalid __global__ write" in ran.stdout) == bool(code)
