"""Measures which combinations of values a library's tests cover, and finds the smallest cases for the gaps.

`python -m traceproof.coverage PATH` prints a line of JSON per collected test. It runs in an environment with the
packages that the tests import; collecting imports their modules and runs no test.
"""

import inspect
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import redirect_stdout, suppress
from dataclasses import dataclass, replace
from itertools import chain, combinations, pairwise
from pathlib import Path
from typing import Any, NamedTuple

from traceproof import programs
from traceproof.errors import TraceproofError
from traceproof.programs import for_untrusted, telling
from traceproof.stacks import STACKS

Chosen = Mapping[str, str]  # axis -> a value: for all axes, or for some


@dataclass(frozen=True, slots=True, kw_only=True)
class Space:
    """The dimensions of tests that should be covered."""

    axes: Mapping[str, tuple[str, ...]]  # values of each, those of the smallest case first
    # whether values of some axes can go together; axes missing in the argument are free
    reachable: Callable[[Chosen], bool]
    op_type: str


class Gap(NamedTuple):
    """A value, or a pair of values, that no case covers, and the smallest case that would."""

    missing: Chosen
    smallest: Chosen


@dataclass(frozen=True, slots=True)
class Coverage:
    """Coverage of an op_type: (covered, reachable) of single values and of pairs, and the gaps of both."""

    op_type: str
    cases: int
    one_way: tuple[int, int]
    pairs: tuple[int, int]
    gaps: tuple[Gap, ...]
    pair_gaps: tuple[Gap, ...]
    unknown: tuple[str, ...]

    def as_json(self) -> dict[str, Any]:
        """The coverage as a JSON object."""
        names = ("covered", "reachable")
        shares = {way: dict(zip(names, getattr(self, way), strict=True)) for way in ("one_way", "pairs")}
        gaps = {kind: [gap._asdict() for gap in getattr(self, kind)] for kind in ("gaps", "pair_gaps")}
        return {"op_type": self.op_type, "cases": self.cases, **shares, **gaps, "unknown": self.unknown}


def cover(space: Space, records: Sequence[Chosen]) -> Coverage:
    """Measure the coverage of a space by tests; values that the space does not declare are listed as unknown."""
    known = [(name, value) for name, values in space.axes.items() for value in values]
    counts: list[tuple[int, int]] = []
    gaps: list[tuple[Gap, ...]] = []
    for size in (1, 2):
        covered = {frozenset(items) for record in records for items in combinations(record.items(), size)}
        every = (dict(items) for items in combinations(known, size))
        # drops pairs of one axis
        cases = [(chosen, smallest(space, chosen)) for chosen in every if len(chosen) == size]
        reached = [Gap(chosen, case) for chosen, case in cases if case is not None]
        gaps.append(tuple(gap for gap in reached if frozenset(gap.missing.items()) not in covered))
        counts.append((len(reached) - len(gaps[-1]), len(reached)))
    unknown = {f"{name}={value}" for record in records for name, value in record.items() - set(known)}
    return Coverage(space.op_type, len(records), counts[0], counts[1], gaps[0], gaps[1], tuple(sorted(unknown)))


def smallest(space: Space, chosen: Chosen) -> Chosen | None:
    """The case with the given values and otherwise the smallest ones; None if they can not go together."""
    if not space.reachable(chosen):
        return None
    open_axis = next((name for name in space.axes if name not in chosen), None)
    if open_axis is None:
        return {name: chosen[name] for name in space.axes}
    cases = (smallest(space, {**chosen, open_axis: value}) for value in space.axes[open_axis])
    return next((case for case in cases if case is not None), None)


def as_text(facts: Coverage, *, gaps: int) -> str:
    """A table, then each gap with its smallest case: all single values, the first `gaps` pairs."""

    def share(covered: int, reachable: int) -> str:
        return f"{covered}/{reachable} {covered / reachable:4.0%}" if reachable else "-"

    def said(chosen: Chosen) -> str:
        return ", ".join(f"{name} {value}" for name, value in chosen.items())

    head = f"{'op_type':18} {'cases':>6} {'one-way':>12} {'pairwise':>14}\n"
    head += f"{facts.op_type:18} {facts.cases:6} {share(*facts.one_way):>12} {share(*facts.pairs):>14}\n"
    shown = [*facts.gaps, *facts.pair_gaps[:gaps]]
    lines = [f"not exercised: {said(gap.missing)}; smallest case: {said(gap.smallest)}" for gap in shown]
    lines += [f"and {len(facts.pair_gaps) - gaps} more pairs"] if len(facts.pair_gaps) > gaps else []
    lines += [f"{text} is not declared" for text in facts.unknown]
    return head + "".join(f"{facts.op_type}: {line}\n" for line in (lines if facts.cases else ["no case was run"]))


# Linear attention: axes, and how parameters of tests express them.

# in its environment, tests are collected
LIBRARY = next(stack for stack in STACKS.values() if stack.linear_attention)
SECONDS = 600.0  # limit on collecting a library's whole suite
Parameters = Mapping[str, Any]
VERIFIERS = ("reference", "gradcheck", "sanity")
# axis -> names of parameters, or of arguments in a test's calls, that switch it on
SWITCHES = {
    "initial_state": ("initial_state", "use_initial_state", "h0", "has_state"),
    "final_state": ("final_state", "output_final_state", "ht"),
    "gate": ("use_gate_in_kernel", "gate_in_kernel", "gate"),
    "beta_sigmoid": ("use_beta_sigmoid", "use_beta_sigmoid_in_kernel"),
    "safe_gate": ("safe_gate", "use_safe_gate"),
    "qk_norm": ("use_qk_l2norm_in_kernel", "qk_norm", "qk_l2norm"),
}
BACKWARD = re.compile("bwd|backward")  # in a test's name
GIVEN = re.compile(rf"\b({'|'.join(chain(*SWITCHES.values()))})=([^=\s,)][^\s,)]*)")


def read(test: str, parameters: Parameters, names: Collection[str] = ()) -> Chosen:
    """A parametrised test's values, from its name, its parameters, and names that its code uses."""

    def number(*named: str) -> float | None:
        return next((parameters[name] for name in named if isinstance(parameters.get(name), int | float)), None)

    variable = "varlen" in test or "cu_seqlens" in parameters or parameters.get("varlen")
    variable = variable or str(parameters.get("layout")).startswith("var")
    length = parameters.get("T", parameters.get("seq_len", parameters.get("cu_seqlens")))
    ends = [n for n in (length if isinstance(length, list | tuple) else [0, length]) if isinstance(n, int | float)]
    key_heads, value_heads = number("H", "num_heads"), number("HV", "num_v_heads")
    grouped = key_heads is not None and value_heads is not None and value_heads > key_heads
    keys, values = number("K", "D", "head_dim"), number("V", "Dv", "head_v_dim")
    different = (keys is not None and values not in {None, keys}) or number("expand_v") not in {None, 1}
    backward = BACKWARD.search(test) or not {"backward", "grad"}.isdisjoint(names)
    on = {axis: any(bool(parameters.get(name)) for name in named) for axis, named in SWITCHES.items()}
    return {
        **{axis: "yes" if state else "no" for axis, state in on.items()},
        "layout": "variable" if variable else "dense",
        "direction": "backward" if backward else "forward",
        "length": "whole chunks" if all((b - a) % 64 == 0 for a, b in pairwise(ends)) else "part of a chunk",
        "beta": str(parameters.get("beta", "head")),
        "beta_sigmoid": "in kernel" if on["beta_sigmoid"] else "raw",
        "value_heads": "grouped" if grouped else "equal",
        "head_dims": "different" if different else "equal",
        "dtype": str(parameters.get("dtype", "unknown")).removeprefix("torch."),
        "verifier": _verifier(parameters, names),
    }


def _verifier(parameters: Parameters, names: Collection[str]) -> str:
    """How a test decides that an answer is right: by a gradient check, a reference, or only plausibility."""
    named = str(parameters.get("verifier", ""))
    if named in VERIFIERS:
        return named
    words = " ".join(names).lower()
    if "gradcheck" in words:
        return "gradcheck"
    compares = any(word in words for word in ("naive", "reference", "assert_close", "allclose", "ref"))
    return "reference" if compares or not names else "sanity"


def _reachable(chosen: Chosen) -> bool:
    """Whether values can go together: gradient checks need a backward and float32; a safe gate needs a gate."""
    checked = chosen.get("verifier") == "gradcheck"
    return not (
        (checked and chosen.get("direction") == "forward")
        or (checked and chosen.get("dtype") in {"bfloat16", "float16"})
        or (chosen.get("safe_gate") == "yes" and chosen.get("gate") == "no")
    )


SPACE = Space(
    op_type="linear_attention",
    axes={  # each with the mistake that its values show
        "layout": ("dense", "variable"),  # sequences packed without padding
        "direction": ("forward", "backward"),  # gradients have kernels of their own
        "length": ("whole chunks", "part of a chunk"),  # the mask of the last chunk
        "initial_state": ("no", "yes"),  # a state that is taken for zero
        "final_state": ("no", "yes"),  # a state that is not written
        "gate": ("no", "yes"),  # the decay computed inside the kernel
        "beta": ("head", "vector"),  # one step size per head, or one per element
        "beta_sigmoid": ("raw", "in kernel"),  # a step size that is given, or made of a logit in the kernel
        "safe_gate": ("no", "yes"),  # the bounded decay, which has a path of its own
        "qk_norm": ("no", "yes"),  # normalisation inside the kernel
        "value_heads": ("equal", "grouped"),  # which key head a value head reads
        "head_dims": ("equal", "different"),  # D and Dv mixed up
        "verifier": VERIFIERS,  # what would notice a wrong answer
        "dtype": ("bfloat16", "float16", "float32"),  # the precision that users have
    },
    reachable=_reachable,
)


def of_suite(path: Path, *, python: str) -> Coverage:
    """Coverage of a kernel library's tests of linear attention, from their parameters.

    Raises TraceproofError: no test could be collected, or it takes longer than SECONDS.
    """
    source = str(Path(__file__).resolve().parents[1])
    known = [part for part in (source, os.environ.get("PYTHONPATH")) if part]
    environment = for_untrusted() | {"PYTHONPATH": os.pathsep.join(known)}
    command = [python, "-m", "traceproof.coverage", str(path.resolve())]
    try:
        with telling(f"collecting the tests of {path}"):
            done = programs.run(command, environment=environment, seconds=SECONDS)
    except subprocess.TimeoutExpired as error:
        todo = "Give fewer files as --tests."
        raise TraceproofError(f"{path}: its tests were not collected in {SECONDS:g} s", todo=todo) from error
    # a library may print below Python's own stdout
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"test": ')]
    if not rows:
        messages = done.stderr.strip().splitlines()
        problems = [line for line in messages if line.startswith("E  ")] or messages  # prefer pytest's reasons
        todo = "Give an interpreter that has what the tests import as --python."
        raise TraceproofError(f"{path}: no test was collected", problems=problems[-5:], todo=todo)
    records = [(row["test"], read(row["test"], row["parameters"], row["names"])) for row in rows]
    # a test whose code runs backward runs forward first, and compares both
    both = [{**one, "direction": "forward"} for test, one in records if not BACKWARD.search(test)]
    return replace(cover(SPACE, [*(one for _, one in records), *both]), cases=len(rows))


# Run as a program, in the library's environment.


class Collector:
    """A pytest plugin that records each collected test's name, parameters, and names that its code uses."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []

    def pytest_collection_finish(self, session: Any) -> None:  # noqa: ANN401 - pytest's session
        """Record every collected test, with its fixtures' parameters."""
        for item in session.items:
            name, callspec = getattr(item, "originalname", None) or item.name, getattr(item, "callspec", None)
            function, of_case = getattr(item, "function", None), dict(getattr(callspec, "params", {}))
            parameters = _given(function, of_case) | of_case
            self.rows.append({"test": name, "parameters": parameters, "names": _names(function)})


def _given(function: Any, parameters: Parameters) -> dict[str, Any]:  # noqa: ANN401 - a test
    """What a test's code gives for names of SWITCHES: a parameter's value, or whether it is not False or None."""
    given: dict[str, Any] = {}
    with suppress(OSError, TypeError):  # no function of a file
        for name, value in GIVEN.findall(inspect.getsource(function)):
            given[name] = given.get(name) or parameters.get(value, value not in {"False", "None"})
    return given


def _names(function: object) -> list[str]:
    """Names that a test's code uses, also in functions of its module that it calls."""
    used: set[str] = set()
    waiting, scope, home = [function], getattr(function, "__globals__", {}), getattr(function, "__module__", None)
    while waiting:
        names = set(getattr(getattr(waiting.pop(), "__code__", None), "co_names", ())) - used
        used |= names
        waiting += [scope[name] for name in names if getattr(scope.get(name), "__module__", None) == home]
    return sorted(used)


if __name__ == "__main__":
    import pytest

    COLLECTOR = Collector()
    with redirect_stdout(sys.stderr):
        options = ["-q", "-W", "ignore", "-p", "no:cacheprovider", "--collect-only"]
        pytest.main([sys.argv[1], *options], plugins=[COLLECTOR])
    for row in COLLECTOR.rows:
        sys.stdout.write(json.dumps(row, default=str, skipkeys=True) + "\n")
