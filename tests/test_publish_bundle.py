"""What earns a tag, what a bundle holds, what the checker refuses, a baseline, and the dataset's card."""

from __future__ import annotations

import ast
import builtins
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from definitions import GOOD, rmsnorm
from publish_support import CASES, IMPLEMENTATIONS, bundles, dataset, finished, path_of, row, with_piece
from ruamel.yaml import YAML

from traceproof.dataset.definition import Definition
from traceproof.dataset.fetch import Dataset
from traceproof.dataset.tree import read_definition, read_tree
from traceproof.errors import TraceproofError
from traceproof.ops import lookup, registry
from traceproof.programs import without_secrets
from traceproof.publish.bundle import TABLE, Folder, Piece, card
from traceproof.publish.change import joined, resolve
from traceproof.publish.check import problems
from traceproof.publish.ledger import DATES, Ledger, keep, tagged
from traceproof.publish.parts import write_parts
from traceproof.publish.prepare import Prepared, Source, dry_run, origin_of, prepare, prepare_card, write_ledger
from traceproof.run.case import make_inputs
from traceproof.run.implementation import Implementation
from traceproof.stacks import FIRST_TRUTHS
from traceproof.testgen.calls import solution
from traceproof.testgen.texts import is_random
from traceproof.text import markdown

OURS = sorted((Path(__file__).parent / "dataset" / "definitions").rglob("*.json"))


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Source:
    folder = tmp_path_factory.mktemp("publish")
    root = dataset(folder / "dataset", "alpha", "beta")
    digests = {name: entry.digest for name, entry in read_tree(root).definitions.items()}
    rows = [
        row(name, digests[name], case, implementation)
        for name in digests
        for case in CASES
        for implementation in IMPLEMENTATIONS
    ]
    return finished(folder / "run", root, rows)


@pytest.fixture(scope="module")
def prepared(source: Source) -> Prepared:
    return prepare(source, definitions=["alpha"], op_types=[], per="definition")[0]


def test_the_dry_run_lists_every_file_with_its_digest(prepared: Prepared, tmp_path: Path) -> None:
    listed = dry_run(prepared, tmp_path, allow_changes=False)
    assert {file["path"].split("/")[0] for file in listed["files"]} == {"blob", "solutions", "workloads"}
    assert listed["unchanged"] == ["definitions/rmsnorm/alpha.json"]
    text = (tmp_path / "definition-alpha" / "description.md").read_text()
    assert "| `alpha` | reference | passed | 2 | 2 | output: baseline 0.25 |" in text
    assert "NVIDIA TEST" in text
    assert "made for tests" in text


@pytest.mark.parametrize(
    ("origin", "words"),
    [
        ({"pypi": {"package": "a-bench", "version": "0.1.2", "sha256": "0" * 64, "folder": "b"}}, "a-bench 0.1.2"),
        ({"git": {"url": "https://example.org/a", "commit": "1" * 40}}, f"https://example.org/a {'1' * 40}"),
        ({"path": "/some/folder"}, "a local folder"),
    ],
)
def test_a_datasets_origin_is_told_in_words(origin: dict[str, Any], words: str) -> None:
    assert markdown(origin_of(Dataset.model_validate(origin))) == words


def test_what_is_not_verified_is_not_published(source: Source, tmp_path: Path) -> None:
    root = dataset(tmp_path / "dataset", "alpha", "gamma")
    bare = finished(tmp_path / "run", root, [])
    with pytest.raises(TraceproofError, match="nothing is verified"):
        prepare(bare, definitions=[], op_types=[], per="definition")
    with pytest.raises(TraceproofError, match="gamma is not verified: it was not run"):
        prepare(bare, definitions=["gamma"], op_types=[], per="definition")
    with pytest.raises(TraceproofError, match="definition 'delta'"):
        prepare(source, definitions=["delta"], op_types=[], per="definition")


def found(prepared: Prepared, root: Path) -> list[str]:
    base = Folder(root)
    return problems(prepared.bundle, resolve(prepared.bundle, base, allow_changes=False), base)


def edited(start: str, change: Callable[[bytes], bytes]) -> Callable[[Prepared], Prepared]:
    def apply(prepared: Prepared) -> Prepared:
        path = path_of(prepared, start)
        old = next(piece.data for piece in prepared.bundle.pieces if piece.path == path)
        return with_piece(prepared, path, change(old))

    return apply


def added(path: str, data: bytes) -> Callable[[Prepared], Prepared]:
    return lambda prepared: with_piece(prepared, path, data)


def solved(**changes: Any) -> Callable[[bytes], bytes]:  # noqa: ANN401 - JSON
    return lambda data: json.dumps(json.loads(data) | changes).encode()


def trace(data: bytes, status: str = "PASSED", solution: str = "torch_wrapper_alpha") -> bytes:
    line = json.loads(data.splitlines()[0])
    evaluation: dict[str, Any] = {
        "status": status,
        "log": "",
        "environment": {"hardware": "H"},
        "timestamp": "now",
    }
    if status == "PASSED":
        evaluation |= {"correctness": {}, "performance": {"latency_ms": 1.0}}
    return json.dumps(line | {"solution": solution, "evaluation": evaluation}).encode() + b"\n"


def traced(**changes: str) -> Callable[[Prepared], Prepared]:
    def apply(prepared: Prepared) -> Prepared:
        path = path_of(prepared, "workloads/")
        old = next(piece.data for piece in prepared.bundle.pieces if piece.path == path)
        return with_piece(prepared, "traces/baseline/rmsnorm/alpha.jsonl", trace(old, **changes))

    return apply


COPY = [{"path": "main.py", "content": GOOD}]


OTHER = [{"path": "main.py", "content": "def run(x, weight):\n    return x\n"}]


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (added("README.md", b"hi"), "outside the dataset's layout"),
        (added("blob/../x/y", b"hi"), "not a plain relative path"),
        (added("definitions/rmsnorm/beta2.json", json.dumps(rmsnorm("beta2")).encode()), "not what the bundle"),
        (edited("definitions/", lambda data: data.replace(b"status:verified", b"status:draft")), "would change"),
        (edited("solutions/", solved(definition="beta")), "is for 'beta'"),
        (edited("solutions/", solved(name="another")), "author, definition and name say"),
        (edited("solutions/", solved(sources=COPY)), "copy of the reference"),
        (edited("solutions/", solved(sources=OTHER)), "run takes ['x', 'weight']"),
        (edited("solutions/", solved(extra=1)), "does not fit the schema"),
        (edited("workloads/", lambda data: data + b'{"definition": "alpha"}'), "schema"),
        (edited("workloads/", lambda data: data.replace(b"batch_size", b"batch")), "axes are ['batch']"),
        (edited("workloads/", lambda data: data.replace(b".safetensors", b".gone")), "neither in the bundle nor"),
        (edited("workloads/", lambda data: data.replace(b'"batch_size":1', b'"batch_size":9')), "definition says"),
        (edited("blob/", lambda data: data[:-1]), "cut short"),
        (
            added("blob/workloads/rmsnorm/alpha/orphan.safetensors", b"\2\0\0\0\0\0\0\0{}"),
            "no workload line names",
        ),
        (added("blob/workloads/rmsnorm/beta/x.safetensors", b"\2\0\0\0\0\0\0\0{}"), "belongs to no definition"),
        (added("tests/references/test_gemm.py", b"assert True\n"), "no test of the bundle's definitions"),
        (added("tests/references/test_alpha.py", b"X = 'hf_" + b"a" * 30 + b"'\n"), "like a secret"),
        (traced(status="RUNTIME_ERROR"), "only PASSED traces"),
        (traced(solution="somebody"), "solution 'somebody' is not in the bundle"),
    ],
)
def test_the_checker_refuses(
    prepared: Prepared, source: Source, change: Callable[[Prepared], Prepared], problem: str
) -> None:
    told = found(change(prepared), source.dataset)
    assert any(problem in line for line in told), told


def test_the_checker_accepts_what_is_right(prepared: Prepared, source: Source) -> None:
    assert found(prepared, source.dataset) == []
    assert found(traced()(prepared), source.dataset) == []


def test_a_taken_name_is_a_conflict(prepared: Prepared, source: Source, tmp_path: Path) -> None:
    root = dataset(tmp_path, "alpha")
    other = root / "solutions" / "somebody" / "rmsnorm" / "alpha" / "torch_wrapper_alpha.json"
    other.parent.mkdir(parents=True)
    other.write_text("{}")
    assert any("its name is taken by solutions/somebody" in line for line in found(prepared, root))
    assert not any("taken" in line for line in found(prepared, source.dataset))


def test_an_existing_definition_changes_only_when_allowed_and_says_how(prepared: Prepared, tmp_path: Path) -> None:
    root = dataset(tmp_path, "alpha")
    path = root / "definitions" / "rmsnorm" / "alpha.json"
    value = json.loads(path.read_text())
    value["axes"]["hidden_size"]["value"] = 64
    value["tags"] = ["status:unverified"]
    path.write_text(json.dumps(value))
    refused = resolve(prepared.bundle, Folder(root), allow_changes=False)
    assert any("axes.hidden_size.value: 64 -> 32" in line for line in refused.problems)
    allowed = resolve(prepared.bundle, Folder(root), allow_changes=True)
    assert allowed.problems == []
    text = prepared.describe(allowed)
    assert "axes.hidden_size.value: 64 -> 32" in text
    assert 'tags gains "status:verified"' in text


def test_formatting_alone_is_no_change(prepared: Prepared, tmp_path: Path) -> None:
    root = dataset(tmp_path, "alpha")
    path = root / "definitions" / "rmsnorm" / "alpha.json"
    path.write_text(json.dumps(json.loads(path.read_text()), indent=4))
    assert "definitions/rmsnorm/alpha.json" in resolve(prepared.bundle, Folder(root), allow_changes=False).same


def test_lines_of_the_base_stay_and_come_once() -> None:
    old = b'{"workload": {"uuid": "a"}, "solution": null}'
    new = old.replace(b'": ', b'":') + b"\n" + old.replace(b'"a"', b'"b"')
    both = joined(old, new)
    assert both.startswith(old + b"\n")
    assert both.count(b"\n") == 2
    assert joined(both, new) == both


DEEP = b"[" * 100_000


@pytest.mark.parametrize("start", ["definitions/", "solutions/", "workloads/"])
def test_lists_in_lists_in_lists_are_a_conflict_or_a_problem(
    prepared: Prepared, source: Source, tmp_path: Path, start: str
) -> None:
    root = tmp_path / "dataset"
    shutil.copytree(source.dataset, root)
    path = root / path_of(prepared, start)
    path.parent.mkdir(parents=True, exist_ok=True)
    for data in (DEEP, b"[" * 900 + b"]" * 900 + b"\n"):
        path.write_bytes(data)
        told = found(prepared, root)
        assert any(start in line and ("exists and would change" in line or "schema" in line) for line in told), (
            told
        )


def test_inputs_that_are_no_plain_normals_are_stored() -> None:
    generator = torch.Generator().manual_seed(0)
    normal = torch.randn(4096, generator=generator)
    assert is_random(normal)
    for other in (
        normal.abs(),
        normal * 2,
        normal[:8],
        normal.sign(),
        torch.rand(4096) * 3.46 - 1.73,
        normal.int(),
    ):
        assert not is_random(other)


def undefined(tree: ast.AST) -> set[str]:
    """Names that a file uses and nothing in it gives."""
    given, used = set(dir(builtins)), set()
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name, ctx=ast.Load()):
                used.add(name)
            case ast.Name(id=name) | ast.arg(arg=name) | ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                given.add(name)
            case ast.ExceptHandler(name=str(name)):
                given.add(name)
            case ast.alias(name=name, asname=alias):
                given.add(alias or name.partition(".")[0])
    return used - given


@pytest.mark.parametrize("path", OURS, ids=lambda path: path.stem)
def test_a_baseline_stands_alone_and_does_what_its_adapter_does(path: Path) -> None:
    torch.set_num_threads(1)
    definition = read_definition(path).definition
    op, _ = registry.for_definition(definition)
    for truth in FIRST_TRUTHS:
        if lookup.adapter(truth, definition) is None:
            continue
        text = solution(definition, truth, "1").sources[0].content
        assert "traceproof" not in text
        assert not undefined(ast.parse(text))
        code = compile(text, truth, "exec")
        if truth != "torch":
            continue
        module: dict[str, Any] = {}
        exec(code, module)  # noqa: S102 - what was just emitted
        implementation = Implementation(truth)
        assert implementation.unavailable(definition) is None
        for case in list(op.cases(definition, sizes=("small",), seed=0))[:3]:
            inputs = make_inputs(op, definition, case, device=torch.device("cpu"))
            expected = implementation.run(definition, dict(inputs))
            given = module["run"](**inputs)
            given = given if isinstance(given, tuple) else (given,)
            for name, value in zip(definition.outputs, given, strict=True):
                assert torch.equal(value, expected[name])


def test_programs_beside_the_pusher_see_no_secrets() -> None:
    kept = without_secrets({"HF_TOKEN": "x", "MY_api_key": "x", "AWS_SECRET_ACCESS": "x", "PATH": "/bin"})
    assert kept == {"PATH": "/bin"}


def test_a_case_whose_right_answer_is_infinite_is_no_workload(source: Source, tmp_path: Path) -> None:
    ledger = write_ledger(source, read_tree(source.dataset))
    reference = ledger.records["alpha"]["reference"]
    ledger.records["alpha"]["reference"] = replace(reference, infinite=("small-1",))
    ledger.write(tmp_path / "ledger.jsonl")
    write_parts(
        source.run / "cases" / "rmsnorm.json", tmp_path / "ledger.jsonl", tmp_path / "parts", only={"alpha"}
    )
    notes = json.loads((tmp_path / "parts" / "alpha" / "parts.json").read_text())
    assert notes["workloads"] == 1
    assert "infinities" in notes["left_out"]["small-1"]


def test_flashinfer_bench_finds_what_a_bundle_brings(prepared: Prepared, source: Source, tmp_path: Path) -> None:
    theirs = pytest.importorskip("flashinfer_bench.data", reason="package_absent: flashinfer-bench")
    whole = traced()(prepared)
    root = tmp_path / "published"
    shutil.copytree(source.dataset, root)
    change = resolve(whole.bundle, Folder(source.dataset), allow_changes=False)
    for path, data in change.files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_bytes(data)
    found = theirs.TraceSet.from_path(str(root))
    assert "alpha" in found.definitions
    (solution,) = found.solutions["alpha"]
    assert [item.solution for item in found.traces["alpha"]] == [solution.name]
    assert found.workloads["alpha"]
    # `validate` looks for the traces of each solution under its author.
    assert (root / "traces" / solution.author / "rmsnorm" / "alpha.jsonl").is_file()


def test_measured_traces_are_published_under_the_author_of_the_solution(source: Source, tmp_path: Path) -> None:
    made = bundles(source, "alpha")[0]
    lines = next(piece.data for piece in made.bundle.pieces if piece.path.startswith("workloads/"))
    measured = tmp_path / "measured" / "traces" / "rmsnorm" / "alpha.jsonl"  # as the benchmark leaves them
    measured.parent.mkdir(parents=True)
    measured.write_bytes(trace(lines) + trace(lines, solution="somebody"))
    again = bundles(replace(source, extra=(tmp_path / "measured",)), "alpha")
    (piece,) = [item for item in again[0].bundle.pieces if item.path.startswith("traces/")]
    assert piece.path == "traces/baseline/rmsnorm/alpha.jsonl"
    assert piece.data == trace(lines)
    assert found(again[0], source.dataset) == []


def ledger_of(tmp_path: Path, rows: list[dict[str, Any]]) -> Ledger:
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(item) + "\n" for item in rows))
    return keep([tmp_path / "rows.jsonl"], tmp_path / "ledger.jsonl", tmp_path, references={})


ALPHA = Definition.model_validate(rmsnorm("alpha"))


def rows_of(**changes: dict[str, Any]) -> list[dict[str, Any]]:
    return [
        row("alpha", ALPHA.digest, "small-0", implementation, **changes.get(implementation, {}))
        for implementation in IMPLEMENTATIONS
    ]


def test_a_reference_and_a_ground_truth_that_pass_earn_the_tag(tmp_path: Path) -> None:
    standing = ledger_of(tmp_path, rows_of()).standing(ALPHA)
    assert standing.truths == ("torch",)
    assert tagged(ALPHA, standing) == ("status:verified",)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"reference": {"verdict": "fail", "reason": "nan"}}, "its reference: fail nan in case small-0, output"),
        ({"reference": {"verdict": "skip", "reason": "no_oracle", "output": "*"}}, "nothing was compared"),
        ({"reference": {"tolerance": 0.1}}, "a tolerance of the user's own"),
        ({"torch": {"verdict": "fail", "reason": "numerics"}}, "torch: fail numerics"),
        ({"torch": {"verdict": "skip", "reason": "no_cuda", "output": "*"}}, "no_cuda 1"),
        ({"torch": {"case": "small-1", "digests": {"definition": "f" * 32, "inputs": ""}}}, "no ground truth"),
    ],
)
def test_anything_less_does_not(tmp_path: Path, changes: dict[str, dict[str, Any]], reason: str) -> None:
    standing = ledger_of(tmp_path, rows_of(**changes)).standing(ALPHA)
    assert reason in standing.reason
    assert tagged(ALPHA, standing) == ("status:unverified",)


def test_a_definition_whose_reference_changed_is_not_verified(tmp_path: Path) -> None:
    changed = Definition.model_validate(rmsnorm("alpha", GOOD.replace("1e-6", "1e-5")))
    assert "it changed" in ledger_of(tmp_path, rows_of()).standing(changed).reason


def test_a_record_keeps_its_date_and_reads_back(tmp_path: Path) -> None:
    first = ledger_of(tmp_path, rows_of())
    dates = json.loads((tmp_path / DATES).read_text())
    (tmp_path / DATES).write_text(json.dumps(dict.fromkeys(dates, "2020-02-02")))
    again = ledger_of(tmp_path, rows_of())
    assert again.records["alpha"]["torch"].date == "2020-02-02"
    assert Ledger.read(tmp_path / "ledger.jsonl").records == again.records
    assert first.records["alpha"]["torch"].digests == again.records["alpha"]["torch"].digests


def test_a_torn_ledger_says_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "ledger.jsonl").write_text('{"definition": "alpha"')
    with pytest.raises(TraceproofError, match="to write it anew"):
        Ledger.read(tmp_path / "ledger.jsonl")


README = "README.md"


@pytest.fixture
def untitled(tmp_path: Path) -> Source:
    """A run in which alpha is verified and beta is not, over a dataset that has workloads."""
    root = dataset(tmp_path / "dataset", "alpha", "beta")
    (root / "workloads" / "rmsnorm").mkdir(parents=True)
    (root / "workloads" / "rmsnorm" / "alpha.jsonl").write_text("{}\n")
    digests = {name: entry.digest for name, entry in read_tree(root).definitions.items()}
    rows = [
        row("alpha", digests["alpha"], case, implementation)
        for case in CASES
        for implementation in ("reference", "torch")
    ]
    return finished(tmp_path / "run", root, rows)


@pytest.fixture
def prepared_card(untitled: Source) -> Prepared:
    return prepare_card(untitled, write_ledger(untitled, read_tree(untitled.dataset)))


def test_the_viewer_is_told_of_what_the_dataset_holds(prepared_card: Prepared, tmp_path: Path) -> None:
    listed = dry_run(prepared_card, tmp_path / "out", allow_changes=False)
    assert [file["path"] for file in listed["files"]] == [README, TABLE]
    files = tmp_path / "out" / "card" / "files"
    told = YAML(typ="safe").load((files / README).read_text().split("---\n")[1])
    assert [config["config_name"] for config in told["configs"]] == ["definitions", "workloads"]
    rows = [json.loads(line) for line in (files / TABLE).read_text().splitlines()]
    assert [(found["name"], found["verified_by"]) for found in rows] == [("alpha", ["torch"])]
    assert "status:verified" in rows[0]["tags"]
    columns = {
        entry["config_name"]: [item["name"] for item in entry["features"]] for entry in told["dataset_info"]
    }
    assert columns["definitions"] == list(rows[0])


def test_another_card_stays_whatever_is_allowed(prepared_card: Prepared, untitled: Source, tmp_path: Path) -> None:
    (untitled.dataset / README).write_text("# Theirs\n")
    with pytest.raises(TraceproofError, match="cannot be published") as raised:
        dry_run(prepared_card, tmp_path / "out", allow_changes=True)
    assert f"{README} exists and would change" in raised.value.problems


def test_a_card_of_ours_follows_the_dataset(prepared_card: Prepared, untitled: Source) -> None:
    (untitled.dataset / README).write_bytes(card(["definitions"]))
    change = resolve(prepared_card.bundle, Folder(untitled.dataset), allow_changes=False)
    assert change.problems == []
    assert change.files[README] == card(["definitions", "workloads"])
    (untitled.dataset / README).write_bytes(change.files[README])
    assert resolve(prepared_card.bundle, Folder(untitled.dataset), allow_changes=False).same == [README]


@pytest.mark.parametrize(
    ("path", "data", "problem"),
    [
        (README, card(["definitions", "traces"]), "which the dataset lacks"),
        (TABLE, b'{"name": "gone", "op_type": "rmsnorm"}\n', "has a row for gone"),
        ("viewer/other.jsonl", b"{}\n", "outside the dataset's layout"),
    ],
)
def test_the_checker_refuses_a_card(
    prepared_card: Prepared, untitled: Source, path: str, data: bytes, problem: str
) -> None:
    pieces = {piece.path: piece for piece in prepared_card.bundle.pieces} | {path: Piece(path, data)}
    bundle = replace(prepared_card.bundle, pieces=tuple(pieces.values()))
    base = Folder(untitled.dataset)
    told = problems(bundle, resolve(bundle, base, allow_changes=False), base)
    assert [line for line in told if problem in line], told


def test_a_bundle_of_definitions_brings_no_card(untitled: Source) -> None:
    made = bundles(untitled, "alpha")[0]
    assert README not in {piece.path for piece in made.bundle.pieces}
