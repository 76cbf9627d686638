"""A calibration as units of one definition and one seed: measured side by side, kept, and put together."""

from __future__ import annotations

import json
import multiprocessing
import resource
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from calibration.measure import Rates, Tally, measure, memory
from traceproof.dataset.definition import Definition
from traceproof.ops.cases import ALL_SIZES

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
