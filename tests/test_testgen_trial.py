"""Cases of generated tests where this package is there: drawn, solved and ruled once, no less strict for it."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from definitions import GOOD, rmsnorm, write

from traceproof.judge.output import misconduct
from traceproof.testgen import suite as module
from traceproof.testgen.suite import LARGE, REFERENCE, SuiteCase, threads

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


def test_another_seed_or_tolerance_is_not_taken_for_the_same(tmp_path: Path) -> None:
    found = trial(tmp_path)
    again, other = found.run_reference().outputs["output"], found.run_reference(1).outputs["output"]
    assert torch.equal(found.reference.outputs["output"], again)
    assert not torch.equal(again, other)
    rows = [found.rulings(REFERENCE, tolerance)["output"].details["specification"] for tolerance in (None, 1e-9)]
    assert rows[0] != rows[1]


def test_what_returns_its_input_is_named(tmp_path: Path) -> None:
    found = trial(tmp_path, "def run(hidden_states, weight):\n    return hidden_states\n")
    said = [one.message for one in misconduct(**found.reference.facts)]
    assert said == ["outputs ['output'] share memory with others"]


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


def test_what_is_outside_the_specification_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = trial(tmp_path)
    for ruling in found.rulings(REFERENCE, None).values():
        monkeypatch.setitem(ruling.details["metrics"], "within_specification", 0)
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
    assert found.baseline_within("C", None) is held
    assert found.baseline_within("C", None, answers=2) is held
