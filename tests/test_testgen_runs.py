"""Reference tests that were written, run: with this package and with PyTorch alone."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import forked
import pytest
from definitions import GOOD, rmsnorm, write, write_workloads
from dialect_samples import GATED
from test_testgen import NOTHING_KNOWN, contents, dataset, everything

from traceproof.cli import main, run
from traceproof.testgen.generate import PLACE, GenerateOptions, generate

__all__ = ["dataset"]
pytestmark = pytest.mark.slow
SOURCE = Path(__file__).parents[1] / "src"
WRONG = GOOD.replace("(y * ", "(1.05 * y * ")


def run_pytest(
    dataset: Path,
    *arguments: str,
    alone: bool = False,
    script: Path | None = None,
    sizes: tuple[str, ...] = ("--test-sizes=small",),
) -> subprocess.CompletedProcess[str]:
    """The written tests, with this package on the path unless they are `alone`."""
    start = ["pytest", str(PLACE)] if script is None else [str(script)]
    options = ["-q", "-rsf", "-p", "no:cacheprovider", *(["--own-cases"] if alone else ())]
    environment = {"PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    environment |= {} if alone else {"PYTHONPATH": str(SOURCE)}
    return forked.run(*start, *options, *sizes, *arguments, cwd=dataset, env=environment)


def outcome(done: subprocess.CompletedProcess[str], test: str) -> str:
    """The outcome of one test of a run."""
    [found] = [line for line in done.stdout.splitlines() if line.startswith("tests/") and f"{test} " in line]
    return found.split()[1]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dataset of a right and a wrong reference with workload lines, its tests, and one of somebody's own."""
    root = tmp_path_factory.mktemp("written")
    write(root, rmsnorm("rmsnorm_a"))
    write(root, rmsnorm("rmsnorm_b", reference=WRONG))
    inputs = {"hidden_states": {"type": "random"}, "weight": {"type": "random"}}
    stored = inputs | {"weight": {"type": "safetensors", "path": "blob/none.safetensors", "tensor_key": "x"}}
    workloads = [
        {"uuid": uuid, "axes": {"batch_size": rows}, "inputs": given}
        for uuid, rows, given in (("one", 3, inputs), ("two", 3, stored), ("huge", 100_000, inputs))
    ]
    write_workloads(root, "rmsnorm_a", workloads)
    everything(root)
    (root / PLACE / "test_own.py").write_text(OWN)
    return root


OWN = """
import torch
from conftest import assert_close, compile_reference, load_definition
from test_rmsnorm_a import get_ground_truth


def test_own(device, tolerance, test_sizes):
    definition = load_definition("rmsnorm_a")
    size = definition["axes"]["hidden_size"]["value"]
    inputs = {"hidden_states": torch.randn(3, size).bfloat16(), "weight": torch.ones(size).bfloat16()}
    expected = get_ground_truth("torch", "rmsnorm")(**inputs)["output"]
    assert_close(compile_reference(definition["reference"])(**inputs), expected)
    assert (str(device), tolerance, test_sizes) == ("cpu", None, ["small"])
"""


@pytest.fixture(scope="module")
def done(written: Path) -> subprocess.CompletedProcess[str]:
    """All of them with this package, run once, a line per test."""
    return run_pytest(written, "-vv", "--workloads=yes", "-s")


def test_with_this_package_they_use_its_cases_and_gates_and_say_so(done: subprocess.CompletedProcess[str]) -> None:
    assert "cases, oracle, gates and sandbox of traceproof" in done.stdout
    assert "no_cuda: norm.rmsnorm needs a CUDA device" in done.stdout
    failed = [line for line in done.stdout.splitlines() if line.startswith("FAILED")]
    assert done.returncode == 1
    assert failed
    assert "test_rmsnorm_a" not in "\n".join(failed)
    title = "test_numerical_correctness[small-0] _"
    report = done.stdout.partition(title)[2].strip("_").partition("\n___")[0]
    assert "rmsnorm_b, case small-0 (batch_size 1; seed 0) on cpu:\n  reference, output: fail numerics" in report
    assert report.count("at [") == 5
    assert "max_abs" in report
    assert "specification: atol 0.008" in report
    assert "rmsnorm_a, case small-0" in done.stdout  # what passed, too
    assert "torch: 3/5 passed, 1 skipped" in done.stdout


def test_workload_lines_are_cases_and_a_missing_blob_a_skip(done: subprocess.CompletedProcess[str]) -> None:
    listed = run_pytest_lines(done)
    assert "test_numerical_correctness[workload-one]" in listed
    assert "workload-huge" not in done.stdout  # large
    assert "rmsnorm_a.jsonl:2: no blob/none.safetensors in the dataset" in done.stdout


def run_pytest_lines(done: subprocess.CompletedProcess[str]) -> str:
    return "\n".join(line for line in done.stdout.splitlines() if line.startswith("tests/"))


def test_alone_they_draw_and_compare_themselves(written: Path) -> None:
    """The wrong reference fails against PyTorch; metrics are shown for what passed, counts per ground truth."""
    done = run_pytest(written, "-v", "-s", alone=True)
    assert "own cases, tolerances by dtype (traceproof is not used)" in done.stdout
    failed = [line for line in done.stdout.splitlines() if line.startswith("FAILED")]
    assert {line.partition("[")[0].rpartition("/")[2] for line in failed} == {
        "test_rmsnorm_b.py::test_numerical_correctness",
        "test_rmsnorm_b.py::test_edge_cases",
        "test_rmsnorm_b.py::test_correctness_vs_torch",
    }
    assert "no_cuda: flashinfer needs a CUDA device" in done.stdout
    assert "torch: 2/4 passed, 0 skipped" in done.stdout
    assert "flashinfer: 0/0 passed, 4 skipped" in done.stdout
    shown = done.stdout.partition("reference against torch[output]: Max absolute difference: ")[2][:500]
    for figure in ("Mean absolute", "Max relative", "Mean relative"):
        assert f" {figure} difference: " in shown
    assert "  Cosine similarity: 1.000000, MSE: " in shown
    assert "  Hit ratio: 100.00% (need >= 100.00%)\n  PASSED: outputs match within tolerance (atol=0.008" in shown
    assert "  FAILED: outputs differ beyond tolerance (atol=0.008, rtol=0.01)" in done.stdout
    told = done.stdout.partition("beyond tolerance; Top-5 absolute error locations:\n  [")[2]
    assert "]: ref=" in told[:200]
    assert run_pytest(written, "--tolerance=0.5", "-k", "not own", alone=True).returncode == 0


# What is planted in a right reference, and the test that is for it.
PLANTED = {
    "writes": ("EPS = 1e-6", "EPS = 1e-6\n    weight[-1] += 1", "test_determinism"),
    "seeds": ("return (y *", "return (torch.seed() % 1000003 * y *", "test_determinism"),
    "constant": ("return (y *", "return (1 + 0 * y *", "test_determinism"),
    "dtype": (".to(torch.bfloat16)", ".to(torch.float16)", "test_output_dtype"),
    "shape": ("return (y", "return (y[:0]", "test_output_shape"),
}


@pytest.mark.parametrize("alone", [True, False])
def test_each_test_finds_what_it_is_for(tmp_path: Path, *, alone: bool) -> None:
    for name, (old, new, _) in PLANTED.items():
        assert old in GOOD
        write(tmp_path, rmsnorm(f"rmsnorm_{name}", reference=GOOD.replace(old, new)))
    everything(tmp_path)
    done = run_pytest(tmp_path, "-k", "determinism or output_dtype or output_shape", alone=alone)
    failed = "\n".join(line for line in done.stdout.splitlines() if line.startswith("FAILED"))
    for name, (*_, test) in PLANTED.items():
        assert f"test_rmsnorm_{name}.py::{test}[" in failed, done.stdout


def test_the_definition_s_own_reference_and_constants_are_what_is_tested(dataset: Path) -> None:
    everything(dataset)
    path = dataset / "definitions" / "rmsnorm" / "rmsnorm_a.json"
    path.write_text(path.read_text().replace("EPS = 1e-6", "EPS = 2e-6"))
    (dataset / "definitions" / "rmsnorm" / "rmsnorm_b.json").write_text("{")
    done = run_pytest(dataset, "-k", "constants")
    assert "test_rmsnorm_a.py::test_constants[small-0]" in done.stdout
    assert "rmsnorm_b can not be read" in done.stdout


def test_a_folder_that_flashinfer_dumped_gets_tests_that_run(tmp_path: Path) -> None:
    (tmp_path / "silu_and_mul_h64.json").write_text(json.dumps(GATED))
    assert everything(tmp_path).status == {"silu_and_mul_h64": "written"}
    for alone in (True, False):
        done = run_pytest(tmp_path, alone=alone)
        assert done.returncode == 0, done.stdout


def test_tests_can_be_written_beside_a_dataset_that_stays_as_it_is(dataset: Path, tmp_path: Path) -> None:
    out = tmp_path / "elsewhere"
    before = contents(dataset)
    result = generate(GenerateOptions(root=dataset, out=out, everything=True), NOTHING_KNOWN)
    assert {path for path in contents(dataset) if not path.startswith("elsewhere/")} == set(before)
    assert "tests/references/test_rmsnorm_a.py" in result.files
    done = run_pytest(out, "--collect-only", f"--dataset={dataset}")
    assert "test_rmsnorm_a.py" in done.stdout
    assert "[small-0]" in done.stdout
    assert "give the dataset's folder with --dataset" in run_pytest(out, alone=True).stdout


def test_large_cases_run_where_the_tests_were_written_for_them(dataset: Path) -> None:
    """What the command line says counts for more."""
    for name, sizes in (("rmsnorm_a", ("small", "large")), ("rmsnorm_b", None)):
        generate(GenerateOptions(root=dataset, definitions=(name,), sizes=sizes), NOTHING_KNOWN)

    def large(*given: str) -> set[str]:
        done = run_pytest(dataset, "--collect-only", "-k", "numerical_correctness", sizes=given)
        assert ("[small-0]" in done.stdout) == ("slow" not in given)
        lines = [line.split("::")[0] for line in done.stdout.splitlines() if "correctness[large-" in line]
        return {line.rpartition("_")[2] for line in lines}

    assert large() == {"a.py"}
    assert large("--test-sizes", "small", "large", "-m", "slow") == {"a.py", "b.py"}  # all of them have the mark


def test_the_command_that_is_printed_works_as_it_stands(
    dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    root, config = run.configured()
    torch = config.stacks["torch"].model_copy(update={"python": Path(forked.interpreter())})
    stacks = config.stacks.model_copy(update={"torch": torch})
    monkeypatch.setattr(run, "configured", lambda **_: (root, config.model_copy(update={"stacks": stacks})))
    given = ["--definitions-dir", str(dataset), "--output-dir", str(tmp_path / "a b")]  # all that are there
    with pytest.raises(SystemExit):
        main(["add-reference-tests", *given])
    told = capsys.readouterr().out
    command = next(line for line in told.splitlines() if line.startswith("run them: ")).removeprefix("run them: ")
    (tmp_path / "elsewhere").mkdir()
    done = subprocess.run(
        ["bash", "-c", f"{command} --collect-only -q"],  # as pasted
        cwd=tmp_path / "elsewhere",
        env={"PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"},  # no pytest there
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr + done.stdout
    assert "test_rmsnorm_a.py::test_numerical_correctness[small-0]" in done.stdout


def test_a_file_started_as_a_script_says_how_many_agree_and_fails_as_they_do(written: Path) -> None:
    for name, agree, code in (("a", "torch: 2/2 passed", 0), ("b", "torch: 0/2 passed", 1)):
        done = run_pytest(written, script=written / PLACE / f"test_rmsnorm_{name}.py", alone=True)
        assert done.returncode == code, done.stdout
        assert agree in done.stdout
