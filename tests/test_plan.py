"""An edit plans what depends on it, and code has a digest for all that imports it."""

from __future__ import annotations

import ast
import json
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from definitions import rmsnorm, write, write_workloads

from traceproof import digests
from traceproof.digests import code_digest, verdict_code
from traceproof.errors import TraceproofError
from traceproof.run import plan as planning
from traceproof.run.plan import PlanSelection, plan
from traceproof.run.schema import GROUP, INDEX, Index, Listed, OpTypePlan, group_names
from traceproof.stacks import STACKS

SMALL = {"sizes": ("small",), "hidden_seed": 3}
WIDE = {"batch_size": {"type": "var"}, "hidden_size": {"type": "const", "value": 1 << 22}}


@pytest.fixture
def dataset(tmp_path: Path) -> Path:
    root = tmp_path / "dataset"
    for name in ("alpha", "beta"):
        write(root, rmsnorm(name))
    write(root, rmsnorm("wide", axes=WIDE))  # is scaled down
    write(root, rmsnorm("mystery", op_type="some_new_kernel"))
    return root


def plans(folder: Path) -> dict[str, OpTypePlan]:
    found = {path.name: path for path in folder.glob("*.json") if path.name != INDEX}
    return {name: OpTypePlan.read(path).model_copy(update={"context": ""}) for name, path in found.items()}


@pytest.fixture
def planned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """Plans into `cases`: the definitions that were planned for it; what is there is then as if all had been."""
    made: list[str] = []
    one = planning._definition_plan

    def noted(*args: Any) -> Any:  # noqa: ANN401 - as it is
        made.append(args[1].definition.name)
        return one(*args)

    def run(code: str = "c", **selected: Any) -> list[str]:  # noqa: ANN401 - fields
        root, selection = tmp_path / "dataset", PlanSelection(**{**SMALL, **selected})
        with monkeypatch.context() as patch:
            patch.setattr(planning, "_definition_plan", noted)
            made.clear()
            (tmp_path / "cases" / INDEX).unlink(missing_ok=True)  # as Snakemake does
            index = plan(root, tmp_path / "cases", selection, code=code)
        found = list(made)
        plan(root, tmp_path / "anew", PlanSelection(**{**SMALL, **selected}))
        assert plans(tmp_path / "cases") == plans(tmp_path / "anew")
        assert Index.read(tmp_path / "cases" / INDEX) == index
        return found

    return run


def test_what_is_as_it_was_is_not_planned_again(dataset: Path, planned: Callable[..., list[str]]) -> None:
    assert planned() == ["alpha", "beta", "wide", "mystery"]
    (norms, other) = (dataset.with_name("cases") / f"{name}.json" for name in ("rmsnorm", "some_new_kernel"))
    times = norms.stat().st_mtime_ns, other.stat().st_mtime_ns
    assert planned() == []
    assert times == (norms.stat().st_mtime_ns, other.stat().st_mtime_ns)
    path = write(dataset, rmsnorm("beta", description="edited"))
    assert planned() == ["beta"]
    assert times == (times[0], other.stat().st_mtime_ns)
    path.rename(path.with_name("elsewhere.json"))
    assert planned() == ["beta"]
    inputs = rmsnorm("alpha")["inputs"]
    write(dataset, rmsnorm("alpha", inputs=dict(reversed(inputs.items()))))  # the order of arguments
    assert planned() == ["alpha"]


def test_definitions_that_come_go_or_break_are_told(dataset: Path, planned: Callable[..., list[str]]) -> None:
    planned()
    path = write(dataset, rmsnorm("new"))
    assert planned() == ["new"]
    path.write_text("{", encoding="utf-8")
    assert planned() == []
    path.unlink()
    (dataset / "definitions" / "some_new_kernel" / "mystery.json").unlink()
    assert planned() == []
    assert {path.name for path in dataset.with_name("cases").iterdir()} == {"rmsnorm.json", INDEX}


@pytest.mark.parametrize("other", [{"sizes": ("medium",)}, {"code": "d"}, {"code": ""}, {"cases": ("small-0",)}])
def test_other_code_or_another_selection_plans_all(
    dataset: Path, planned: Callable[..., list[str]], other: Mapping[str, Any]
) -> None:
    del dataset
    planned()
    assert len(planned(**other)) == 4


def test_workload_lines_are_planned_each_time(dataset: Path, planned: Callable[..., list[str]]) -> None:
    drawn = {"type": "random"}
    line = {"uuid": "one", "axes": {"batch_size": 3}, "inputs": {"hidden_states": drawn, "weight": drawn}}
    path = write_workloads(dataset, "alpha", [line])
    planned(workloads=True)
    assert planned(workloads=True) == ["alpha"]
    path.write_text(path.read_text(encoding="utf-8").replace("3", "4"), encoding="utf-8")
    assert planned(workloads=True) == ["alpha"]
    assert planned() != []
    assert planned() == []


@pytest.mark.parametrize(
    "damage", [lambda text: text.replace("64", "65", 1), lambda text: text[:-9], lambda _: ""]
)
def test_a_damaged_one_is_made_again(
    dataset: Path, planned: Callable[..., list[str]], damage: Callable[[str], str]
) -> None:
    planned()
    path = dataset.with_name("cases") / "rmsnorm.json"
    text = path.read_text(encoding="utf-8")
    path.write_text(damage(text), encoding="utf-8")
    assert planned() == ["alpha", "beta", "wide"]
    assert path.read_text(encoding="utf-8") == text
    path.write_text(damage(text), encoding="utf-8")
    with pytest.raises(TraceproofError, match="Run the same command again"):
        OpTypePlan.read(path)
    assert not path.exists()
    assert not path.with_name(INDEX).exists()


def test_the_index_says_what_jobs_take(dataset: Path, tmp_path: Path) -> None:
    host = plan(dataset, tmp_path / "host", PlanSelection(sizes=("small",))).op_types["rmsnorm"]
    gpu = plan(dataset, tmp_path / "gpu", PlanSelection(sizes=("small",)), gpu=True).op_types["rmsnorm"]
    assert (host.parallel, host.gpu_mb) == (1, 0)
    assert gpu.parallel > 1
    assert gpu.gpu_mb > 1000
    assert gpu.builds >= STACKS["flashinfer"].build_seconds["gen_norm"] > host.builds  # it builds them first
    assert host.digests == gpu.digests


@pytest.mark.parametrize(("count", "files"), [(1, 1), (GROUP, 1), (GROUP + 1, 2), (3 * GROUP, 3)])
def test_a_large_op_type_has_a_verdict_file_per_group(count: int, files: int) -> None:
    digests_of = dict.fromkeys(group_names(count), "")
    listed = Listed(digests=digests_of, mem_mb=0, gpu_mb=0, parallel=1, builds=0.0, seconds=0.0)
    found = Index(dataset="", op_types={"a": listed}).files("a")
    assert found == (["a"] if files == 1 else [f"a.{number}-of-{files}" for number in range(1, files + 1)])


def test_an_edit_is_of_its_job_alone(dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("traceproof.run.schema.GROUP", 2)
    small = PlanSelection(sizes=("small",))
    before = plan(dataset, tmp_path / "cases", small).op_types["rmsnorm"].digests
    [file] = dataset.glob("definitions/*/wide.json")
    definition = json.loads(file.read_text())
    definition["reference"] += "\n# edited\n"
    file.write_text(json.dumps(definition))
    after = plan(dataset, tmp_path / "cases", small).op_types["rmsnorm"].digests
    assert [group for group in before if before[group] != after[group]] == [".2-of-2"]


PARTS = (
    "run/engine.py", "judge/gates.py", "ops/base.py", "ops/families/expert.py", "ops/families/norm.py",
    "ops/families/product.py", "ops/families/routing.py", "site/build.py",
)  # fmt: skip


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A copy of some modules, in which digests are taken."""
    folder = tmp_path / "traceproof"
    for name in PARTS:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(digests.SOURCE / name, folder / name)
    monkeypatch.setattr(digests, "SOURCE", folder)
    monkeypatch.setattr(digests, "OPS", folder / "ops")
    digests.forget()
    yield folder
    digests.forget()


def edited(file: Path) -> None:
    file.write_text(f"{file.read_text()}\nMORE = 1\n")
    digests.forget()


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("run/engine.py", {"rmsnorm", "gemm", "moe", "moe_routing", "other"}),
        ("judge/gates.py", {"rmsnorm", "gemm", "moe", "moe_routing", "other"}),
        ("ops/base.py", {"rmsnorm", "gemm", "moe", "moe_routing", "other"}),
        ("ops/families/product.py", {"gemm"}),
        ("ops/families/norm.py", {"rmsnorm"}),
        ("ops/families/expert.py", {"moe"}),
        ("ops/families/routing.py", {"moe", "moe_routing"}),  # whose formulas the experts import
        ("site/build.py", set()),
    ],
)
def test_the_code_of_one_op_concerns_its_op_type_alone(package: Path, name: str, changes: set[str]) -> None:
    declared = {
        "rmsnorm": package / "ops/families/norm.py",
        "gemm": package / "ops/families/product.py",
        "moe": package / "ops/families/expert.py",
        "moe_routing": package / "ops/families/routing.py",
        "other": None,
    }
    before = {op_type: verdict_code(own) for op_type, own in declared.items()}
    edited(package / name)
    after = {op_type: verdict_code(own) for op_type, own in declared.items()}
    assert {op_type for op_type, digest in before.items() if after[op_type] != digest} == changes


def test_files_and_folders_have_a_digest_and_compiled_modules_none(package: Path) -> None:
    before = code_digest("site"), code_digest("site/build.py")
    (package / "site" / "build.pyc").touch()
    digests.forget()
    assert (code_digest("site"), code_digest("site/build.py")) == before
    edited(package / "site" / "build.py")
    assert code_digest("site") != before[0]
    assert code_digest("site/build.py") != before[1]


# What runs and judges cases imports this, and no verdict follows from it: paths, errors, texts, what is kept.
APART = {
    *("dataset", "dataset.records", "dataset.tree", "digests", "environments", "environments.toolkit", "errors"),
    *("files", "lazy", "names", "programs", "reasons", "run", "run.cache", "text"),
}


def test_what_decides_rows_is_in_their_digest() -> None:
    found: set[str] = set()
    todo = [
        f"traceproof.{name}" for name in ("run.engine", "run.job", "run.runner", "run.trusted", "sandbox.worker")
    ]
    while todo:
        module = todo.pop()
        known = module in found or module.startswith("traceproof.ops") or module == "traceproof"
        if not known and digests.file_of(module).is_file() and module.startswith("traceproof."):
            found.add(module)
            todo += digests.imported(module)
    listed = [digests.SOURCE / part for part in digests.ENGINE]
    assert all(path.exists() for path in listed)
    files = {path for one in listed for path in ([one] if one.is_file() else one.rglob("*.py"))}
    names = {".".join(path.relative_to(digests.SOURCE).with_suffix("").parts) for path in files}
    needed = {name.removeprefix("traceproof.") for name in found}
    assert needed - APART <= {name.removesuffix(".__init__") for name in names}
    assert {"run.report", "run.known", "run.flow"}.isdisjoint(names)


def test_comments_and_docstrings_are_no_code_for_a_digest_and_all_else_is() -> None:
    def told(found: re.Match[bytes]) -> bytes:
        return found[0].partition(b'"')[0] + b"0\n" if b'"""' in found[0] else b""

    for path in sorted(digests.SOURCE.rglob("*.py")):
        text = path.read_bytes()
        if b"'''" not in text:
            assert plain(digests.PROSE.sub(told, text)) == plain(text), path
    engine = digests.SOURCE / "run" / "engine.py"
    assert digests.PROSE.sub(b"", engine.read_bytes()).count(b"#") < engine.read_bytes().count(b"#")


def plain(source: bytes) -> str:
    """The syntax tree of a module without docstrings, and what stands in their place."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list):
            idle = [one for one in body if isinstance(one, ast.Expr) and isinstance(one.value, ast.Constant)]
            node.body = [one for one in body if one not in idle]  # type: ignore[attr-defined]
    return ast.dump(tree)


def test_what_is_read_off_the_text_of_a_module_is_what_its_syntax_tree_says() -> None:
    source = digests.SOURCE
    for path in sorted(source.rglob("*.py")):
        module = ".".join((source.name, *path.relative_to(source).with_suffix("").parts)).removesuffix(".__init__")
        package = module if path.name == "__init__.py" else module.rpartition(".")[0]
        named = {name for name in by_syntax_tree(path, package) if digests.file_of(name).is_file()}
        known = {name for name in digests.imported(module) if digests.file_of(name).is_file()}
        assert {name for name in known if re.match(r"traceproof\.", name)} == named - {"traceproof"}, module


def by_syntax_tree(path: Path, package: str) -> Iterator[str]:
    """What the import statements of a file name of this package."""
    for node in ast.walk(ast.parse(path.read_bytes())):
        match node:
            case ast.Import(names=names):
                yield from (alias.name for alias in names if alias.name.startswith("traceproof"))
            case ast.ImportFrom(module=module, names=names, level=level):
                above = package.split(".")[: len(package.split(".")) - level + 1] if level else []
                start = ".".join([*above, *([module] if module else [])])
                if start.startswith("traceproof"):
                    yield from (start, *(f"{start}.{alias.name}" for alias in names))
