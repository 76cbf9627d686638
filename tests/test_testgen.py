"""Writing reference tests: what is written, left alone, refused; their cases where this package is there."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from functools import cache
from pathlib import Path
from types import CodeType, ModuleType, SimpleNamespace
from typing import Any

import forked
import pytest
import torch
from definitions import GOOD, rmsnorm, write

from traceproof.audit import audit
from traceproof.checkouts import pins
from traceproof.cli import main
from traceproof.dataset.definition import Definition
from traceproof.dataset.fetch import FETCHED
from traceproof.dataset.reference_text import assigned
from traceproof.dataset.tree import DatasetTree, read_tree
from traceproof.errors import TraceproofError
from traceproof.ops import lookup
from traceproof.ops.base import TORCH_DTYPES
from traceproof.reasons import Verdict
from traceproof.run.known import Known, read_known
from traceproof.run.schema import REFERENCE
from traceproof.run.workers import Environment
from traceproof.sandbox import Limits
from traceproof.stacks import MAIN
from traceproof.testgen import suite as module
from traceproof.testgen.calls import Call
from traceproof.testgen.generate import (
    CONFTEST,
    PLACE,
    Divergences,
    Generated,
    GenerateOptions,
    conftest_text,
    generate,
    headed,
    state,
)
from traceproof.testgen.generate import GenerateOptions as Wanted
from traceproof.testgen.running import DefinitionTestRow, OpTypeTests, read_rows, run_tests, write_rows
from traceproof.testgen.suite import LARGE, SuiteCase, threads
from traceproof.testgen.summary import described, judged, table
from traceproof.testgen.texts import render, served

NOTHING_KNOWN = Divergences()


@pytest.fixture
def dataset(tmp_path: Path) -> Path:
    """Two definitions."""
    for name in ("rmsnorm_a", "rmsnorm_b"):
        write(tmp_path, rmsnorm(name))
    return tmp_path


def contents(root: Path) -> dict[str, bytes]:
    return {path.relative_to(root).as_posix(): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def everything(root: Path, *, force: bool = False) -> Generated:
    return generate(GenerateOptions(root=root, everything=True, force=force), NOTHING_KNOWN)


__all__ = ["dataset"]
SAMPLES = Path(__file__).parent / "dataset"


def test_the_clone_that_repos_config_names_is_the_dataset_unless_it_was_fetched(dataset: Path) -> None:
    config, out = dataset / "repos_config.json", dataset / "out"
    config.write_text(json.dumps({"repositories": {pins.DATASET: {"path": str(dataset), "status": "cloned"}}}))
    (dataset / FETCHED).touch()
    to_out = ["--output-dir", str(out)]
    for code, options, written in ((2, [], None), (0, to_out, out), (0, [], dataset)):
        with pytest.raises(SystemExit) as ended:
            main(["add-reference-tests", "--repos-config", str(config), *options])
        places = {place for place in (dataset, out) if (place / PLACE / "test_rmsnorm_a.py").is_file()}
        assert (ended.value.code, places - {out} if not options else places) == (code, {written} - {None})
        if options:
            (dataset / FETCHED).unlink()


@cache
def samples() -> DatasetTree:
    return read_tree(SAMPLES)


NAMES = sorted(path.stem for path in (SAMPLES / "definitions").rglob("*.json"))


@cache
def conftest_code() -> CodeType:
    return compile(CONFTEST.read_text(), "conftest.py", "exec")


def loaded(text: str) -> dict[str, Any]:
    """The names of a test file, and of the conftest."""
    conftest: dict[str, Any] = {"__name__": "conftest", "__file__": str(SAMPLES / PLACE / "conftest.py")}
    exec(conftest_code(), conftest)  # noqa: S102 - ours
    body = "\n".join(line for line in text.splitlines() if not line.startswith("from conftest import"))
    found = conftest | {"__name__": "test_x"}
    exec(compile(body, "test_x.py", "exec", dont_inherit=True), found)  # noqa: S102 - ours
    return found


@pytest.mark.parametrize("name", NAMES)
def test_own_inputs_fit_the_definition_and_every_call_is_written_or_left_to_traceproof(name: str) -> None:
    """The generic test over all ops: inputs in the definition's order, shapes and dtypes; calls with all names."""
    definition = samples().definitions[name].definition
    text = render(definition)
    module = loaded(text)
    assert set(module["GROUND_TRUTHS"]) == set(served(definition))
    assert all(f"test_correctness_vs_{source}" in module for source in module["GROUND_TRUTHS"])
    for source in served(definition):
        if lookup.adapter(source, definition) is None:  # a function that the definition names
            assert module["GROUND_TRUTHS"][source].load is None
        else:  # without the packages, all that it names must be there when it is imported
            alone = re.sub(
                r"(?m)^( *)from \S+ import \S+ as (\w+)$", r"\1\2 = None", Call(definition, source).module()
            )
            exec(compile(alone, source, "exec", dont_inherit=True), {"__name__": source})  # noqa: S102 - ours
    if "no_inputs: " in text:
        with pytest.raises(pytest.skip.Exception, match="no_inputs: "):
            module["generate_random_inputs"]()
        return
    inputs = module["generate_random_inputs"]()
    assert list(inputs) == list(definition.inputs)
    sizes = dict(definition.const_axes)
    for one, spec in definition.inputs.items():
        value = inputs[one]
        if isinstance(value, torch.Tensor):
            assert value.dtype == TORCH_DTYPES[spec.dtype]
            for axis, size in zip(spec.shape or (), value.shape, strict=True):
                assert sizes.setdefault(axis, size) == size, (one, axis)
    again = module["generate_random_inputs"]()
    tensors = [one for one in inputs if isinstance(inputs[one], torch.Tensor)]
    assert all(module["same_bits"](inputs[one], again[one]) for one in tensors)


def test_one_file_a_definition_and_generating_again_changes_no_byte(dataset: Path) -> None:
    result = everything(dataset)
    assert sorted(path.name for path in (dataset / PLACE).iterdir()) == [
        "conftest.py",
        "test_rmsnorm_a.py",
        "test_rmsnorm_b.py",
    ]
    assert (result.before["rmsnorm"], result.after["rmsnorm"], result.total["rmsnorm"]) == (0, 2, 2)
    written = contents(dataset)
    again = everything(dataset)
    assert again.files == []
    assert again.status == {"rmsnorm_a": "kept", "rmsnorm_b": "kept"}
    everything(dataset, force=True)
    assert contents(dataset) == written
    (dataset / PLACE / "test_rmsnorm_a.py").unlink()
    order = GenerateOptions(root=dataset, definitions=("rmsnorm_a",), python=sys.executable)
    assert generate(order, NOTHING_KNOWN).files == ["tests/references/test_rmsnorm_a.py"]
    assert contents(dataset) == written  # as another interpreter writes it


def test_the_audit_finds_nothing_in_what_was_written(dataset: Path) -> None:
    """Their assertions stand in the conftest; a file that asks it for none has a finding."""
    everything(dataset)
    (dataset / PLACE / "test_own.py").write_text("def test_own(case):\n    case.blocked()\n")
    report = audit(dataset / PLACE, dataset)
    assert [(str(one.path), one.code) for one in report.findings] == [("test_own.py", "TA101")]
    assert report.read["tests"] > 2


def test_an_edited_file_stays_unless_forced_and_somebody_else_s_in_any_case(dataset: Path) -> None:
    own, edited = (dataset / PLACE / f"test_rmsnorm_{name}.py" for name in "ab")
    own.parent.mkdir(parents=True)
    own.write_text("# somebody's\n")
    assert everything(dataset).status == {"rmsnorm_a": "elsewhere", "rmsnorm_b": "written"}
    edited.write_text(edited.read_text() + "# mine\n")
    result = everything(dataset)
    assert result.status == {"rmsnorm_a": "elsewhere", "rmsnorm_b": "kept"}
    assert result.before["rmsnorm"] == 2
    assert edited.read_text().endswith("# mine\n")
    assert everything(dataset, force=True).status == {"rmsnorm_a": "elsewhere", "rmsnorm_b": "written"}
    assert state(edited) == "ours"
    assert own.read_text() == "# somebody's\n"


def test_another_conftest_is_refused_and_an_edited_one_unless_forced(dataset: Path) -> None:
    conftest = dataset / PLACE / "conftest.py"
    conftest.parent.mkdir(parents=True)
    conftest.write_text("import os\n")
    before = contents(dataset)
    with pytest.raises(TraceproofError, match="is not traceproof's"):
        everything(dataset, force=True)
    assert contents(dataset) == before
    conftest.write_text(conftest_text({}) + "# mine\n")
    with pytest.raises(TraceproofError, match="was edited"):
        everything(dataset)
    everything(dataset, force=True)
    assert state(conftest) == "ours"
    conftest.write_text(headed("CHECKOUTS = {}  # of an earlier version\n"))
    everything(dataset)
    assert conftest.read_text() == conftest_text({})


def test_a_folder_that_is_no_dataset_or_can_not_be_written_is_refused(dataset: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(TraceproofError, match="is not a dataset"):
        everything(tmp_path / "empty")
    (dataset / "tests").write_text("a file where a folder is needed")
    with pytest.raises(NotADirectoryError, match="tests"):
        everything(dataset)


def test_definitions_that_get_no_test_are_reported_and_the_others_are_written(dataset: Path) -> None:
    write(dataset, rmsnorm("rms-norm"))
    write(dataset, rmsnorm("rmsnorm_broken", reference="def run(:"))
    with pytest.raises(TraceproofError, match="no identifier"):
        generate(GenerateOptions(root=dataset, definitions=("rms-norm",)), NOTHING_KNOWN)
    assert not (dataset / "tests").exists()
    result = everything(dataset)
    assert result.status == {"rmsnorm_a": "written", "rmsnorm_b": "written"}
    assert ["reference is not Python" in problem for problem in result.problems] == [True, False]
    assert "rms-norm" in result.problems[1]


def test_a_selection_that_does_not_fit_says_everything_that_is_wrong(dataset: Path) -> None:
    with pytest.raises(TraceproofError) as caught:
        generate(GenerateOptions(root=dataset, op_types=("rope",), definitions=("no_such",)), NOTHING_KNOWN)
    assert len(caught.value.problems) == 2
    with pytest.raises(TraceproofError, match="nothing is selected"):
        generate(GenerateOptions(root=dataset), NOTHING_KNOWN)


def test_a_known_divergence_is_flagged_in_the_file(dataset: Path) -> None:
    known = dataset / "known.yaml"
    known.write_text(
        "findings:\n- {definitions: [rmsnorm_a], cases: [edge-zeros], outputs: [output], verdict: fail,"
        " reason: nan, why: the reference divides by zero there}\n"
    )
    result = generate(
        GenerateOptions(root=dataset, everything=True), Divergences(known=read_known(known).findings)
    )
    assert result.flagged == {"rmsnorm_a": ("case edge-zeros: nan",)}
    flagged, other = ((dataset / PLACE / f"test_rmsnorm_{name}.py").read_text() for name in "ab")
    assert "It is known to diverge" in flagged
    assert "diverge" not in other


def test_settings_of_one_generation_stay_with_the_tests_that_it_wrote(dataset: Path) -> None:
    loose = {"sizes": ("small",), "tolerance": 0.1, "checkouts": {"flashinfer": "/somewhere"}}
    generate(GenerateOptions(root=dataset, definitions=("rmsnorm_a",), **loose), NOTHING_KNOWN)  # type: ignore[arg-type]
    generate(GenerateOptions(root=dataset, definitions=("rmsnorm_b",), sizes=("large",)), NOTHING_KNOWN)
    one, other = ((dataset / PLACE / f"test_rmsnorm_{name}.py").read_text() for name in "ab")
    assert 'TEST_SIZES = ("small",)\nTOLERANCE = 0.1\n' in one
    assert 'TEST_SIZES = ("large",)\n' in other
    assert "TOLERANCE" not in other
    assert 'CHECKOUTS = {"flashinfer": "/somewhere"}' in (dataset / PLACE / "conftest.py").read_text()


def test_shared_functions_take_the_arguments_of_the_specification(dataset: Path) -> None:
    everything(dataset)
    body = ast.parse((dataset / PLACE / "conftest.py").read_text()).body
    taken = {node.name: [arg.arg for arg in node.args.args] for node in body if isinstance(node, ast.FunctionDef)}
    assert taken["load_definition"][0] == "name"
    assert taken["compile_reference"] == ["reference_code"]
    assert taken["assert_close"][:4] == ["actual", "expected", "rtol", "atol"]
    assert taken["compute_error_metrics"] == ["ref", "gt", "name"]
    assert taken["check_hit_ratio"] == ["ref", "gt", "atol", "rtol", "required_percent"]


def test_a_reviewer_gets_few_lines_without_a_linter_s_complaints(dataset: Path) -> None:
    everything(dataset)
    lengths = {path.name: len(path.read_text().splitlines()) for path in (dataset / PLACE).iterdir()}
    assert lengths["conftest.py"] <= 301  # the first line says who wrote it
    assert lengths["test_rmsnorm_a.py"] <= 200
    ruff = Path(sys.executable).with_name("ruff")
    if not ruff.exists():
        pytest.skip("package_absent: ruff is not installed here")
    done = subprocess.run(
        [str(ruff), "check", "--isolated", "--line-length", "115", "--select", "E9,F,B", str(dataset / PLACE)],
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    ("code", "constants"),
    [
        ("EPS = 1e-6\neps = EPS\n", {"eps": 1e-6}),
        ("scale: float = 0.5\n", {"scale": 0.5}),
        ("token_idx = 0\nfor row in range(3):\n    token_idx += row\n", {}),
        ("index = 0\nwhile index < 3:\n    index = index + 1\n", {}),
        ("size = 4\nfor size in range(3):\n    pass\n", {}),
        ("limit = 1\nif flag:\n    limit = 2\n", {}),
        ("top = 8\nbest = [top for top in range(3)]\n", {}),
    ],
)
def test_what_a_reference_assigns_again_is_no_constant(code: str, constants: dict[str, float]) -> None:
    definition = Definition.model_validate(rmsnorm("a") | {"reference": f"{code}\ndef run(x):\n    return x\n"})
    assert assigned(definition.reference) == constants


def row(**changes: Any) -> DefinitionTestRow:  # noqa: ANN401 - values of a row
    plain: dict[str, Any] = {"op_type": "gemm", "stack": "torch", "definition": "gemm_a", "digest": "0" * 32}
    plain |= {"test": "test_correctness", "case": "small-0", "outcome": "passed", "message": "", "seconds": 0.5}
    found: DefinitionTestRow = plain | changes  # type: ignore[assignment]
    return found


def test_rows_are_read_as_they_were_written_whatever_a_message_holds(tmp_path: Path) -> None:
    rows = [row(message="a\u2028b\x85c\rd\ne"), row()]
    write_rows(rows, tmp_path / "rows.jsonl")
    assert read_rows([tmp_path / "rows.jsonl"]) == rows


def known(**changes: Any) -> Known:  # noqa: ANN401 - values of an entry
    entry = {"definitions": {"gemm_a": "0" * 32}, "cases": ["edge-zeros"], "outputs": ["C"], "verdict": "fail"}
    entry |= {"reason": "nan", "why": "the reference divides by zero there"}
    return Known.model_validate({"findings": [entry | changes]})


def test_a_failure_of_a_case_that_is_known_to_diverge_is_no_finding() -> None:
    rows = [row(), row(case="edge-zeros", test="test_edge_cases", outcome="failed")]
    assert judged(rows, known(), {})["passed"]
    assert not judged(rows, known(cases=["edge-empty"]), {})["passed"]
    assert not judged([row(case="edge-zeros", outcome="failed", digest="1" * 32)], known(), {})["passed"]


def test_a_ground_truth_s_known_finding_counts_in_its_own_stack_and_version() -> None:
    entry = known(implementation="flashinfer", versions="flashinfer-python<0.8")
    rows = [row(case="edge-zeros", outcome="failed", stack="flashinfer", test="test_correctness_vs_flashinfer")]
    assert judged(rows, entry, {"flashinfer": {"flashinfer-python": "0.7.2"}})["passed"]
    assert not judged(rows, entry, {"flashinfer": {"flashinfer-python": "0.8"}})["passed"]
    assert not judged([row(case="edge-zeros", outcome="failed")], entry, {})["passed"]


def test_no_test_at_all_is_a_finding() -> None:
    report = judged([], Known(), {})
    assert not report["passed"]
    assert "no test was run" in table(report)


def test_what_failed_is_listed_with_what_it_said() -> None:
    report = judged([row(outcome="failed", message="gemm_a, case small-0\nmore"), row()], Known(), {})
    assert "FAILED gemm_a test_correctness[small-0] in torch: gemm_a, case small-0" in table(report)


def test_a_description_counts_rows_of_this_state_of_a_definition_only() -> None:
    rows = judged([row(), row(outcome="skipped"), row(digest="1" * 32)], Known(), {})["rows"]
    assert described(rows, {"gemm_a": "0" * 32}, ["gemm_a"]) == "gemm_a in torch: 1 passed, 1 skipped"


@pytest.mark.slow
def test_definitions_side_by_side_give_their_rows_in_order_and_lines_of_progress(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    names = ["rmsnorm_a", "rmsnorm_b", "rmsnorm_c"]
    for name in names:
        write(tmp_path, rmsnorm(name))
    wanted = Wanted(root=tmp_path, everything=True, sizes=("small",))
    generate(wanted, Divergences())
    of: dict[str, Any] = {"folder": tmp_path / PLACE, "op_type": "rmsnorm", "stack": "torch", "dataset": tmp_path}
    options = ["-k", "test_numerical_correctness or vs_flashinfer", "--test-sizes=small"]
    digests = dict.fromkeys(names, "0" * 32)
    order = OpTypeTests(**of, digests=digests, options=options, limits=Limits(seconds=300.0))
    monkeypatch.setattr("traceproof.programs.FIRST_SECONDS", 0.01)
    rows = list(run_tests(order, Environment(name=MAIN, python=forked.interpreter()), parallel=2))
    assert f"{'rmsnorm':24}  tests of 0/3 definitions: 0 s\n" in capsys.readouterr().err
    assert list(dict.fromkeys(row["definition"] for row in rows)) == names
    counts = {name: sum(row["definition"] == name for row in rows) for name in names}
    assert len(set(counts.values())) == 1
    assert {row["outcome"] for row in rows} == {"passed", "skipped"}  # what needs a GPU
    file = tmp_path / PLACE / "test_rmsnorm_b.py"
    file.write_text(file.read_text() + "# edited\n")
    with pytest.raises(TraceproofError, match="is not as it was generated"):
        list(run_tests(order, Environment(name=MAIN, python=forked.interpreter())))


DATASET = Path(__file__).parent / "dataset"


pytestmark = pytest.mark.usefixtures("one_thread")


def config(root: Path, **changes: Any) -> Any:  # noqa: ANN401 - what stands in for pytest's
    known = {"dataset": root, "seed": 0, "device": torch.device("cpu"), "workloads": "no", "tolerance": None}
    known |= {"memory_gb": None} | changes
    return SimpleNamespace(getoption=known.__getitem__)


def cases(root: Path, name: str, **changes: Any) -> dict[str, list[SuiteCase]]:  # noqa: ANN401 - options
    file = ModuleType("test_x")
    vars(file).update(DEFINITION=name, GROUND_TRUTHS={"torch": SimpleNamespace(load=None)})
    return module.cases(file, config(root, **changes), ("small",))


def trial(root: Path, reference: str = GOOD, **changes: Any) -> SuiteCase:  # noqa: ANN401 - options
    write(root, rmsnorm("rmsnorm_a", reference=reference))
    return cases(root, "rmsnorm_a", **changes)["case"][0]


def test_what_returns_its_input_is_named(tmp_path: Path) -> None:
    found = trial(tmp_path, "def run(hidden_states, weight):\n    return hidden_states\n")
    with pytest.raises(pytest.fail.Exception, match=r"outputs \['output'\] share memory with inputs"):
        found.check_determinism()


@pytest.mark.parametrize(
    ("need", "variables", "expected"),
    [
        (LARGE, {}, 1),
        (LARGE + 1, {}, 8),
        (LARGE + 1, {"PYTEST_XDIST_WORKER_COUNT": "3"}, 4),
        (LARGE + 1, {"PYTEST_XDIST_WORKER_COUNT": "50"}, 1),
        (LARGE, {"OMP_NUM_THREADS": "8"}, 8),
    ],
)
def test_threads_follow_the_case_its_share_of_the_cores_and_the_user(
    monkeypatch: pytest.MonkeyPatch, need: int, variables: dict[str, str], expected: int
) -> None:
    for name in ("OMP_NUM_THREADS", "PYTEST_XDIST_WORKER_COUNT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(module, "GIVEN_THREADS", 8)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(12)))
    assert threads(need) == expected


@pytest.mark.parametrize(("tolerance", "passes"), [(None, False), (1e-4, False), (0.1, True)])
def test_a_users_tolerance_decides(tmp_path: Path, tolerance: float | None, *, passes: bool) -> None:
    """A 3 % error: refused by the calibrated gates and by the specification's row, accepted by 0.1."""
    write(tmp_path, rmsnorm("rmsnorm_a", reference=GOOD.replace("return (y *", "return (1.03 * y *")))
    found = cases(tmp_path, "rmsnorm_a", tolerance=tolerance)
    for case in (found["case"][0], found["edge_case"][-1]):
        if passes:
            case.check()
        else:
            with pytest.raises(pytest.fail.Exception):
                case.check()


def test_what_is_outside_the_specification_fails(tmp_path: Path) -> None:
    found = trial(tmp_path)
    found.check()
    for row in found.rows(REFERENCE):
        row.metrics["within_specification"] = False
    with pytest.raises(pytest.fail.Exception, match="outside the specification's tolerance"):
        found.check()


@pytest.mark.parametrize(("k", "held"), [(8, True), (14336, False)])
def test_a_sum_is_held_to_it_where_its_order_does_not_decide(tmp_path: Path, k: int, *, held: bool) -> None:
    """Of 14,336 terms a float32 sum may lose more than the specification's 1e-3, and kernels differ in what."""
    raw = json.loads((DATASET / "definitions/gemm/gemm_n96_k160.json").read_text(encoding="utf-8"))
    raw |= {"name": f"gemm_n8_k{k}", "axes": {**raw["axes"], "N": {"type": "const", "value": 8}}}
    raw["axes"]["K"] = {"type": "const", "value": k}
    write(tmp_path, raw)
    found = cases(tmp_path, raw["name"])["case"][0]
    row = found.rows(REFERENCE)[0]
    assert found.baseline_within(row) is held


def test_where_nobody_knows_what_is_right_both_are_held_against_each_other(tmp_path: Path) -> None:
    found = trial(tmp_path)
    judged_case, rows = found.file.run(found.planned)
    unjudged = [row.changed(verdict=Verdict.SKIP, metrics={}) for row in rows]
    ours = judged_case.ran[REFERENCE]["output"]
    for factor, agrees in ((1.005, True), (1.05, False)):
        ran = {REFERENCE: {"output": ours}, "torch": {"output": ours * factor}}
        vars(judged_case)["ran"] = ran
        found.known[found.id] = judged_case, unjudged
        if agrees:
            found.compare(REFERENCE, "torch")
        else:
            with pytest.raises(AssertionError, match="output: reference and torch differ by more than"):
                found.compare(REFERENCE, "torch")
