"""What earns a tag, what a pull request holds and what it may not change, and the baselines that it brings."""

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
from publish_support import IMPLEMENTATIONS, dataset, finished, path_of, pull_requests, row, run_of, with_file

from traceproof.dataset.definition import Definition
from traceproof.dataset.fetch import Dataset
from traceproof.dataset.tree import read_definition
from traceproof.errors import TraceproofError
from traceproof.ops import lookup, registry
from traceproof.publish.pull_request import (
    Folder,
    PullRequest,
    Source,
    base_of,
    checked,
    dry_run,
    joined,
    origin_of,
    prepare,
    resolve,
)
from traceproof.publish.solutions import write_solutions
from traceproof.publish.verified import Verification, implementation_verdicts, verification
from traceproof.run.case import make_inputs
from traceproof.run.schema import VerdictRow
from traceproof.run.trusted import Implementation
from traceproof.stacks import FIRST_TRUTHS
from traceproof.testgen.calls import solution
from traceproof.testgen.generate import headed
from traceproof.testgen.texts import is_random
from traceproof.text import markdown

OURS = sorted((Path(__file__).parent / "dataset" / "definitions").rglob("*.json"))


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Source:
    """A run in which alpha and beta are verified, gamma is not, and beta has a test file of its own."""
    source = run_of(tmp_path_factory.mktemp("publish"), "alpha", "beta", "gamma", verified=("alpha", "beta"))
    (source.dataset / "tests" / "references").mkdir(parents=True)
    (source.dataset / "tests" / "references" / "test_beta.py").write_text("assert True\n")
    return source


@pytest.fixture(scope="module")
def alpha(source: Source) -> PullRequest:
    return pull_requests(source, "alpha")[0]


def test_the_dry_run_lists_every_file_with_its_digest(alpha: PullRequest, source: Source, tmp_path: Path) -> None:
    listed = dry_run(alpha, base_of(source), tmp_path)
    assert listed["problems"] == []
    assert {file["path"].split("/")[0] for file in listed["files"]} == {"blob", "solutions", "tests", "workloads"}
    assert len(listed["files"]) <= 10
    assert listed["unchanged"] == ["definitions/rmsnorm/alpha.json"]
    text = (tmp_path / "definition-alpha" / "description.md").read_text()
    assert "| `alpha` | reference | passed | 2 | 2 | output: baseline 0.25 |" in text
    assert "| tiny | `alpha` | rmsnorm |  |  | verified by torch |" in text
    assert "NVIDIA TEST" in text
    assert "made for tests" in text


def test_a_definition_without_a_test_file_gets_one(alpha: PullRequest, source: Source) -> None:
    tests = [path for path in alpha.files if path.startswith("tests/")]
    assert tests == ["tests/references/conftest.py", "tests/references/test_alpha.py"]
    assert b'DEFINITION = "alpha"' in alpha.files["tests/references/test_alpha.py"]
    beta = pull_requests(source, "beta")[0]
    assert not [path for path in beta.files if path.startswith("tests/")]
    assert any("no generated test, the dataset has" in note for note in beta.notes)


@pytest.mark.parametrize(
    ("old", "changed", "kept"),
    [
        (headed("# of an earlier version\n"), True, False),
        (headed("# of an earlier version\n") + "# edited\n", False, True),
        ("assert True\n", False, True),
    ],
    ids=["ours", "edited", "another's"],
)
def test_a_test_that_is_there_is_replaced_where_nobody_wrote_in_it(
    alpha: PullRequest, tmp_path: Path, old: str, *, changed: bool, kept: bool
) -> None:
    path = "tests/references/test_alpha.py"
    (tmp_path / path).parent.mkdir(parents=True)
    (tmp_path / path).write_text(old)
    change = resolve(alpha.files, Folder(tmp_path), allow_changes=False)
    assert (path in change.files, path in change.kept) == (changed, kept)


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
    bare = finished(tmp_path / "run", source.dataset, [])
    with pytest.raises(TraceproofError, match="nothing is verified") as caught:
        prepare(bare, definitions=[], op_types=[], per="definition")
    assert "alpha: it was not run" in caught.value.problems
    with pytest.raises(TraceproofError, match="gamma is not verified: it was not run"):
        prepare(source, definitions=["gamma"], op_types=[], per="definition")
    with pytest.raises(TraceproofError, match="definition 'delta'"):
        prepare(source, definitions=["delta"], op_types=[], per="definition")


def test_a_definition_is_published_in_the_form_that_every_reader_takes(tmp_path: Path) -> None:
    source = run_of(tmp_path, "alpha", "dump")
    alpha, dump = (source.dataset / "definitions" / "rmsnorm" / f"{name}.json" for name in ("alpha", "dump"))
    alpha.write_text(json.dumps(json.loads(alpha.read_text()) | {"constraints": None}))
    dump.write_text(json.dumps(json.loads(dump.read_text()) | {"check": "def check(): pass"}))
    (made,) = pull_requests(source)
    assert list(made.definitions) == ["alpha"]
    assert b"constraints" not in made.files["definitions/rmsnorm/alpha.json"]
    with pytest.raises(TraceproofError, match="dump is not verified: it is a trace dump"):
        pull_requests(source, "dump")


def trace(data: bytes, status: str = "PASSED", solution: str = "torch_wrapper_alpha") -> bytes:
    line = json.loads(data.splitlines()[0])
    evaluation: dict[str, Any] = {"status": status, "log": "", "environment": {"hardware": "H"}}
    evaluation["timestamp"] = "now"
    if status == "PASSED":
        evaluation |= {"correctness": {}, "performance": {"latency_ms": 1.0}}
    return json.dumps(line | {"solution": solution, "evaluation": evaluation}).encode() + b"\n"


def traced(made: PullRequest, **changes: str) -> PullRequest:
    lines = made.files[path_of(made, "workloads/")]
    return with_file(made, "traces/baseline/rmsnorm/alpha.jsonl", trace(lines, **changes))


def edited(path: str, old: bytes, new: bytes) -> Callable[[PullRequest], PullRequest]:
    def apply(made: PullRequest) -> PullRequest:
        where = path_of(made, path)
        return with_file(made, where, made.files[where].replace(old, new))

    return apply


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (edited("definitions/", b"status:verified", b"status:draft"), "exists and would change"),
        (edited("tests/", b"import", b"# hf_" + b"a" * 30 + b"\nimport"), "like a secret"),
        (lambda made: traced(made, status="RUNTIME_ERROR"), "only PASSED traces"),
        (lambda made: edited("traces/", b'"uuid": "', b'"uuid": "0')(traced(made)), "is no line of"),
        (lambda made: edited("traces/", b'"log"', b'"blog"')(traced(made)), "does not fit the schema"),
    ],
)
def test_a_broken_rule(
    alpha: PullRequest, source: Source, change: Callable[[PullRequest], PullRequest], problem: str
) -> None:
    with pytest.raises(TraceproofError, match="cannot be published on top of") as caught:
        checked(change(alpha), base_of(source), allow_changes=False)
    assert any(problem in line for line in caught.value.problems), caught.value.problems


def test_what_is_right_is_accepted(alpha: PullRequest, source: Source) -> None:
    checked(alpha, base_of(source), allow_changes=False)
    checked(traced(alpha), base_of(source), allow_changes=False)


def test_traces_of_workloads_that_the_dataset_has_are_accepted(alpha: PullRequest, tmp_path: Path) -> None:
    path = path_of(alpha, "workloads/")
    (tmp_path / path).parent.mkdir(parents=True)
    (tmp_path / path).write_bytes(alpha.files[path])
    traces = {name: data for name, data in traced(alpha).files.items() if name.startswith("traces/")}
    assert resolve(traces, Folder(tmp_path), allow_changes=False).problems == []


def test_a_taken_name_is_a_conflict(alpha: PullRequest, tmp_path: Path) -> None:
    root = dataset(tmp_path, "alpha")
    other = root / "solutions" / "somebody" / "rmsnorm" / "alpha" / "torch_wrapper_alpha.json"
    other.parent.mkdir(parents=True)
    other.write_text("{}")
    found = resolve(alpha.files, Folder(root), allow_changes=True).problems
    assert any("its name is taken by solutions/somebody" in line for line in found)


def test_an_existing_definition_changes_only_when_allowed_and_says_how(alpha: PullRequest, tmp_path: Path) -> None:
    root = dataset(tmp_path, "alpha")
    path = root / "definitions" / "rmsnorm" / "alpha.json"
    value = json.loads(path.read_text())
    path.write_text(json.dumps(value, indent=4))
    assert "definitions/rmsnorm/alpha.json" in resolve(alpha.files, Folder(root), allow_changes=False).same
    value["axes"]["hidden_size"]["value"] = 64
    path.write_text(json.dumps(value))
    refused = resolve(alpha.files, Folder(root), allow_changes=False)
    assert any('would change: - "value": 64, + "value": 32' in line for line in refused.problems), refused.problems
    allowed = resolve(alpha.files, Folder(root), allow_changes=True)
    assert allowed.problems == []
    assert '    +      "value": 32' in alpha.describe(allowed).splitlines()


def test_lines_of_the_base_stay_and_come_once() -> None:
    old = b'{"workload": {"uuid": "a"}, "solution": null}'
    new = old.replace(b'": ', b'":') + b"\n" + old.replace(b'"a"', b'"b"')
    both = joined(old, new)
    assert both.startswith(old + b"\n")
    assert both.count(b"\n") == 2
    assert joined(both, new) == both


@pytest.mark.parametrize("start", ["definitions/", "solutions/", "workloads/"])
def test_lists_in_lists_are_no_traceback(alpha: PullRequest, source: Source, tmp_path: Path, start: str) -> None:
    root = tmp_path / "dataset"
    shutil.copytree(source.dataset, root)
    path = root / path_of(alpha, start)
    path.parent.mkdir(parents=True, exist_ok=True)
    for data in (b"[" * 100_000, b"[" * 900 + b"]" * 900 + b"\n"):
        path.write_bytes(data)
        change = resolve(alpha.files, Folder(root), allow_changes=False)
        assert start == "workloads/" or any("exists and would change" in line for line in change.problems)


def test_inputs_that_are_no_plain_normals_are_stored() -> None:
    generator = torch.Generator().manual_seed(0)
    normal = torch.randn(4096, generator=generator)
    assert is_random(normal)
    for other in (
        normal.abs(), normal * 2, normal[:8], normal.sign(), torch.rand(4096) * 3.46 - 1.73, normal.int(),
    ):  # fmt: skip
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


def test_a_case_whose_right_answer_is_infinite_is_no_workload(source: Source, tmp_path: Path) -> None:
    request: dict[str, Any] = {"definition": "alpha", "op_type": "rmsnorm", "plans": str(source.run / "cases")}
    request |= {"versions": {"torch": None}, "cases": ["small-0", "small-1"], "infinite": ["small-1"]}
    write_solutions([request], tmp_path)  # type: ignore[list-item] # read from JSON
    notes = json.loads((tmp_path / "alpha" / "notes.json").read_text())
    assert "infinities" in notes["left_out"]["small-1"]
    assert len((tmp_path / "alpha" / "workloads" / "rmsnorm" / "alpha.jsonl").read_text().splitlines()) == 1


def test_flashinfer_bench_finds_what_one_brings(alpha: PullRequest, source: Source, tmp_path: Path) -> None:
    theirs = pytest.importorskip("flashinfer_bench.data", reason="package_absent: flashinfer-bench")
    whole = traced(alpha)
    root = tmp_path / "published"
    shutil.copytree(source.dataset, root)
    change = resolve(whole.files, Folder(source.dataset), allow_changes=False)
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


def test_measured_traces_are_published_under_authors(alpha: PullRequest, source: Source, tmp_path: Path) -> None:
    lines = alpha.files[path_of(alpha, "workloads/")]
    measured = tmp_path / "traces" / "rmsnorm" / "alpha.jsonl"  # as the benchmark leaves them
    measured.parent.mkdir(parents=True)
    measured.write_bytes(trace(lines) + trace(lines, solution="somebody"))
    again = pull_requests(replace(source, traces=(tmp_path,)), "alpha")[0]
    assert again.files["traces/baseline/rmsnorm/alpha.jsonl"] == trace(lines)
    other = tmp_path / "other" / "traces" / "rmsnorm" / "alpha.jsonl"  # measured apart
    other.parent.mkdir(parents=True)
    elsewhere = trace(lines).replace(b'"uuid": "', b'"uuid": "0')
    other.write_bytes(elsewhere)
    both = pull_requests(replace(source, traces=(tmp_path, tmp_path / "other")), "alpha")[0]
    assert both.files["traces/baseline/rmsnorm/alpha.jsonl"] == trace(lines) + elsewhere
    measured.write_bytes(trace(lines) + trace(lines)[:50])  # its writer was killed
    cut = pull_requests(replace(source, traces=(tmp_path,)), "alpha")[0]
    assert any(
        "line 2 does not fit" in line for line in resolve(cut.files, base_of(source), allow_changes=False).problems
    )


def verified(rows: list[dict[str, Any]], definition: Definition) -> Verification:
    found = implementation_verdicts(VerdictRow.model_validate(one) for one in rows)
    return verification(definition, found.get(definition.name, {}))


ALPHA = Definition.model_validate(rmsnorm("alpha"))


def rows_of(**changes: dict[str, Any]) -> list[dict[str, Any]]:
    return [
        row("alpha", ALPHA.digest, "small-0", implementation, **changes.get(implementation, {}))
        for implementation in IMPLEMENTATIONS
    ]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, ""),
        ({"reference": {"verdict": "fail", "reason": "nan"}}, "its reference: fail nan in case small-0, output"),
        ({"reference": {"verdict": "skip", "reason": "no_oracle", "output": "*"}}, "nothing was compared"),
        ({"reference": {"tolerance": 0.1}}, "a tolerance of the user's own"),
        ({"torch": {"verdict": "fail", "reason": "numerics"}}, "torch: fail numerics"),
        ({"torch": {"verdict": "skip", "reason": "no_cuda", "output": "*"}}, "no_cuda 1"),
        ({"torch": {"case": "small-1", "digests": {"definition": "f" * 32, "inputs": ""}}}, "no ground truth"),
    ],
)
def test_a_reference_and_a_truth_that_pass_earn_the_tag(changes: dict[str, dict[str, Any]], reason: str) -> None:
    found = verified(rows_of(**changes), ALPHA)
    assert reason in found.reason
    assert found.tags(ALPHA) == (f"status:{'un' if reason else ''}verified",)
    if not reason:
        skip = {"verdict": "skip", "reason": "no_oracle", "output": "places"}
        unjudged = row("alpha", ALPHA.digest, "small-0", "reference", **skip)
        assert "nobody judged places" in verified([*rows_of(), unjudged], ALPHA).reason
        assert found.truths == ("torch",)
        changed = Definition.model_validate(rmsnorm("alpha", GOOD.replace("1e-6", "1e-5")))
        assert "it changed" in verified(rows_of(), changed).reason
