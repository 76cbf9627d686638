"""Each backend and each tactic of a call is called by itself; what a tuner would choose is not asked."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Literal

import pytest
import torch
from op_support import definitions

from traceproof.cli.tactics import TacticRow, table, ways
from traceproof.ops import registry
from traceproof.reasons import Skip, Verdict
from traceproof.run.plan import PlanSelection, planned_alone
from traceproof.sandbox import Reply, Status
from traceproof.stacks import Stack
from traceproof.tactics import backends_of, picking, refusal, says_unsupported, setup, with_backend

STACK = Stack(
    name="one",
    package="one",
    distribution="one",
    backends={"listed": ("fa2", "fa3")},
    tuner="tuner_of_tests:Tuner",
)


@dataclass
class Runner:
    """Doubles by tactic 2, else does not."""

    def get_valid_tactics(self, inputs: Sequence[torch.Tensor], profile: Any) -> list[int]:  # noqa: ANN401
        """Of these sizes."""
        assert [tuple(one) for one in profile[0]] == [tuple(value.shape) for value in inputs]
        return [1, 2]

    def __call__(self, inputs: Sequence[torch.Tensor], tactic: int) -> torch.Tensor:
        """One call."""
        return inputs[0] * (2 if tactic == 2 else 1)


class Tuner:
    """As FlashInfer's: it chooses by times, which nobody foresees."""

    def choose_one(self, custom_op: str, *_: Any) -> Any:  # noqa: ANN401
        """A runner and a tactic, of an operation's runners, configuration and inputs."""
        raise AssertionError(f"{custom_op} is timed")


@pytest.fixture
def tuner(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Tuner]]:
    module = ModuleType("tuner_of_tests")
    vars(module).update(Tuner=Tuner, StaticDim=int, OptimizationProfile=lambda *given: given)
    monkeypatch.setitem(sys.modules, "tuner_of_tests", module)
    yield Tuner
    with pytest.raises(AssertionError, match="is timed"):  # it is as it was
        Tuner().choose_one("one", [], None, [])


def called(value: torch.Tensor, times: int = 1) -> list[torch.Tensor]:
    """What a package does: it asks its tuner in each of its operations."""
    chosen = [Tuner().choose_one("scale", [Runner()], None, [value]) for _ in range(times)]
    return [runner([value], tactic) for runner, tactic in chosen]


def test_each_tactic_is_called_where_it_was_listed(tuner: type[Tuner]) -> None:
    del tuner
    one = torch.ones(3, 5)
    with picking(STACK) as picked:
        assert [float(value.max()) for value in called(one, times=2)] == [1.0, 1.0]
    assert [name for _, name in picked.listed] == ["Runner 1", "Runner 2"] * 2
    assert [place for place, _ in picked.listed][1::2] == [("scale", 0, 1), ("scale (2)", 0, 1)]
    with picking(STACK, ["scale (2)", 0, 1]) as picked:
        assert [float(value.max()) for value in called(one, times=2)] == [1.0, 2.0]
    assert picked.answered
    with picking(STACK, ["scale", 0, 7]) as picked:
        called(one)
    assert not picked.answered


def test_a_package_without_a_tuner_is_called_as_it_is() -> None:
    with picking(Stack(name="one", package="one", distribution="one", tuner="not_there:Tuner")) as picked:
        pass
    assert picked.answered
    assert not picked.listed


def test_backends_are_listed_and_asked_for() -> None:
    def product(value: int, backend: Literal["cudnn", "cutlass", "auto"] = "auto") -> tuple[int, str]:
        return value, backend

    api = {"listed": lambda backend="auto": backend, "product": product, "plain": len}
    assert backends_of(api, STACK) == ["fa2", "fa3", "cudnn", "cutlass"]
    asked = with_backend(api, "cutlass")
    assert (asked["listed"](), asked["product"](3), asked["plain"]([1])) == ("cutlass", (3, "cutlass"), 1)


def test_what_needs_another_package_is_a_skip_and_the_rest_is_a_finding() -> None:
    absent = refusal(ModuleNotFoundError("No module named 'cudnn'"))
    assert absent is not None
    assert absent.reason is Skip.PACKAGE_ABSENT
    assert refusal(RuntimeError("invalid configuration")) is None
    for text in ("'tileiras' compiler not found: `pip install cuda-tile`", "Failed to load cubin for prefill"):
        absent = refusal(RuntimeError(text))
        assert absent is not None
        assert absent.reason is Skip.PACKAGE_ABSENT


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (ValueError("page_size=1 must be >= 8 and divide the tile"), True),
        (ValueError("backend='x' requires kv_layout='HND'; got 'NHD'"), True),
        (NotImplementedError("return_lse=True requires the graph backend; it is not supported by this one"), True),
        (NotImplementedError("single-token prefill does not write every head; use another backend"), True),
        (type("_PlanUnsupportedError", (RuntimeError,), {})("x backend requires a packed query view"), True),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), False),
        (RuntimeError("TMA descriptor must be aligned"), False),
        (ValueError("cannot convert float NaN to integer"), False),
    ],
)
def test_a_backend_that_does_not_take_what_it_is_asked_is_told_from_one_that_fails(
    error: Exception, *, said: bool
) -> None:
    assert says_unsupported(error) == said


def test_a_worker_calls_and_judges_each_way() -> None:
    [definition] = [one for one in definitions("rmsnorm") if one.name == "rmsnorm_h96"]
    order: dict[str, Any] = {
        "implementation": "torch",
        "device": "cpu",
        "dataset": ".",
        "selection": {"sizes": ["small"], "seed": 0},
    }
    said = definition.as_json()
    asked = ok(setup(order), said)
    rows = [TacticRow(definition=definition.name, implementation="torch", **row) for row in ways(asked)]
    op, _ = registry.for_definition(definition)
    assert op.op_type == "rmsnorm"
    planned = planned_alone(definition, PlanSelection(sizes=("small",))).cases
    assert {row.case for row in rows} == {one.id for one in planned if not one.hidden}
    assert {row.verdict for row in rows} == {Verdict.PASS}
    order["implementation"] = "flashinfer"
    [row] = ways(ok(setup(order), said))
    assert row["reason"] in {Skip.NO_CUDA, Skip.PACKAGE_ABSENT, Skip.NEEDS_SM}


def ok(answer: Any, definition: object) -> Any:  # noqa: ANN401 - a handler
    return lambda item: Reply(status=Status.OK, value=answer({"definition": definition, **item}))


def test_a_way_that_fails_is_a_row_with_its_number() -> None:
    right = {"output": "y", "verdict": "pass", "reason": None, "message": "", "margin": 0.4}

    def asked(item: dict[str, Any]) -> Reply:
        if not item:
            return Reply(
                status=Status.OK, value={"cases": [{"id": "small-0"}, {"id": "small-1"}], "backends": ["fa2"]}
            )
        if item["tactic"]:
            return Reply(status=Status.CRASH, message="the worker exited with code 70")
        listed = [[["scale", 0, 4], "Runner 9"]] if item["backend"] else []
        return Reply(status=Status.OK, value={"rows": [right], "tactics": listed})

    found = [TacticRow(definition="d", implementation="flashinfer", **row) for row in ways(asked, ["small-0"])]
    assert [(row.backend, row.tactic, str(row.verdict)) for row in found] == [
        ("", "", "pass"),
        ("fa2", "", "pass"),
        ("fa2", "scale: Runner 9 (tactic 4 of runner 0)", "error"),
    ]
    assert found[-1].reason == "crash"
    assert "exited with code 70" in table(found)
    assert "wrong value" not in table(found)
    refused: dict[str, Any] = {
        "output": "*",
        "verdict": "skip",
        "reason": "unsupported",
        "message": "ValueError: q must be 3-D",
    }
    for name in ("d", "e"):
        row = TacticRow(
            definition=name, implementation="flashinfer", case="small-0", backend="fa2", tactic="", **refused
        )
        found.append(row)
    assert "fa2: q must be 3-D (d, e)" in table(found)
