"""Judges every backend and every tactic of a ground truth's call, case by case.

A function or wrapper may take a `backend`, and a package's autotuner may choose one of several tactics within a
call, by their times. `verify` judges the default choice; here each is called separately. `setup` is called in a
worker of the ground truth's environment; a call that kills its process costs one row.
"""

import importlib
import inspect
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

import torch

from traceproof.dataset.definition import Definition
from traceproof.judge.output import Ruling
from traceproof.ops import lookup, registry
from traceproof.ops.adapter import Api
from traceproof.ops.cases import Case
from traceproof.reasons import Skip, Unavailable, UnavailableError, Verdict
from traceproof.run.calls import ending_if_lost, giving_back, wait_asleep
from traceproof.run.case import SolvedCase, solve
from traceproof.run.judging import rulings
from traceproof.run.plan import PlanSelection, planned_alone
from traceproof.run.schema import WHOLE
from traceproof.run.trusted import Implementation, Runner
from traceproof.run.untrusted import CaseResult
from traceproof.stacks import STACK_OF, STACKS, Stack

BACKEND = "backend"  # the parameter
AUTO = "auto"  # the value that leaves the choice to the package
LITERAL, QUOTED = re.compile(r"Literal\[([^\]]*)\]"), re.compile(r"['\"]([^'\"]+)['\"]")
# Exceptions of packages about a backend or tactic that does not exist, or not for this GPU or these sizes.
REFUSALS = (RuntimeError, ValueError, AssertionError, ImportError, TypeError, KeyError, OSError)
# Words of a message that a layout, size or option is not supported; failures inside a kernel have none.
LIMITS = re.compile(r"\b(?:supports?|supported|unsupported|requires?|required|must be|must have)\b", re.IGNORECASE)
Place = tuple[str, int, int]  # (operation in the call, runner's number, tactic's number)


def backends_of(api: Api, stack: Stack) -> list[str]:
    """Values of `backend` that an adapter's functions and classes take, or the stack lists, except `auto`."""
    names: list[str] = []
    for key, function in api.items():
        if takes_backend(function):
            annotation = str(inspect.signature(function).parameters[BACKEND].annotation)
            names += stack.backends.get(key, ())
            names += [name for text in LITERAL.findall(annotation) for name in QUOTED.findall(text)]
    return [name for name in dict.fromkeys(names) if name != AUTO]


def takes_backend(function: object) -> bool:
    """Whether `function` is a function or class with a parameter `backend`."""
    try:
        return callable(function) and BACKEND in inspect.signature(function).parameters
    except (TypeError, ValueError):  # written in C, so there is no signature
        return False


def with_backend(api: Api, backend: str) -> Api:
    """The API with `backend` passed to all functions and classes that take one."""

    def chosen(function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, **options: function(*args, **{**options, BACKEND: backend})

    return {key: chosen(function) if takes_backend(function) else function for key, function in api.items()}


class TunerAnswers:
    """Answers an autotuner's questions in a call: with defaults, except at one place."""

    def __init__(self, place: Sequence[Any] | None = None) -> None:
        self._place = None if place is None else (str(place[0]), int(place[1]), int(place[2]))
        self._questions = Counter[str]()  # number of questions so far, by operation
        self.listed: list[tuple[Place, str]] = []  # each tactic's place and name
        self.answered = place is None  # whether the question at the place came

    def choose(self, module: ModuleType, operation: str, runners: Sequence[Any], inputs: Sequence[Any]) -> Any:  # noqa: ANN401
        """(runner, tactic) in place of the tuner's choice: `_place`'s if this call has it, else a fallback."""
        self._questions[operation] += 1
        turn = self._questions[operation]
        name = operation if turn == 1 else f"{operation} ({turn})"
        shapes = [value.shape if isinstance(value, torch.Tensor) else () for value in inputs]
        dims = [[module.StaticDim(size) for size in shape] for shape in shapes]
        profile = module.OptimizationProfile(dims, [None] * len(dims))
        for number, runner in enumerate(runners):
            for index, tactic in enumerate(runner.get_valid_tactics(inputs, profile)):
                place = name, number, index
                self.listed.append((place, f"{type(runner).__name__} {tactic}"))
                if place == self._place:
                    self.answered = True
                    return runner, tactic
        return runners[0], -1  # its fallback


@contextmanager
def choosing(stack: Stack, place: Sequence[Any] | None = None) -> Iterator[TunerAnswers]:
    """While active, a stack's autotuner, if it has one, chooses the tactic at a place."""
    answers = TunerAnswers(place)
    name, _, tuner_name = stack.tuner.partition(":")
    try:
        module = importlib.import_module(name) if name else None
        tuner = getattr(module, tuner_name)
    except (ImportError, AttributeError):  # this release has none
        yield answers
        return
    assert module is not None

    def choose_one(_: Any, custom_op: str, runners: Any, tuning_config: Any, inputs: Any, **__: Any) -> Any:  # noqa: ANN401
        del tuning_config
        return answers.choose(module, custom_op, runners, inputs)

    with patch.object(tuner, "choose_one", choose_one):
        yield answers


def setup(payload: Mapping[str, Any]) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Prepare a worker; returns `Caller.answer`, which calls a ground truth in one way and judges it."""
    torch.set_num_threads(1)
    wait_asleep(torch.device(payload["device"]))
    return Caller(payload).answer


class Caller:
    """A ground truth in a worker; keeps the last definition, and the expected values of its last case."""

    def __init__(self, payload: Mapping[str, Any]) -> None:
        """`payload` has `implementation`, `device`, `dataset`, `selection` (a `PlanSelection`)."""
        self._device, self._dataset = torch.device(payload["device"]), Path(payload["dataset"])
        self._stack = STACKS[STACK_OF[payload["implementation"]]]
        self._selection = PlanSelection.model_validate(payload["selection"])
        self._plain = Implementation(payload["implementation"])
        self._plain.device = self._device.type
        self._json: object = None  # of the last definition
        self._solved: SolvedCase | None = None  # its last case

    def answer(self, item: dict[str, Any]) -> dict[str, Any]:
        """Call the ground truth in one way; returns rows and the tactics met, as JSON.

        An item with only a `definition` (JSON) asks for `cases` and `backends`. Others also have a `case`, a
        `backend` ("": default) and a `tactic`: a place that an earlier answer listed, or None.
        """
        if item["definition"] != self._json:
            self._json, self._solved = item["definition"], None
            self._definition = Definition.model_validate(self._json)
            self._op, _ = registry.for_definition(self._definition)
        unavailable = self._plain.unavailable(self._definition)
        if unavailable is not None:
            return skipped(unavailable)
        if "case" not in item:
            planned = planned_alone(self._definition, self._selection).cases
            cases = [one.case.as_json() for one in planned if not one.hidden and one.skip is None]
            return {"cases": cases, "backends": backends_of(self._plain.api, self._stack)}
        try:
            with giving_back(0), ending_if_lost(self._device):
                return self._called(item)
        except UnavailableError as error:
            return skipped(error.unavailable)
        except REFUSALS as error:
            unavailable = refusal(error)
            if unavailable is None and item["backend"] and not item["tactic"] and says_unsupported(error):
                unavailable = Unavailable(Skip.UNSUPPORTED, f"{type(error).__name__}: {error}")
            if unavailable is None:
                raise
            return skipped(unavailable)

    def _called(self, item: Mapping[str, Any]) -> dict[str, Any]:
        """Call the ground truth in one way, and judge its outputs."""
        solved, backend = self._solve(Case(**item["case"])), item["backend"]
        truth = self._plain.with_api(lambda api: with_backend(api, backend)) if backend else self._plain
        with choosing(self._stack, item["tactic"]) as answers:
            runner = Runner(self._definition, self._op, truth, self._device, self._dataset)
            result = runner.run({"case": item["case"], "repeat": False})
        if not answers.answered:
            raise UnavailableError(Unavailable(Skip.API_ABSENT, "the call asks for no such tactic any more"))
        judged = rulings(solved, CaseResult(**{**result, "inputs": None}), tolerance=None)
        return {"rows": [_row(output, ruling) for output, ruling in judged], "tactics": answers.listed}

    def _solve(self, case: Case) -> SolvedCase:
        """The case with expected values, without inputs; kept for the next calls."""
        if self._solved is None or self._solved.case.digest != case.digest:
            found = solve(self._definition, case, device=self._device, dataset=self._dataset, seed=case.seed)
            self._solved = replace(found, inputs={})
        return self._solved


def _row(output: str, ruling: Ruling) -> dict[str, Any]:
    gate = ruling.details.get("gate") or {}
    return {"output": output, **replace(ruling, details={"margin": gate.get("margin")}).fields}


def refusal(error: Exception) -> Unavailable | None:
    """The skip that an exception means: another GPU or a package is needed; None: it is a finding."""
    text = str(error)
    if isinstance(error, ImportError) or lookup.ABSENT.search(text):
        return Unavailable(Skip.PACKAGE_ABSENT, text)
    if "CUTE_DSL_ARCH" in text:  # its code is only for other architectures
        return Unavailable(Skip.NEEDS_SM, text)
    if torch.cuda.is_available() and lookup.asks_for_another(text, torch.cuda.get_device_capability()):
        return Unavailable(Skip.NEEDS_SM, text)
    return None


def says_unsupported(error: Exception) -> bool:
    """Whether a backend refuses its arguments before it runs: kernels do not raise such exceptions."""
    if isinstance(error, NotImplementedError) or "Unsupported" in type(error).__name__:
        return True
    return isinstance(error, ValueError) and LIMITS.search(str(error)) is not None


def skipped(why: Unavailable) -> dict[str, Any]:
    """An answer with one row, which says why nothing was run."""
    return {"rows": [_row(WHOLE, Ruling(Verdict.SKIP, why.reason, why.message, {}))], "tactics": []}
