"""Reference tests that were written, run: what they say, and of what."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from definitions import GOOD, rmsnorm, write
from dialect_samples import GATED
from testgen_support import NOTHING_KNOWN, contents, dataset, everything

from traceproof.cli import main, run
from traceproof.testgen.generate import PLACE, GenerateOptions, generate

__all__ = ["dataset"]
pytestmark = pytest.mark.slow


def test_a_folder_that_flashinfer_dumped_gets_tests_that_run(tmp_path: Path) -> None:
    (tmp_path / "silu_and_mul_h64.json").write_text(json.dumps(GATED))
    assert everything(tmp_path).status == {"silu_and_mul_h64": "written"}
    assert 'definition_file = "silu_and_mul_h64.json"' in (tmp_path / PLACE / "test_activation.py").read_text()
    done = run_pytest(tmp_path)
    assert done.returncode == 0, done.stdout


def test_tests_can_be_written_beside_a_dataset_that_stays_as_it_is(dataset: Path, tmp_path: Path) -> None:
    out = tmp_path / "elsewhere"
    workload = {"uuid": "one", "axes": {"batch_size": 3}, "inputs": {}}
    path = dataset / "workloads" / "rmsnorm" / "rmsnorm_a.jsonl"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps({"definition": "rmsnorm_a", "workload": workload}) + "\n")
    before = contents(dataset)
    result = generate(GenerateOptions(root=dataset, out=out, everything=True), NOTHING_KNOWN)
    assert {path for path in contents(dataset) if not path.startswith("elsewhere/")} == set(before)
    assert "tests/references/test_rmsnorm.py" in result.files
    done = run_pytest(out, "--collect-only", f"--dataset={dataset}")
    assert "TestRmsnormA" in done.stdout
    assert "[small-0]" in done.stdout
    assert "[workload" not in done.stdout  # without --workloads
    lost = run_pytest(out, "--collect-only")
    assert "holds no definitions: give the dataset's folder with --dataset" in lost.stderr


def test_large_cases_run_where_the_tests_were_written_for_them(dataset: Path) -> None:
    """What the command line says counts for more, and a class that was not written for them leaves them out."""
    for name, sizes in (("rmsnorm_a", ("small", "large")), ("rmsnorm_b", None)):
        generate(GenerateOptions(root=dataset, definitions=(name,), sizes=sizes), NOTHING_KNOWN)

    def large(*given: str) -> set[str]:
        done = run_pytest(dataset, "--collect-only", "-k", "test_correctness", sizes=given)
        assert "test_correctness[small-0]" in done.stdout
        return {line.split("::")[1] for line in done.stdout.splitlines() if "test_correctness[large-" in line}

    assert large() == {"TestRmsnormA"}
    assert large("--test-sizes=small") == set()
    assert large("--slow") == large("--test-sizes", "small", "large") == {"TestRmsnormA", "TestRmsnormB"}


def test_the_command_that_is_printed_works_as_it_stands(
    dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    root, config = run.configured()
    torch = config.stacks["torch"].model_copy(update={"python": Path(sys.executable)})
    stacks = config.stacks.model_copy(update={"torch": torch})
    monkeypatch.setattr(run, "configured", lambda **_: (root, config.model_copy(update={"stacks": stacks})))
    with pytest.raises(SystemExit):
        main(
            [
                "add-reference-tests",
                "--all",
                "--definitions-dir",
                str(dataset),
                "--output-dir",
                str(tmp_path / "a b"),
            ]
        )
    told = capsys.readouterr().out
    command = next(line for line in told.splitlines() if line.startswith("run them: ")).removeprefix("run them: ")
    (tmp_path / "elsewhere").mkdir()
    bare = {"PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"}  # no pytest there
    done = subprocess.run(
        ["bash", "-c", f"{command} --collect-only -q"],  # as pasted
        cwd=tmp_path / "elsewhere",
        env=bare,
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr + done.stdout
    assert "TestRmsnormA::test_correctness[small-0]" in done.stdout


def test_every_support_module_can_be_imported_without_this_package(dataset: Path) -> None:
    everything(dataset)
    code = (
        "import importlib, pkgutil, sys, tp_support\n"
        "for module in pkgutil.walk_packages(tp_support.__path__, 'tp_support.'):\n"
        "    importlib.import_module(module.name)\n"
        "assert not [name for name in sys.modules if name.startswith('traceproof')]\n"
    )
    environment = {"PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", code]
    done = subprocess.run(
        command, cwd=dataset / PLACE, env=environment, check=False, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def run_pytest(
    dataset: Path,
    *arguments: str,
    here: str = "tests/references",
    sizes: tuple[str, ...] = ("--test-sizes=small",),
) -> subprocess.CompletedProcess[str]:
    """The written tests, with nothing of this package on the path."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-rsf",
        "-p",
        "no:cacheprovider",
        "--assert=plain",  # rewriting the support package costs seconds
        here,
        *sizes,
        *arguments,
    ]
    environment = {"PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    return subprocess.run(command, cwd=dataset, env=environment, check=False, capture_output=True, text=True)


WRONG = GOOD.replace("(y * ", "(1.05 * y * ")


OWN = """
import torch
from conftest import get_ground_truth, load_definition


class TestOwn:
    definition_name = "rmsnorm_a"

    def test_own(self, definition, reference_fn, ground_truth_fn):
        assert definition.name == load_definition("rmsnorm_a").name
        size = definition.const_axes["hidden_size"]
        inputs = torch.randn(3, size).bfloat16(), torch.ones(size).bfloat16()
        truth = get_ground_truth(definition, "cpu")(*inputs)["output"]
        torch.testing.assert_close(reference_fn(*inputs), truth, atol=1e-2, rtol=1e-2)
        assert set(ground_truth_fn(*inputs)) == {"output"}
"""


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dataset of a right and a wrong reference with workload lines, its tests, and one of somebody's own."""
    root = tmp_path_factory.mktemp("written")
    write(root, rmsnorm("rmsnorm_a"))
    write(root, rmsnorm("rmsnorm_b", reference=WRONG))
    inputs = {"hidden_states": {"type": "random"}, "weight": {"type": "random"}}
    stored = inputs | {"weight": {"type": "safetensors", "path": "blob/none.safetensors", "tensor_key": "x"}}
    lines = [
        {"definition": "rmsnorm_a", "workload": {"uuid": uuid, "axes": {"batch_size": size}, "inputs": given}}
        for uuid, size, given in (("one", 3, inputs), ("two", 3, stored), ("huge", 1 << 24, inputs))
    ]
    path = root / "workloads" / "rmsnorm" / "rmsnorm_a.jsonl"
    path.parent.mkdir(parents=True)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    everything(root)
    (root / PLACE / "test_own.py").write_text(OWN)
    return root


@pytest.fixture(scope="module")
def done(written: Path) -> subprocess.CompletedProcess[str]:
    """All of them, run once, a line per test."""
    return run_pytest(written, "-vv", "--workloads=yes")


def outcome(done: subprocess.CompletedProcess[str], test: str) -> str:
    """The outcome of one test of a run."""
    [found] = [line for line in done.stdout.splitlines() if line.startswith("tests/") and f"::{test} " in line]
    return found.split()[1]


def test_they_pass_on_a_right_reference_and_fail_on_a_wrong_one_with_the_worst_places(
    done: subprocess.CompletedProcess[str],
) -> None:
    assert "no_cuda: norm.rmsnorm needs a CUDA device" in done.stdout
    failed = [line for line in done.stdout.splitlines() if line.startswith("FAILED")]
    assert done.returncode == 1
    assert failed
    assert "TestRmsnormA" not in "\n".join(failed)
    assert "case small-0 (batch_size 1; seed 0) on cpu: reference" in done.stdout
    report = done.stdout.partition("TestRmsnormB.test_correctness[small-0] ")[2].strip("_").partition("\n___")[0]
    assert report.count("at [") == 5
    assert "max_abs" in report
    assert "specification: atol 0.008" in report


def test_workload_lines_are_cases_and_a_blob_that_is_missing_is_a_skip(
    done: subprocess.CompletedProcess[str], written: Path
) -> None:
    assert outcome(done, "TestRmsnormA::test_correctness[small-0]") == "PASSED"
    assert outcome(done, "TestRmsnormA::test_correctness[workload-one]") == "PASSED"
    assert outcome(done, "TestRmsnormA::test_correctness[workload-two]") == "SKIPPED"
    assert "workload-huge" not in done.stdout  # marked slow
    assert "blob_missing: the dataset has no blob/none.safetensors" in done.stdout
    slow = run_pytest(written, "--collect-only", "-v", "--workloads=yes", "--slow", "-k", "workload-huge")
    assert "test_correctness[workload-huge]" in slow.stdout


def test_tests_of_ones_own_get_the_definition_its_reference_and_a_ground_truth(
    done: subprocess.CompletedProcess[str],
) -> None:
    assert outcome(done, "TestOwn::test_own") == "PASSED", done.stdout


def test_the_definitions_own_reference_is_what_is_tested(dataset: Path) -> None:
    everything(dataset)
    path = dataset / "definitions" / "rmsnorm" / "rmsnorm_a.json"
    definition = json.loads(path.read_text())
    definition["reference"] = GOOD.replace("torch.bfloat16", "torch.float16")
    path.write_text(json.dumps(definition))
    (dataset / "definitions" / "rmsnorm" / "rmsnorm_b.json").write_text("{")
    done = run_pytest(dataset, "-k", "dtype or shape")
    assert "FAILED tests/references/test_rmsnorm.py::TestRmsnormA::test_output_dtype[small-0]" in done.stdout
    assert "rmsnorm_b.json can not be read" in done.stdout


def test_a_file_started_as_a_script_runs_its_tests_and_a_failure_is_its_exit_code(written: Path) -> None:
    environment = {"PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    command = [sys.executable, str(written / PLACE / "test_rmsnorm.py"), "-q", "-k", "small-0 and correctness"]
    done = subprocess.run(command, env=environment, check=False, capture_output=True, text=True)
    assert done.returncode == 1, done.stdout
    assert "FAILED" in done.stdout
    assert " passed" in done.stdout
