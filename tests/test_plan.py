"""An edit plans what depends on it, by digests of code; what does not fit is judged scaled down."""

from __future__ import annotations

import ast
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from definitions import GOOD, rmsnorm, write, write_workloads
from pipeline import Rows, Run, summarise
from pipeline import told as told_of
from solution_judge import DATASET

from traceproof import digests
from traceproof.dataset.definition import Definition, Dialect
from traceproof.dataset.tree import read_tree
from traceproof.digests import code_digest, verdict_code
from traceproof.errors import TraceproofError
from traceproof.ops import registry
from traceproof.ops.cases import Case
from traceproof.ops.families.expert import mixture_of
from traceproof.ops.scaled_down import ScaledDown, scaled_down_of
from traceproof.publish.verified import implementation_verdicts, verification
from traceproof.run import plan as planning
from traceproof.run.known import Known
from traceproof.run.plan import PlanSelection, plan
from traceproof.run.report import sentence, table
from traceproof.run.schema import INDEX, Index, OpTypePlan, each_row
from traceproof.sandbox import Limits
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
    kept, stale = (dataset.with_name("verdicts") / f"{name}.jsonl" for name in ("rmsnorm", "rmsnorm.1-of-2"))
    kept.parent.mkdir()
    kept.touch()
    stale.touch()  # of a job that the op_type had when it was larger
    path = write(dataset, rmsnorm("new"))
    assert planned() == ["new"]
    assert kept.exists()
    assert not stale.exists()
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


def test_an_edit_is_of_its_job_alone(dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("traceproof.run.schema.GROUP", 2)
    small = PlanSelection(sizes=("small",))
    before = plan(dataset, tmp_path / "cases", small).op_types["rmsnorm"].digests
    [file] = dataset.glob("definitions/*/wide.json")
    definition = json.loads(file.read_text())
    definition["reference"] += "\n# edited\n"
    file.write_text(json.dumps(definition))
    after = plan(dataset, tmp_path / "cases", small).op_types["rmsnorm"].digests
    assert [name for name in before if before[name] != after[name]] == ["rmsnorm.2-of-2"]


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
    forget()
    yield folder
    forget()


def forget() -> None:
    for cached in (digests._files, digests._content, verdict_code):
        cached.cache_clear()


def edited(file: Path) -> None:
    file.write_text(f"{file.read_text()}\nMORE = 1\n")
    forget()


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


def test_the_file_of_an_op_is_the_same_where_the_package_lies_behind_a_link(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(digests.SOURCE.parent)
    code = "from traceproof.ops import registry; print(registry.file_of('rmsnorm'))"
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "link")}
    command = [sys.executable, "-c", code]
    told = subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout
    assert Path(told.strip()) == digests.OPS / "families" / "norm.py"


def test_files_and_folders_have_a_digest_and_compiled_modules_none(package: Path) -> None:
    before = code_digest("site"), code_digest("site/build.py")
    (package / "site" / "build.pyc").touch()
    forget()
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
        if not known and file_of(module).is_file() and module.startswith("traceproof."):
            found.add(module)
            todo += by_syntax_tree(file_of(module), package_of(module))
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


def test_a_family_depends_on_the_families_that_its_import_statements_name() -> None:
    for path in sorted(digests.OPS.glob("families/[a-z]*.py")):
        named = " ".join(digests.FAMILIES.findall(path.read_text(encoding="utf-8")))
        for name in by_syntax_tree(path, "traceproof.ops.families"):
            if name.startswith("traceproof.ops.families.") and file_of(name).is_file():
                assert re.search(rf"\b{name.rpartition('.')[2]}\b", named), (path, name)


def file_of(module: str) -> Path:
    path = digests.SOURCE.parent.joinpath(*module.split("."))
    return path / "__init__.py" if (path / "__init__.py").is_file() else path.with_suffix(".py")


def package_of(module: str) -> str:
    return module if file_of(module).name == "__init__.py" else module.rpartition(".")[0]


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


LIMITS = Limits(seconds=300.0, memory_bytes=2 << 30)
FULL = 1 << 14
OURS = read_tree(Path(__file__).parent / "dataset").definitions
MIXTURE = OURS["trtllm_fp8_per_tensor_scale_moe_topk1_e16_h512_i512"].definition


def resized(definition: Definition, reference: str = "", **sizes: int) -> Definition:
    value = definition.as_json()
    for name, size in sizes.items():
        value["axes"][name]["value"] = size
    return Definition.model_validate(value | ({"reference": reference} if reference else {}))


def wide(name: str = "wide", reference: str = GOOD) -> dict[str, Any]:
    return rmsnorm(name, reference) | {
        "axes": {"batch_size": {"type": "var"}, "hidden_size": {"type": "const", "value": FULL}}
    }


def verified(tmp_path: Path, *definitions: dict[str, Any], limit: int = 1 << 20, **selected: Any) -> Rows:  # noqa: ANN401
    """Verdict rows of definitions of which none wider than some thousand columns fits."""
    for definition in definitions:
        path = tmp_path / "dataset" / "definitions" / "rmsnorm" / f"{definition['name']}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(definition))
    selection = PlanSelection(sizes=("medium",), memory_limit=limit, **selected)
    found = Run(tmp_path / "dataset", tmp_path / "results", selection=selection, limits=LIMITS).verify()
    return [row for rows in found.values() for row in rows]


PRODUCT = resized(OURS["bmm_bf16_n48_k80"].definition, N=4096, K=14336)
PROJECTION = resized(
    OURS["gemm_n96_k160"].definition, N=50257, K=512
)  # whose sizes have nothing to do with each other
CONSTRAINED = wide() | {"constraints": ["hidden_size >= 1024"]}
STATED = f"the reference's text states hidden_size {FULL} (line 6)"


def stating(eps: str) -> Definition:
    return Definition.model_validate(wide(reference=GOOD.replace("EPS = 1e-6", f"EPS = {eps}")))


@pytest.mark.parametrize(
    ("definition", "said"),
    [
        (PRODUCT, "N 4096 -> 256, K 14336 -> 896"),
        (PROJECTION, "N 50257 -> 384"),
        (stating("1e-6"), "hidden_size 16384 -> 256"),
        (stating("16384"), "hidden_size 16384 -> 256, in the reference's text, too"),
        (stating("16384.0"), STATED),
        (stating("0.0078125"), STATED),  # the reciprocal of the size's root
        (
            Definition.model_validate(CONSTRAINED),
            "the constraint 'hidden_size >= 1024' does not hold with hidden_size 16384 -> 256",
        ),
    ],
)
def test_a_scaled_down_one_keeps_ratios_constraints_and_sizes_that_are_stated(
    definition: Definition, said: str
) -> None:
    assert str(scaled_down_of(definition, registry.for_definition(definition)[0])) == said


def test_a_mixture_of_experts_keeps_what_its_sizes_have_to_do_with_each_other() -> None:
    large = resized(MIXTURE, hidden_size=7168, intermediate_size=2048, gemm1_out_size=4096, num_experts=256)
    scaled_down = scaled_down_of(large, registry.get("moe"))
    assert isinstance(scaled_down, ScaledDown)
    found, old = mixture_of(scaled_down.definition), mixture_of(large).routing
    assert (found.hidden, found.intermediate) == (512, 256)
    assert found.routing == replace(old, experts=8, local=8)
    assert old.local == old.experts
    case = Case("small-0", "small", {"seq_len": 2}, 0, {})
    assert registry.get("moe").memory(scaled_down.definition, case) < registry.get("moe").memory(large, case) // 20


def test_a_definition_that_does_not_fit_is_judged_scaled_down_and_stays_unproved(tmp_path: Path) -> None:
    rows = verified(tmp_path, wide(), rmsnorm("narrow"))
    of_wide = [row for row in rows if row["definition"] == "wide"]
    whole = [row for row in of_wide if "scaled_down" not in row]
    scaled_down = [row for row in of_wide if "scaled_down" in row]
    assert {row["verdict"] for row in whole} == {"skip"}
    assert whole[0]["message"].endswith("; judged by a scaled-down definition: hidden_size 16384 -> 256")
    assert {(row["verdict"], row["scaled_down"]) for row in scaled_down} == {("pass", "hidden_size 16384 -> 256")}
    own = {row["grade"] for row in scaled_down if row["implementation"] == "reference" and row["output"] != "*"}
    assert own == {"scaled_down"}
    assert all(row["case"].startswith(("scaled-down-", "hidden-")) for row in scaled_down)
    assert whole[0]["digests"]["definition"] != scaled_down[0]["digests"]["definition"]
    summary = summarise(rows, Known())
    assert summary["verified"]
    assert told_of(summary, "conclusion") == {"narrow": "right", "wide": "scaled_down"}
    assert told_of(summary, "verdict") == {"narrow": "pass", "wide": "scaled_down"}
    assert told_of(summary, "grade") == {"narrow": "checked", "wide": "scaled_down"}
    text = table(summary)
    assert "1 too large here, judged by a scaled-down definition alone" in text
    assert "1 by scaled-down definitions alone" in text
    assert "Scaled down, wide: hidden_size 16384 -> 256." in text
    alone = summarise(of_wide, Known())
    assert not alone["verified"]
    assert "NOT VERIFIED: 1 definition" in table(alone)
    found = implementation_verdicts([*each_row(tmp_path / "results" / "verdicts" / "rmsnorm.jsonl")])["wide"]
    reason = "too large, judged by a scaled-down definition alone"
    assert (found["reference"].status, found["reference"].reason) == ("not run", reason)
    assert not verification(Definition.model_validate(wide()), found).verified


def asserting(text: str = GOOD) -> dict[str, Any]:
    """A definition whose reference asserts its size."""
    return wide(reference=text.replace("EPS = 1e-6", f"EPS = 1e-6\n    assert hidden_states.shape[1] == {FULL}"))


def test_a_size_that_is_asserted_alone_changes_with_its_axis_and_what_fails_then_is_a_finding(
    tmp_path: Path,
) -> None:
    rows = verified(tmp_path, asserting(), rmsnorm("narrow"))
    right = [row for row in rows if row.get("scaled_down") and row["implementation"] == "reference"]
    assert {(row["verdict"], row["scaled_down"]) for row in right} == {("pass", "hidden_size 16384 -> 256")}
    assert told_of(summarise(rows, Known()), "conclusion") == {"narrow": "right", "wide": "scaled_down"}
    rows = verified(tmp_path / "wrong", asserting(GOOD.replace("* weight.float()", "")))
    assert told_of(summarise(rows, Known()), "conclusion") == {"wide": "wrong"}


def test_numbers_of_the_text_change_where_no_axis_is_left_and_what_fails_then_says_nothing(tmp_path: Path) -> None:
    text = GOOD.replace("* weight.float()", f"* weight.float() * (2 if hidden_states.shape[1] == {FULL} else 1)")
    wrong = [row for row in verified(tmp_path / "wrong", wide(reference=text)) if row.get("scaled_down")]
    failing = [row for row in wrong if row["implementation"] == "reference" and row["output"] != "*"]
    assert {(row["verdict"], row.get("reason")) for row in failing} <= {("skip", "does_not_fit"), ("pass", None)}
    assert any("with other numbers in its text" in row["message"] for row in failing)


SAMPLER = """import torch


def run(probs, top_p):
    assert probs.shape[1] == 131072
    ordered, order = probs.sort(-1, descending=True)
    kept = torch.where(ordered.cumsum(-1) - ordered < top_p[:, None], ordered, 0.0)
    drawn = order.gather(-1, kept.multinomial(1))[:, 0]
    return torch.where(torch.rand(len(probs)) < GREEDY, order[:, 0], drawn)
"""


@pytest.mark.parametrize(("share", "verdict"), [("0.0", "pass"), ("0.08", "fail")])
def test_a_sampler_of_a_large_vocabulary_is_judged_by_a_small_one_too(
    tmp_path: Path, share: str, verdict: str
) -> None:
    large = resized(OURS["top_p_sampling_from_probs_v1000"].definition, vocab_size=131072).as_json()
    sampler = large | {"reference": SAMPLER.replace("GREEDY", share)}
    rows = verified(tmp_path, sampler, limit=1 << 30, cases=("medium-0", "scaled-down-adversarial-draws"))
    of_reference = {row["case"]: row for row in rows if row["implementation"] == "reference"}
    found = of_reference["scaled-down-adversarial-draws"]
    assert (found["verdict"], found["scaled_down"], "grade" in found) == (
        verdict,
        "vocab_size 131072 -> 256",
        False,
    )
    assert of_reference["medium-0"]["verdict"] == "pass"
    assert {row["implementation"] for row in rows if row["case"] == found["case"]} == {"reference"}
    (conclusion,) = told_of(summarise(rows, Known()), "conclusion").values()
    assert conclusion == ("right" if verdict == "pass" else "wrong")
    alone = sentence(summarise([row for row in rows if row["case"] == found["case"]], Known()))
    assert ("nothing was compared in its own size" in alone) == (verdict == "pass")
    read = each_row(tmp_path / "results" / "verdicts" / "sampling.jsonl")
    status = implementation_verdicts([*read])[sampler["name"]]["reference"].status
    assert status == ("passed" if verdict == "pass" else "failed")


def test_two_axes_of_one_stated_size_that_become_different_ones_are_left() -> None:
    text = "def run(*given):\n    assert given[2].shape[1] == 7168 and len(given[0]) % 256 == 0\n"
    both = resized(MIXTURE, text, hidden_size=7168, intermediate_size=7168, gemm1_out_size=14336, num_experts=256)
    assert "the reference's text states num_experts 256" in str(scaled_down_of(both, registry.get("moe")))


def test_numbers_in_asserts_alone_do_not_decide_where_the_reference_computes_with_another_size() -> None:
    text = (
        "def run(*given):\n    h, i = 7168, 2048\n    assert given[0].shape[1] == 256 and given[2].shape[1] == h\n"
    )
    both = resized(MIXTURE, text, hidden_size=7168, intermediate_size=2048, gemm1_out_size=4096, num_experts=256)
    said = str(scaled_down_of(both, registry.get("moe")))
    assert said.startswith("hidden_size 7168 -> 512")
    assert said.endswith("num_experts 256 -> 8, in the reference's text, too")


def test_a_scaled_down_one_that_is_wrong_is_a_finding(tmp_path: Path) -> None:
    rows = verified(tmp_path, wide(reference=GOOD.replace("* weight.float()", "")))
    assert told_of(summarise(rows, Known()), "conclusion") == {"wide": "wrong"}


def test_a_reference_that_refuses_the_smaller_sizes_leaves_the_skip_with_what_it_raised(tmp_path: Path) -> None:
    reference = GOOD.replace("EPS = 1e-6", "EPS = 1e-6\n    assert hidden_states.shape[1] > 16000")
    rows = verified(tmp_path, wide(reference=reference))
    assert not any(row["verdict"] in {"fail", "error"} for row in rows)
    refused = next(row for row in rows if "scaled_down" in row)
    assert (refused["verdict"], refused["reason"]) == ("skip", "does_not_fit")
    told = "it does not take the sizes of a scaled-down definition (hidden_size 16384 -> 256): AssertionError"
    assert refused["message"].startswith(told)
    assert told_of(summarise(rows, Known()), "conclusion") == {"wide": "not_run"}


def test_a_definition_without_a_scaled_down_one_says_why_it_has_none(tmp_path: Path) -> None:
    rows = verified(tmp_path, wide(reference=GOOD.replace("EPS = 1e-6", f"EPS = 1e-6 * {FULL}.0 / {FULL}.0")))
    assert {row["verdict"] for row in rows} == {"skip"}
    assert all(
        "no scaled-down definition: the reference's text states hidden_size 16384" in row["message"]
        for row in rows
    )
    assert told_of(summarise(rows, Known()), "conclusion") == {"wide": "not_run"}


def test_one_case_of_a_scaled_down_one_can_be_repeated(tmp_path: Path) -> None:
    rows = verified(tmp_path, wide(), cases=("scaled-down-medium-0",))
    assert {row["case"] for row in rows if row["implementation"] == "reference"} == {"scaled-down-medium-0"}
    assert {row["verdict"] for row in rows} == {"pass"}


def test_a_definition_of_which_some_cases_fit_has_no_scaled_down(tmp_path: Path) -> None:
    rows = verified(tmp_path, wide(), limit=30 << 20)
    assert not any("scaled_down" in row for row in rows)


WITHOUT_TORCH = """
import sys
from pathlib import Path
from traceproof.ops.cases import ALL_SIZES
from traceproof.run.plan import PlanSelection, plan
sys.modules["torch"] = None  # importing it is an ImportError
selection = PlanSelection(definitions=sys.argv[3:], sizes=ALL_SIZES, workloads=True)
plan(Path(sys.argv[1]), Path(sys.argv[2]), selection)
"""


def test_planning_a_published_definition_imports_no_torch(tmp_path: Path) -> None:
    """It takes seconds, and a quarter of the memory that planning may take."""
    tree = read_tree(DATASET)
    names = [name for name, entry in tree.definitions.items() if entry.definition.dialect is Dialect.PUBLISHED]
    subprocess.run([sys.executable, "-c", WITHOUT_TORCH, str(DATASET), str(tmp_path), *names], check=True)
    planned = {name for one in plans(tmp_path).values() for name in one.whole}
    assert planned == {*names}
    assert len(names) > 50
