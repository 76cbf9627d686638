"""Reading a dataset: its folder, what a user names in it, and records of workloads, traces and solutions."""

from __future__ import annotations

import json
import re
import shutil
from itertools import product
from pathlib import Path
from typing import Any, get_args

import pytest
from pydantic import ValidationError
from repository import own_dataset

from traceproof.dataset import tree as tree_module
from traceproof.dataset.records import EvaluationStatus, Solution, Trace, Workload
from traceproof.dataset.tree import DatasetTree, Selected, Workloads, find, is_dataset, read_tree, selected_by
from traceproof.errors import TraceproofError

REFERENCE = "import torch\n\ndef run(x):\n    return x * 2\n"
LINE: dict[str, Any] = {
    "definition": "twice_h8",
    "solution": None,
    "workload": {"uuid": "1", "axes": {"rows": 2}, "inputs": {"x": {"type": "random"}}},
    "evaluation": None,
}


def definition(name: str = "twice_h8", **changes: object) -> dict[str, Any]:
    return {
        "name": name,
        "op_type": "twice",
        "axes": {"rows": {"type": "var"}, "width": {"type": "const", "value": 8}},
        "inputs": {"x": {"shape": ["rows", "width"], "dtype": "float32"}},
        "outputs": {"y": {"shape": ["rows", "width"], "dtype": "float32"}},
        "reference": REFERENCE,
        **changes,
    }


def put(root: Path, value: object, path: str = "definitions/twice/twice_h8.json") -> Path:
    file = root / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(value if isinstance(value, str) else json.dumps(value), encoding="utf-8")
    return file


def put_lines(root: Path, *lines: object) -> None:
    text = "\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines)
    put(root, text, "workloads/twice/twice_h8.jsonl")


def only_broken(tree: DatasetTree) -> str:
    assert list(tree.definitions) == ["twice_h8"]
    (broken,) = tree.broken
    return broken.message


def test_a_changed_copy_of_a_definition_has_a_digest_of_its_own(tmp_path: Path) -> None:
    put(tmp_path, definition())
    entry = read_tree(tmp_path).definitions["twice_h8"]
    first = entry.definition
    assert (entry.path, entry.definition.digest) == (Path("definitions/twice/twice_h8.json"), first.digest)
    asked = first.digest, first.const_axes
    renamed = first.model_copy(update={"name": "other"})
    assert renamed.digest != first.digest
    assert renamed.model_copy(update={"name": first.name}).digest == first.digest
    assert (first.digest, renamed.const_axes) == asked


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "not JSON: Expecting property name enclosed in double quotes at line 1 column 2"),
        ('{"name": "a", "name": "b"}', "the keys ['name'] more than once"),
        ("[" * 100_000, "nested too deeply"),
        (json.dumps(definition("a", axes={})), "inputs.x.shape names ['rows', 'width']"),
        (json.dumps(definition("a", reference="def run(:")), "reference is not Python"),
        (json.dumps(definition("a", reference="def go(): pass")), "no top-level function named run"),
        (json.dumps(definition("a", reference="\x00")), "null bytes"),
        (json.dumps(definition("a", op_type="\ud800")), "op_type"),
        ('{"name": "\udcff"}', "not UTF-8: byte 10 (invalid start byte); save it as UTF-8"),
    ],
)
def test_a_file_that_can_not_be_used_costs_that_file_alone(tmp_path: Path, text: str, says: str) -> None:
    put(tmp_path, definition(reference='def run(x):\n    "an odd escape \\d is no warning"\n    return x\n'))
    put(tmp_path, "", "definitions/twice/bad.json").write_bytes(text.encode(errors="surrogateescape"))
    message = only_broken(read_tree(tmp_path))
    assert message.startswith("definitions/twice/bad.json: ")
    assert says in message
    assert message.endswith(("; mend the file by definition.md's schema, or remove it", "; save it as UTF-8"))


def test_of_two_files_with_one_name_the_first_counts(tmp_path: Path) -> None:
    put(tmp_path, definition())
    put(tmp_path, definition(), "definitions/twice/zzz.json")
    message = only_broken(read_tree(tmp_path))
    assert "definitions/twice/zzz.json: the name 'twice_h8' is already taken by" in message
    assert "definitions/twice/twice_h8.json" in message


@pytest.mark.parametrize("path", ["definitions/twice/other.json", "definitions/thrice/twice_h8.json"])
def test_a_path_that_disagrees_with_name_or_op_type_is_noted(tmp_path: Path, path: str) -> None:
    put(tmp_path, definition(), path)
    (note,) = read_tree(tmp_path).notes
    assert note.path == Path(path)
    assert "definitions/twice/twice_h8.json" in note.message


def test_a_folder_that_is_no_dataset_says_where_it_looked_and_which_one_to_give(tmp_path: Path) -> None:
    assert not is_dataset(tmp_path)
    with pytest.raises(TraceproofError, match=f"looked in {tmp_path / 'definitions'}: it does not exist"):
        read_tree(tmp_path)
    put(tmp_path, definition())
    assert is_dataset(tmp_path)
    for below in ("definitions", "definitions/twice"):
        with pytest.raises(TraceproofError, match=f"That may be {tmp_path}"):
            read_tree(tmp_path / below)


def test_a_bad_workload_line_costs_that_line_alone(tmp_path: Path) -> None:
    put(tmp_path, definition())
    assert read_tree(tmp_path).workloads("twice_h8") == Workloads((), ())
    result = LINE | {"solution": "s", "evaluation": {}}
    put_lines(tmp_path, LINE, "{", LINE | {"definition": "other"}, LINE | {"note": 1}, result, "", LINE)
    found = read_tree(tmp_path).workloads("twice_h8")
    assert [line.line for line in found.lines] == [1, 7]
    assert [broken.line for broken in found.broken] == [2, 3, 4, 5]
    assert found.broken[1].message.startswith("workloads/twice/twice_h8.jsonl:3: the line is for 'other'")
    (tmp_path / "workloads/twice/twice_h8.jsonl").write_bytes(b"\xff")
    (broken,) = read_tree(tmp_path).workloads("twice_h8").broken
    assert "not UTF-8" in broken.message


def test_a_missing_blob_is_known(tmp_path: Path) -> None:
    root = tmp_path / "set"
    put(root, definition())
    put(root, "bytes", "blob/here.safetensors")
    put(root, "bytes", "../outside.safetensors")
    put(root, "version https://git-lfs.github.com/spec/v1\n", "blob/pointer.safetensors")
    missing = (
        "./blob/away.safetensors",
        "./blob/pointer.safetensors",
        "./blob",
        "../outside.safetensors",
        "https://example.invalid/x.safetensors",
    )
    sources = {
        f"x{at}": {"type": "safetensors", "path": blob, "tensor_key": "x"}
        for at, blob in enumerate(("./blob/here.safetensors", *missing))
    }
    put_lines(root, LINE | {"workload": LINE["workload"] | {"inputs": sources}})
    (line,) = read_tree(root).workloads("twice_h8").lines
    assert line.missing == missing


NORM, GEMM = "rmsnorm_h96", "gemm_n96_k160"


@pytest.fixture
def dataset(tmp_path: Path) -> Path:
    return own_dataset(tmp_path / "mine", f"rmsnorm/{NORM}", f"gemm/{GEMM}")


def select(dataset: Path, *words: str, given: Path | None = None) -> Selected:
    return selected_by([word.replace("{}", str(dataset)) for word in words], lambda: dataset, given)


def break_schema(dataset: Path) -> Path:
    """What the tutorial's third step does: a shape names an axis that there is none of."""
    file = dataset / "definitions" / "rmsnorm" / f"{NORM}.json"
    file.write_text(file.read_text().replace("hidden_size", "hidden_size + 1"))
    return file


@pytest.mark.parametrize(
    ("words", "op_types", "definitions"),
    [
        (["rmsnorm"], ["rmsnorm"], []),
        ([NORM], [], [NORM]),
        (["rmsnorm", "gemm"], ["rmsnorm", "gemm"], []),
        ([NORM, "gemm"], [], [NORM, GEMM]),
        ([f"{{}}/definitions/rmsnorm/{NORM}.json"], [], [NORM]),
        (["{}/definitions/rmsnorm"], ["rmsnorm"], []),
        (["{}/definitions"], [], []),
        (["{}"], [], []),
        (["{}", NORM], [], []),
    ],
)
def test_words_select_op_types_definitions_files_and_folders(
    dataset: Path, words: list[str], op_types: list[str], definitions: list[str]
) -> None:
    root = dataset if any("{}" in word for word in words) else None
    assert select(dataset, *words) == Selected(root=root, op_types=tuple(op_types), definitions=tuple(definitions))


def test_a_file_of_its_own_is_a_dataset_of_one(dataset: Path, tmp_path: Path) -> None:
    alone = tmp_path / "alone" / "new.json"
    alone.parent.mkdir()
    shutil.copy(dataset / "definitions" / "gemm" / f"{GEMM}.json", alone)
    assert select(dataset, str(alone)) == Selected(root=alone.parent, definitions=(GEMM,))
    alone.write_text('{"name": "gemm_n1')
    with pytest.raises(TraceproofError, match=r"new\.json: not JSON"):
        select(dataset, str(alone))


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["rmsnrom"], "'rmsnrom' is not in the dataset; close to it: rmsnorm_h96"),
        (["gem"], "op_types there: gemm, rmsnorm"),
        (["{}/nowhere.json"], "there is no file or folder"),
        (["{}/nowhere"], "there is no file or folder"),
    ],
)
def test_a_word_that_is_nothing_says_what_is_close(dataset: Path, words: list[str], told: str) -> None:
    with pytest.raises(TraceproofError, match=re.escape(told)):
        select(dataset, *words)


def test_paths_of_two_datasets_are_refused(dataset: Path, tmp_path: Path) -> None:
    other = own_dataset(tmp_path / "other", f"gemm/{GEMM}")
    with pytest.raises(TraceproofError, match="several datasets"):
        select(dataset, "{}", str(other))
    with pytest.raises(TraceproofError, match="several datasets"):
        select(dataset, "{}", given=other)


def test_a_file_that_is_not_the_one_that_counts_is_not_verified_in_its_place(dataset: Path) -> None:
    copy = dataset / "definitions" / "rmsnorm" / "z.json"
    shutil.copy(dataset / "definitions" / "rmsnorm" / f"{NORM}.json", copy)
    with pytest.raises(TraceproofError, match=f"so does .*{NORM}.json, which is the one that counts"):
        select(dataset, str(copy))
    file = dataset / "mine.json"
    text = (dataset / "definitions" / "gemm" / f"{GEMM}.json").read_text()
    file.write_text(text.replace(GEMM, "gemm_n1_k1"))
    with pytest.raises(TraceproofError, match="is not among the definitions of the dataset"):
        select(dataset, str(file))


@pytest.mark.parametrize("word", [NORM, "{file}", "rmsnorm gemm_n96_k160"])
@pytest.mark.parametrize("how", ["schema", "truncated"])
def test_a_file_that_can_not_be_used_says_what_is_wrong_with_it(dataset: Path, word: str, how: str) -> None:
    file = break_schema(dataset)
    told = "hidden_size + 1"
    if how == "truncated":
        file.write_text(file.read_text()[:300])
        told = "not JSON: "
    with pytest.raises(TraceproofError) as caught:
        select(dataset, *word.replace("{file}", str(file)).split())
    assert told in str(caught.value)
    assert "rmsnorm_h96.json" in str(caught.value)
    assert "close to it" not in str(caught.value)


def test_a_broken_file_is_found_by_the_name_that_it_says(dataset: Path) -> None:
    file = break_schema(dataset)
    file.rename(file.with_name("other.json"))
    with pytest.raises(TraceproofError, match=r"definitions/rmsnorm/other.json: .*hidden_size"):
        find(read_tree(dataset), NORM)


def test_of_a_dataset_only_files_that_hold_a_name_are_read(dataset: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []
    plain = tree_module.read_definition

    def noted(path: Path, *, root: Path | None = None) -> Any:  # noqa: ANN401 - of its dialects
        read.append(path.name)
        return plain(path, root=root)

    monkeypatch.setattr(tree_module, "read_definition", noted)
    whole = read_tree(dataset)
    read.clear()
    assert find(read_tree(dataset, naming=[NORM]), NORM) == whole.definitions[NORM]
    assert read == [f"{NORM}.json"]
    first = dataset / "definitions" / "a.json"  # of one name, the first by path counts, whatever it is called
    first.write_text((dataset / "definitions" / "rmsnorm" / f"{NORM}.json").read_text())
    assert find(read_tree(dataset, naming=[NORM]), NORM).path == Path("definitions/a.json")
    with pytest.raises(TraceproofError, match=f"close to it: {NORM}"):  # which the whole dataset is read for
        find(read_tree(dataset, naming=[f"{NORM}x"]), f"{NORM}x")


def test_a_name_that_is_an_op_type_too_has_to_be_told_apart(dataset: Path) -> None:
    file = dataset / "definitions" / "gemm" / f"{GEMM}.json"
    value = json.loads(file.read_text())
    (dataset / "definitions" / "gemm" / "rmsnorm.json").write_text(json.dumps(value | {"name": "rmsnorm"}))
    with pytest.raises(TraceproofError, match="--op-type rmsnorm or --definition-name rmsnorm"):
        select(dataset, "rmsnorm")


WORKLOAD: dict[str, Any] = {
    "uuid": "w-1",
    "axes": {"batch_size": 3, "num_pages": 0},
    "inputs": {
        "q": {"type": "random"},
        "indptr": {"type": "safetensors", "path": "./blob/a.safetensors", "tensor_key": "indptr"},
        "indices": {"type": "safetensors", "path": "./blob/a.safetensors", "tensor_key": "indices"},
        "sm_scale": {"type": "scalar", "value": 0.08838834764831843},
        "count": {"type": "scalar", "value": 2},
        "whole": {"type": "scalar", "value": 2.0},
        "flag": {"type": "scalar", "value": True},
    },
}
EVALUATION: dict[str, Any] = {
    "status": "PASSED",
    "log": "",
    "correctness": {"max_relative_error": 0, "max_absolute_error": 1e-5, "extra": {"hit": [1, None]}},
    "performance": {"latency_ms": 0.1, "reference_latency_ms": 2, "speedup_factor": 20.0},
    "environment": {"hardware": "a GPU", "libs": {"torch": "2"}},
    "timestamp": "2026-01-01T00:00:00Z",
}
SOLUTION: dict[str, Any] = {
    "name": "mine",
    "definition": "rmsnorm_h8",
    "author": "somebody",
    "spec": {"language": "python", "target_hardware": ["cpu"], "entry_point": "main.py::run"},
    "sources": [{"path": "main.py", "content": "def run(x):\n    return x\n"}],
}


def trace(**changes: object) -> dict[str, Any]:
    return {"definition": "d", "solution": None, "workload": WORKLOAD, "evaluation": None, **changes}


def written(value: object) -> str:
    """JSON text: tells 2 from 2.0 and keeps the order of keys out of it."""
    return json.dumps(value, sort_keys=True)


def test_a_workload_line_is_written_as_it_was_read() -> None:
    short = {"definition": "d", "workload": WORKLOAD}  # null and absent stay apart
    for line in (trace(), short):
        assert written(Trace.model_validate(line).as_json()) == written(line)
    workload = Workload.model_validate(WORKLOAD)
    assert list(workload.inputs) == list(WORKLOAD["inputs"])
    assert workload.blobs == ("./blob/a.safetensors",)


def test_correctness_and_performance_are_there_exactly_where_the_status_has_them() -> None:
    with_both = {"PASSED": (True, True), "INCORRECT_NUMERICAL": (True, False)}
    each = (False, True)
    for status, has_correctness, has_performance in product(get_args(EvaluationStatus), each, each):
        figures = {
            "correctness": EVALUATION["correctness"] if has_correctness else None,
            "performance": EVALUATION["performance"] if has_performance else None,
        }
        line = trace(solution="s", evaluation=EVALUATION | {"status": status} | figures)
        if (has_correctness, has_performance) == with_both.get(status, (False, False)):
            assert written(Trace.model_validate(line).as_json()) == written(line)
        else:
            with pytest.raises(ValidationError, match=f"status {status}"):
                Trace.model_validate(line)


@pytest.mark.parametrize("figure", ["NaN", "Infinity", 0, 0.5])
def test_error_figures_keep_their_spelling(figure: object) -> None:
    correctness = {"max_relative_error": figure, "max_absolute_error": figure}
    line = trace(solution="s", evaluation=EVALUATION | {"correctness": correctness})
    assert written(Trace.model_validate(line).as_json()) == written(line)


@pytest.mark.parametrize(
    "line",
    [
        trace(more=1),
        trace(solution="s"),
        trace(evaluation=EVALUATION),
        trace(workload=WORKLOAD | {"tolerance": 1e-3}),
        trace(workload=WORKLOAD | {"axes": {"M": -1}}),
        trace(workload=WORKLOAD | {"axes": {"M": 1.0}}),
        trace(workload=WORKLOAD | {"axes": {"M": True}}),
        trace(workload=WORKLOAD | {"uuid": ""}),
        trace(workload=WORKLOAD | {"inputs": {"q": {"type": "zeros"}}}),
        trace(workload=WORKLOAD | {"inputs": {"q": {}}}),
        trace(workload=WORKLOAD | {"inputs": {"q": {"type": "scalar", "value": "1"}}}),
        trace(workload=WORKLOAD | {"inputs": {"q": {"type": "safetensors", "path": "x"}}}),
        trace(solution="s", evaluation=EVALUATION | {"status": "FINE"}),
        trace(solution="s", evaluation=EVALUATION | {"correctness": {"max_absolute_error": -1.0}}),
        trace(solution="s", evaluation=EVALUATION | {"correctness": {"max_absolute_error": "much"}}),
        trace(solution="s", evaluation=EVALUATION | {"performance": {"latency_ms": -1.0}}),
    ],
)
def test_a_trace_outside_the_schema_is_refused(line: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        Trace.model_validate(line)


def test_a_solution_is_written_as_it_was_read() -> None:
    full = SOLUTION | {"description": None}
    full["spec"] = SOLUTION["spec"] | {
        "dependencies": ["torch"],
        "binding": "torch",
        "destination_passing_style": False,
    }
    theirs = SOLUTION | {"name": "fast norm, v2", "author": "Ada Lovelace (team 3)"}  # any text is a name there
    for solution in (SOLUTION, full, theirs):
        read = Solution.model_validate(solution)
        assert written(read.as_json()) == written(solution)
        assert read.entry_file == "main.py"


@pytest.mark.parametrize(
    "change",
    [
        {"sources": []},
        {"sources": [*SOLUTION["sources"], {"path": "/other.py", "content": "x"}]},
        {"sources": [*SOLUTION["sources"], {"path": "../other.py", "content": "x"}]},
        {"sources": SOLUTION["sources"] * 2},
        {"sources": [{"path": "other.py", "content": "x"}]},
        {"spec": SOLUTION["spec"] | {"language": "Triton"}},
        {"spec": SOLUTION["spec"] | {"target_hardware": []}},
        {"spec": SOLUTION["spec"] | {"entry_point": "main.py"}},
        {"licence": "MIT"},
    ],
)
def test_a_solution_outside_the_schema_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        Solution.model_validate(SOLUTION | change)


def test_what_is_written_passes_the_model_of_flashinfer_bench() -> None:
    theirs = pytest.importorskip("flashinfer_bench.data", reason="package_absent: flashinfer-bench")
    for line in (trace(), trace(solution="s", evaluation=EVALUATION)):
        assert theirs.Trace.model_validate_json(json.dumps(Trace.model_validate(line).as_json())).definition == "d"
    solution = Solution.model_validate(SOLUTION).as_json()
    assert theirs.Solution.model_validate_json(json.dumps(solution)).name == "mine"
