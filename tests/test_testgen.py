"""Writing reference tests: what is written, what is left alone, what is refused."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest
from definitions import rmsnorm, write
from testgen_support import NOTHING_KNOWN, contents, dataset, everything

from traceproof.dataset.definition import Definition
from traceproof.dataset.reference_text import assigned
from traceproof.errors import TraceproofError
from traceproof.testgen.generate import PLACE, Divergences, GenerateOptions, generate
from traceproof.testgen.texts import NAME, class_names, classes, state, support_files

__all__ = ["dataset"]


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


def test_names_that_would_share_a_class_get_two() -> None:
    assert class_names(["a_b", "aB", "c"]) == {"a_b": "Test_a_b", "aB": "Test_aB", "c": "TestC"}


def test_the_support_package_needs_nothing_but_torch_pytest_safetensors_and_pydantic() -> None:
    for path, text in support_files().items():
        top = [node for node in ast.parse(text).body if isinstance(node, ast.Import | ast.ImportFrom)]
        for absent in ("numpy", "yaml", "rich", "typer", "traceproof"):
            assert not [node for node in top if absent in ast.unparse(node).split()[1]], path
        assert "import traceproof" not in text
        assert "from traceproof" not in text


def test_written_files_are_formatted(dataset: Path) -> None:
    everything(dataset)
    ruff = Path(sys.executable).with_name("ruff")
    if not ruff.exists():
        pytest.skip("package_absent: ruff is not installed here")
    command = [str(ruff), "format", "--check", "--isolated", "--line-length", "115", str(dataset / PLACE)]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
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
