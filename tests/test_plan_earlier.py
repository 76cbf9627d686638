"""An edit of one definition plans that one alone, and leaves the plan that planning everything would."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from definitions import rmsnorm, write

from traceproof.dataset.tree import read_tree
from traceproof.pipeline.plan_facts import SUFFIX, PlanFacts
from traceproof.pipeline.records import OpTypePlan
from traceproof.pipeline.stages import plan as planning
from traceproof.pipeline.stages.plan import plan, plan_tree
from traceproof.pipeline.stages.plan_selection import Selection
from traceproof.pipeline.stages.shards import FEWEST, Split
from traceproof.pipeline.stages.standing import settle
from traceproof.untrusted.border import BorderError

SMALL = {"sizes": ("small",), "hidden_seed": 3}
SELECTION = Selection(sizes=("small",), hidden_seed=3)
WIDE = {"batch_size": {"type": "var"}, "hidden_size": {"type": "const", "value": 1 << 22}}


@pytest.fixture
def dataset(tmp_path: Path) -> Path:
    root = tmp_path / "dataset"
    for name in ("alpha", "beta"):
        write(root, rmsnorm(name))
    write(root, rmsnorm("wide", axes=WIDE))  # has a twin
    write(root, rmsnorm("mystery", op_type="some_new_kernel"))
    return root


def plans(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text(encoding="utf-8") for path in folder.glob("*.json")}


@pytest.fixture
def planned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """Plans into `cases`: the definitions that were planned for it; what is there is then as if all had been."""
    made: list[str] = []
    one = planning._definition_plan

    def noted(*args: Any) -> Any:  # noqa: ANN401 - as it is
        made.append(args[1].definition.name)
        return one(*args)

    def run(code: str = "c", **selected: Any) -> list[str]:  # noqa: ANN401 - fields
        root, selection = tmp_path / "dataset", Selection(**{**SMALL, **selected})
        with monkeypatch.context() as patch:
            patch.setattr(planning, "_definition_plan", noted)
            made.clear()
            shutil.rmtree(tmp_path / "cases", ignore_errors=True)  # as Snakemake does
            plan_tree(read_tree(root), tmp_path / "cases", selection, code=code)
        found = list(made)
        plan(root, tmp_path / "anew", Selection(**{**SMALL, **selected}))
        assert plans(tmp_path / "cases") == plans(tmp_path / "anew")
        assert all(PlanFacts.beside(path) is not None for path in (tmp_path / "cases").glob("*.json"))
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
    for folder in ("cases", "cases-earlier"):
        assert {path.name for path in dataset.with_name(folder).iterdir()} == {"rmsnorm.json", f"rmsnorm{SUFFIX}"}


@pytest.mark.parametrize("other", [{"sizes": ("medium",)}, {"code": "d"}, {"code": ""}, {"cases": ("small-0",)}])
def test_other_code_or_another_selection_plans_all(
    dataset: Path, planned: Callable[..., list[str]], other: Mapping[str, Any]
) -> None:
    del dataset
    planned()
    assert len(planned(**other)) == 4


def test_a_definition_with_workload_lines_is_planned_each_time(
    dataset: Path, planned: Callable[..., list[str]]
) -> None:
    drawn = {"type": "random"}
    line = {"uuid": "one", "axes": {"batch_size": 3}, "inputs": {"hidden_states": drawn, "weight": drawn}}
    path = dataset / "workloads" / "rmsnorm" / "alpha.jsonl"
    path.parent.mkdir(parents=True)
    text = json.dumps({"definition": "alpha", "solution": None, "evaluation": None, "workload": line})
    path.write_text(text, encoding="utf-8")
    planned(workloads=True)
    assert planned(workloads=True) == ["alpha"]
    path.write_text(text.replace("3", "4"), encoding="utf-8")
    assert planned(workloads=True) == ["alpha"]
    assert planned() != []
    assert planned() == []


@pytest.mark.parametrize("damaged", ["rmsnorm.json", f"rmsnorm{SUFFIX}"])
@pytest.mark.parametrize(
    "damage", [lambda text: text.replace("64", "65", 1), lambda text: text[:-9], lambda _: ""]
)
def test_a_damaged_plan_is_made_again(
    dataset: Path, planned: Callable[..., list[str]], damaged: str, damage: Callable[[str], str]
) -> None:
    planned()
    path = dataset.with_name("cases") / damaged
    text = path.read_text(encoding="utf-8")
    assert damage(text) != text
    path.write_text(damage(text), encoding="utf-8")
    with pytest.raises(BorderError):
        PlanFacts.beside(path.with_suffix(".json"))
    assert planned() == ["alpha", "beta", "wide"]
    path.write_text(damage(text), encoding="utf-8")
    settle(dataset.parent, Path(), "")
    assert not path.parent.exists()


def test_facts_say_what_reading_the_plan_says(dataset: Path, planned: Callable[..., list[str]]) -> None:
    planned()
    path = dataset.with_name("cases") / "rmsnorm.json"
    facts = PlanFacts.read(path)
    assert facts.needs == tuple(sorted(facts.needs))
    assert 0 < 2 * facts.elements < facts.output_bytes  # the judge computes the oracle of the wide one's cases
    path.with_suffix(SUFFIX).unlink()
    unstated = {"plan": "", "context": "", "made_of": ""}
    assert PlanFacts.read(path) == facts.model_copy(update=unstated)


def test_an_edit_keeps_the_split_whatever_was_measured(tmp_path: Path) -> None:
    dataset, out = tmp_path / "dataset", tmp_path / "cases"
    for number in range(2 * FEWEST):
        write(dataset, rmsnorm(f"d{number:02}"))
    split = Split(slots=2, actors=tmp_path / "actors")

    def shards(seconds: float) -> Mapping[str, Any]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("traceproof.pipeline.stages.shards.CASE_SECONDS", seconds)
            (path,) = plan_tree(read_tree(dataset), out, SELECTION, None, split, "c")
        return OpTypePlan.read(path).shards

    first = shards(1.0)
    assert len(first["reference"]) == 2
    write(dataset, rmsnorm("d00", description="edited"))
    assert shards(0.0) == first
    write(dataset, rmsnorm("more"))
    assert shards(0.0) == {}
