"""Error rates of our judge and of gates that others judge by, over definitions, seeds and the cases of a run.

A calibration is made of units of one definition and one seed: measured side by side, kept, and put together.
"""

from __future__ import annotations

import json
import multiprocessing
import resource
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from traceproof.dataset.definition import Definition
from traceproof.judge.arbitration import generic_mutants
from traceproof.judge.metrics import metrics, row_for
from traceproof.judge.output import judge_output
from traceproof.ops import registry
from traceproof.ops.base import Tensors
from traceproof.ops.cases import ALL_SIZES
from traceproof.ops.compare import Comparison, Quantised
from traceproof.ops.formula import Variant
from traceproof.reasons import Verdict
from traceproof.run.case import SolvedCase, solved
from variants import variants_of

# actual, expected in actual's dtype, how our judge compares this output
Rival = Callable[[torch.Tensor, torch.Tensor, Comparison], bool]


def specification(actual: torch.Tensor, expected: torch.Tensor, comparison: Comparison) -> bool:
    """The specification's table: atol and rtol by dtype, hit ratio for quantised outputs."""
    row = row_for(actual.dtype, quantised=isinstance(comparison, Quantised), tolerance=None)
    return bool(metrics(actual.double(), expected.double(), row)["within_specification"])


def cosine(actual: torch.Tensor, expected: torch.Tensor, comparison: Comparison) -> bool:
    """Cosine similarity above 0.99 over the positions that are finite in what is expected."""
    del comparison
    finite = torch.isfinite(expected)
    a, e = actual[finite].double(), expected[finite].double()
    if torch.equal(a, e):
        return True
    return float(a @ e / (a.norm() * e.norm())) > 0.99  # a NaN compares as False


def torch_defaults(actual: torch.Tensor, expected: torch.Tensor, comparison: Comparison) -> bool:
    """torch.testing.assert_close with its defaults for the dtype."""
    del comparison
    try:
        torch.testing.assert_close(actual, expected)
    except AssertionError:
        return False
    return True


RIVALS: Mapping[str, Rival] = {
    "specification": specification,
    "cosine > 0.99": cosine,
    "torch.testing": torch_defaults,
}


OURS = "traceproof"


@dataclass(slots=True)
class Tally:
    """Over many runs of one answer: in how many it was refused by each gate.

    A run is one definition and seed: it is refused when any output of any of its cases is. `hidden` counts runs in
    which a wrong answer gave the same bits as the right one in every case, or could not be given at all: it is
    equivalent there, so not counted. `wronged` names the runs that our judge got wrong.
    """

    runs: int = 0
    hidden: int = 0
    refused: dict[str, int] = field(default_factory=dict)
    wronged: list[str] = field(default_factory=list)

    def add(self, refused: Mapping[str, bool], label: str, *, wanted: bool) -> None:
        """Count one run of an answer that is to be refused, or not."""
        self.runs += 1
        for gate, value in refused.items():
            self.refused[gate] = self.refused.get(gate, 0) + value
        if refused[OURS] != wanted:
            self.wronged.append(label)


@dataclass(slots=True)
class Rates:
    """Tallies of one op_type by answer."""

    op_type: str
    definitions: list[str] = field(default_factory=list)
    wrong: dict[str, Tally] = field(default_factory=dict)
    right: dict[str, Tally] = field(default_factory=dict)


def memory(definition: Definition, sizes: Sequence[str]) -> int:
    """Bytes that the largest case needs, by the op's estimate."""
    op = registry.get(definition.op_type).of_form(definition)
    return max((op.memory(definition, case) for case in op.planned(definition, sizes=sizes, seed=0)), default=0)


def measure(  # noqa: PLR0913 - what is measured, on which cases
    definitions: Sequence[Definition],
    *,
    seeds: int,
    wrong_seeds: int,
    sizes: Sequence[str],
    ids: Sequence[str] = (),
    first_seed: int = 0,
) -> Rates:
    """Rates over definitions of one op_type: right answers on seeds below `seeds`, wrong ones below the other.

    With `ids`, on these cases of `sizes` alone.
    """
    op_type = definitions[0].op_type
    if op_type not in registry.known():
        raise KeyError(f"nobody declares {op_type}")
    right = variants_of(op_type)
    rates = Rates(op_type, [definition.name for definition in definitions])
    mutants = (*generic_mutants(right[0]), *registry.get(op_type).mutants)
    for definition in definitions:
        for seed in range(first_seed, seeds):
            subjects = list(solved(definition, tuple(sizes), seed, ids=ids))
            baseline = [right[0].make(subject) for subject in subjects]
            label = f"{definition.name} seed {seed}"
            for answers, tallies in ((right, rates.right), (mutants, rates.wrong)):
                for answer in answers if answers is right or seed < wrong_seeds else ():
                    tally = tallies.setdefault(answer.name, Tally())
                    _count(answer, subjects, baseline if answers is mutants else None, tally, label)
    return rates


def _count(
    answer: Variant,
    subjects: Iterable[SolvedCase],
    baseline: Sequence[Tensors | None] | None,
    tally: Tally,
    label: str,
) -> None:
    refused: dict[str, bool] = {}
    for index, subject in enumerate(subjects):
        outputs = answer.make(subject)
        if outputs is None or (baseline is not None and _same(outputs, baseline[index])):
            continue
        for gate, value in judge(subject, outputs).items():
            refused[gate] = refused.get(gate, False) or value
    if refused:
        tally.add(refused, label, wanted=baseline is not None)
    else:
        tally.hidden += 1


def _same(outputs: Tensors, right: Tensors | None) -> bool:
    return right is not None and all(
        value.shape == right[name].shape and value.dtype == right[name].dtype and torch.equal(value, right[name])
        for name, value in outputs.items()
    )


def judge(subject: SolvedCase, outputs: Tensors) -> dict[str, bool]:
    """Which gates refuse the outputs of one case; those that can not judge it are left out."""
    rivals = {} if subject.trials else RIVALS  # no tolerance fits random draws
    refused = dict.fromkeys((OURS, *rivals), False)
    for name in subject.definition.outputs:
        expected = subject.expected(name)
        assert expected.comparison is not None
        refused[OURS] |= judge_output(outputs[name], expected, tolerance=None).verdict != Verdict.PASS
        same_shape = expected.oracle[""].shape == outputs[name].shape
        given, rounded = outputs[name], expected.oracle[""].to(outputs[name].dtype)
        if given.dtype.itemsize == 1:  # PyTorch compares no such values
            given, rounded = given.float(), rounded.float()
        for rival, passes in rivals.items():
            refused[rival] |= not same_shape or not passes(given, rounded, expected.comparison)
    return refused


SIZES = ("small", "medium")


@dataclass(frozen=True, slots=True)
class Unit:
    """One definition on the cases of one seed, all or those of `ids`; wrong answers are tried where `wrong`."""

    definition: Definition
    seed: int
    wrong: bool
    ids: tuple[str, ...] = ()

    def path(self, folder: Path) -> Path:
        """Where its rates are kept. A unit with wrong answers and one without are two."""
        kind = "both" if self.wrong else "right"
        return folder / ".".join([self.definition.name, str(self.seed), kind, *self.ids, "json"])


def units(
    definitions: Sequence[Definition],
    *,
    seeds: int,
    wrong_seeds: int,
    ids: Sequence[str] = (),
    first_seed: int = 0,
) -> list[Unit]:
    """All units by seed, so that a run cut off has the same seeds of all; the largest of a seed first."""
    count = range(first_seed, max(seeds, wrong_seeds))
    found = [Unit(one, seed, seed < wrong_seeds, tuple(ids)) for one in definitions for seed in count]
    sizes = {one.name: memory(one, SIZES) for one in definitions}
    return sorted(found, key=lambda unit: (unit.seed, -sizes[unit.definition.name]))


def run(
    found: Sequence[Unit], folder: Path, *, jobs: int, seconds: float = float("inf")
) -> Iterator[tuple[Unit, BaseException | None]]:
    """Measure the units that are not kept yet, each in one of `jobs` processes; yields them as they end.

    A unit that raises is yielded with what it raised, and nothing is kept of it. No job: nothing is measured.
    After `seconds` no unit is started.
    """
    folder.mkdir(parents=True, exist_ok=True)
    missing = [unit for unit in found if not unit.path(folder).exists()]
    if not jobs or not missing:
        return
    context = multiprocessing.get_context("spawn")
    waiting, end = iter(missing), time.monotonic() + seconds
    running: dict[Future[dict[str, Any]], Unit] = {}
    with ProcessPoolExecutor(jobs, mp_context=context, initializer=_single) as pool:
        while True:
            for unit in islice(waiting, jobs - len(running) if time.monotonic() < end else 0):
                given = unit.definition.as_json(), unit.seed, unit.seed + unit.wrong, unit.ids
                running[pool.submit(_measured, *given)] = unit
            if not running:
                return
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                unit, error = running.pop(future), future.exception()
                if error is None:
                    path = unit.path(folder)
                    part = path.with_suffix(".part")
                    part.write_text(json.dumps(future.result()), encoding="utf-8")
                    part.replace(path)
                yield unit, error


def _single() -> None:
    torch.set_num_threads(1)


def _measured(definition: dict[str, Any], seed: int, wrong_seeds: int, ids: Sequence[str]) -> dict[str, Any]:
    chosen = [Definition.model_validate(definition)]
    sizes, start = ALL_SIZES if ids else SIZES, time.process_time()
    rates = measure(chosen, first_seed=seed, seeds=seed + 1, wrong_seeds=wrong_seeds, sizes=sizes, ids=ids)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20  # of all units of the process so far
    return {**asdict(rates), "cpu_s": time.process_time() - start, "peak_gib": peak}


def together(op_type: str, found: Sequence[Unit], folder: Path) -> Rates:
    """The rates of an op_type out of its units that are kept, in the order of definitions and seeds."""
    rates = Rates(op_type)
    for unit in sorted(found, key=lambda unit: (unit.definition.name, unit.seed)):
        path = unit.path(folder)
        if unit.definition.op_type == op_type and path.exists():
            entry = json.loads(path.read_text(encoding="utf-8"))
            rates.definitions += [name for name in entry["definitions"] if name not in rates.definitions]
            _add(rates.right, entry["right"])
            _add(rates.wrong, entry["wrong"])
    return rates


def _add(tallies: dict[str, Tally], more: Mapping[str, Mapping[str, Any]]) -> None:
    for name, entry in more.items():
        tally = tallies.setdefault(name, Tally())
        tally.runs += entry["runs"]
        tally.hidden += entry["hidden"]
        tally.wronged += entry["wronged"]
        for gate, count in entry["refused"].items():
            tally.refused[gate] = tally.refused.get(gate, 0) + count


def counts(found: Sequence[Unit], folder: Path) -> str:
    """Table of what is kept of some units: runs, refusals of right answers, wrong ones let through, and time."""
    lines = ["op_type | definitions | seeds | right runs | refused | wrong runs | passed | CPU-s | GiB"]
    lines.append("---" + " | ---:" * lines[0].count("|"))
    total = [0] * 4
    for op_type in sorted({unit.definition.op_type for unit in found}):
        mine = [unit for unit in found if unit.definition.op_type == op_type]
        kept = [(unit, json.loads(path.read_text())) for unit in mine if (path := unit.path(folder)).exists()]
        rates = together(op_type, mine, folder)
        row = [
            sum(tally.runs for tally in rates.right.values()),
            sum(len(t.wronged) for t in rates.right.values()),
        ]
        row += [
            sum(tally.runs for tally in rates.wrong.values()),
            sum(len(t.wronged) for t in rates.wrong.values()),
        ]
        total = [whole + part for whole, part in zip(total, row, strict=True)]
        seeds = sorted({unit.seed for unit, _ in kept})
        span = f"{len(seeds)} ({seeds[0]} to {seeds[-1]})" if seeds else "0"
        cost = sum(entry.get("cpu_s", 0) for _, entry in kept)
        peak = max((entry.get("peak_gib", 0) for _, entry in kept), default=0)
        cells = (op_type, len(rates.definitions), span, *row, f"{cost:.0f}", f"{peak:.1f}")
        lines.append(" | ".join(map(str, cells)))
    lines.append(" | ".join(map(str, ("all", "", "", *total, "", ""))))
    return "\n".join(f"| {line} |" for line in lines)
