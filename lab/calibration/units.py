"""A calibration as units of one definition and one seed: measured side by side, kept, and put together."""

from __future__ import annotations

import json
import multiprocessing
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
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
    definitions: Sequence[Definition], *, seeds: int, wrong_seeds: int, ids: Sequence[str] = ()
) -> list[Unit]:
    """All units, those that are likely to take longest first."""
    count = max(seeds, wrong_seeds)
    found = [Unit(one, seed, seed < wrong_seeds, tuple(ids)) for one in definitions for seed in range(count)]
    sizes = {one.name: memory(one, SIZES) for one in definitions}
    return sorted(found, key=lambda unit: (unit.wrong, sizes[unit.definition.name]), reverse=True)


def run(found: Sequence[Unit], folder: Path, *, jobs: int) -> Iterator[tuple[Unit, BaseException | None]]:
    """Measure the units that are not kept yet, each in one of `jobs` processes; yields them as they end.

    A unit that raises is yielded with what it raised, and nothing is kept of it. No job: nothing is measured.
    """
    folder.mkdir(parents=True, exist_ok=True)
    missing = [unit for unit in found if not unit.path(folder).exists()]
    if not jobs or not missing:
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, mp_context=context, initializer=_single) as pool:
        futures = {
            pool.submit(_measured, unit.definition.as_json(), unit.seed, unit.seed + unit.wrong, unit.ids): unit
            for unit in missing
        }
        for future in as_completed(futures):
            unit, error = futures[future], future.exception()
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
    sizes = ALL_SIZES if ids else SIZES
    return asdict(measure(chosen, first_seed=seed, seeds=seed + 1, wrong_seeds=wrong_seeds, sizes=sizes, ids=ids))


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
