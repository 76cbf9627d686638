"""Writing reference tests: what is written, what is left alone, what is refused, and what they say."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest
from definitions import GOOD, rmsnorm, write
from dialect_samples import GATED

from traceproof.errors import TraceproofError
from traceproof.testgen.bundle import NAME, support_files
from traceproof.testgen.files import class_names, classes, state
from traceproof.testgen.generate import PLACE, GenerateOptions, Result, generate
from traceproof.testgen.known import Divergences

pytestmark = pytest.mark.slow

NOTHING_KNOWN = Divergences(verdicts=None, known=None)


@pytest.fixture
def dataset(tmp_path: Path) -> Path:
    for name in ("rmsnorm_a", "rmsnorm_b"):
        write(tmp_path, rmsnorm(name))
    return tmp_path


def contents(root: Path) -> dict[str, bytes]:
    return {path.relative_to(root).as_posix(): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def everything(root: Path, *, force: bool = False) -> Result:
    return generate(GenerateOptions(root=root, everything=True, force=force), NOTHING_KNOWN)


def test_one_class_a_definition_and_generating_again_changes_no_byte(dataset: Path) -> None:
    result = everything(dataset)
    text = (dataset / PLACE / "test_rmsnorm.py").read_text()
    assert list(classes(text)) == ["rmsnorm_a", "rmsnorm_b"]
    assert "rmsnorm/rmsnorm_a.json" in text
    assert (result.before["rmsnorm"], result.after["rmsnorm"], result.total["rmsnorm"]) == (0, 2, 2)
    written = contents(dataset)
    again = everything(dataset)
    assert again.files == []
    assert again.status == {"rmsnorm_a": "kept", "rmsnorm_b": "kept"}
    everything(dataset, force=True)
    assert contents(dataset) == written


def test_a_new_definition_is_added_and_edited_classes_stay_unless_forced(dataset: Path) -> None:
    generate(GenerateOptions(root=dataset, definitions=("rmsnorm_b",)), NOTHING_KNOWN)
    path = dataset / PLACE / "test_rmsnorm.py"
    path.write_text(path.read_text().replace("The reference of rmsnorm_b.", "Edited."))
    assert everything(dataset).status == {"rmsnorm_a": "written", "rmsnorm_b": "kept"}
    assert "Edited." in path.read_text()
    assert list(classes(path.read_text())) == ["rmsnorm_a", "rmsnorm_b"]
    everything(dataset, force=True)
    assert "Edited." not in path.read_text()


def test_a_definition_with_a_file_of_its_own_is_left_alone(dataset: Path) -> None:
    own = dataset / PLACE / "test_rmsnorm_a.py"
    own.parent.mkdir(parents=True)
    own.write_text("# somebody's\n")
    result = everything(dataset)
    assert result.status == {"rmsnorm_a": "elsewhere", "rmsnorm_b": "written"}
    assert own.read_text() == "# somebody's\n"
    assert result.before["rmsnorm"] == 1


def test_a_folder_that_flashinfer_dumped_gets_tests_that_run(tmp_path: Path) -> None:
    (tmp_path / "silu_and_mul_h64.json").write_text(json.dumps(GATED))
    assert everything(tmp_path).status == {"silu_and_mul_h64": "written"}
    assert 'definition_file = "silu_and_mul_h64.json"' in (tmp_path / PLACE / "test_activation.py").read_text()
    done = run_pytest(tmp_path)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("name", ["conftest.py", "test_rmsnorm.py", f"{NAME}/__init__.py"])
def test_a_file_of_somebody_else_in_the_way_is_refused_and_nothing_is_written(dataset: Path, name: str) -> None:
    foreign = dataset / PLACE / name
    foreign.parent.mkdir(parents=True)
    foreign.write_text("import os\n")
    before = contents(dataset)
    with pytest.raises(TraceproofError, match="is not traceproof's"):
        everything(dataset, force=True)
    assert contents(dataset) == before


def test_an_edited_conftest_is_refused_unless_forced(dataset: Path) -> None:
    everything(dataset)
    conftest = dataset / PLACE / "conftest.py"
    conftest.write_text(conftest.read_text() + "# mine\n")
    with pytest.raises(TraceproofError, match="was edited"):
        everything(dataset)
    everything(dataset, force=True)
    assert state(conftest) == "ours"


def test_a_folder_that_is_no_dataset_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TraceproofError, match="is not a dataset"):
        everything(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_can_not_be_written_is_refused(dataset: Path) -> None:
    (dataset / "tests").write_text("a file where a folder is needed")
    with pytest.raises(TraceproofError, match="cannot be written"):
        everything(dataset)


def test_a_name_that_is_no_identifier_is_reported_and_the_others_are_written(dataset: Path) -> None:
    write(dataset, rmsnorm("rms-norm"))
    with pytest.raises(TraceproofError, match="no identifier"):
        generate(GenerateOptions(root=dataset, definitions=("rms-norm",)), NOTHING_KNOWN)
    assert not (dataset / "tests").exists()
    result = everything(dataset)
    assert result.after["rmsnorm"] == 2
    assert ["rms-norm" in problem for problem in result.problems] == [True]


def test_a_definition_that_does_not_parse_is_reported(dataset: Path) -> None:
    write(dataset, rmsnorm("rmsnorm_broken", reference="def run(:"))
    result = everything(dataset)
    assert "rmsnorm_broken" not in result.status
    assert "reference is not Python" in result.problems[0]


def test_a_selection_that_does_not_fit_says_everything_that_is_wrong(dataset: Path) -> None:
    with pytest.raises(TraceproofError) as caught:
        generate(GenerateOptions(root=dataset, op_types=("rope",), definitions=("no_such",)), NOTHING_KNOWN)
    assert len(caught.value.problems) == 2
    with pytest.raises(TraceproofError, match="nothing is selected"):
        generate(GenerateOptions(root=dataset), NOTHING_KNOWN)


def test_a_known_divergence_is_flagged_in_the_class(dataset: Path) -> None:
    known = dataset / "known.yaml"
    known.write_text(
        "findings:\n- {definitions: [rmsnorm_a], cases: [edge-zeros], outputs: [output], verdict: fail,"
        " reason: nan, why: the reference divides by zero there}\n"
    )
    result = generate(GenerateOptions(root=dataset, everything=True), Divergences(verdicts=None, known=known))
    assert result.flagged == {"rmsnorm_a": ("case edge-zeros: nan",)}
    text = (dataset / PLACE / "test_rmsnorm.py").read_text()
    assert "It is known to diverge" in classes(text)["rmsnorm_a"]
    assert "diverge" not in classes(text)["rmsnorm_b"]


def test_settings_of_one_generation_stay_with_the_tests_that_it_wrote(dataset: Path) -> None:
    loose = {"sizes": ("small",), "tolerance": 0.1, "checkouts": {"flashinfer": "/somewhere"}}
    generate(GenerateOptions(root=dataset, definitions=("rmsnorm_a",), **loose), NOTHING_KNOWN)  # type: ignore[arg-type]
    generate(GenerateOptions(root=dataset, definitions=("rmsnorm_b",), sizes=("large",)), NOTHING_KNOWN)
    found = classes((dataset / PLACE / "test_rmsnorm.py").read_text())
    assert found["rmsnorm_a"].endswith('    test_sizes = ("small",)\n    tolerance = 0.1')
    assert found["rmsnorm_b"].endswith('    test_sizes = ("large",)')
    assert (
        'CHECKOUTS: dict[str, str] = {"flashinfer": "/somewhere"}' in (dataset / PLACE / "conftest.py").read_text()
    )


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


def test_names_that_would_share_a_class_get_two() -> None:
    assert class_names(["a_b", "aB", "c"]) == {"a_b": "Test_a_b", "aB": "Test_aB", "c": "TestC"}


def test_the_support_package_needs_nothing_but_torch_pytest_safetensors_and_pydantic() -> None:
    for path, text in support_files().items():
        top = [node for node in ast.parse(text).body if isinstance(node, ast.Import | ast.ImportFrom)]
        for absent in ("numpy", "yaml", "rich", "typer", "traceproof"):
            assert not [node for node in top if absent in ast.unparse(node).split()[1]], path
        assert "import traceproof" not in text
        assert "from traceproof" not in text


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


def test_written_files_are_formatted(dataset: Path) -> None:
    everything(dataset)
    ruff = Path(sys.executable).with_name("ruff")
    if not ruff.exists():
        pytest.skip("package_absent: ruff is not installed here")
    command = [str(ruff), "format", "--check", "--isolated", "--line-length", "115", str(dataset / PLACE)]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def run_pytest(dataset: Path, *arguments: str, here: str = "tests/references") -> subprocess.CompletedProcess[str]:
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
        "--test-sizes=small",
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
