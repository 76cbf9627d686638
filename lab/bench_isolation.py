"""What isolating references costs: the same cases with isolation, with processes only, and with neither.

"together" runs all definitions in one worker without isolation, as our own code runs; "apart" gives each
definition a worker of its own with limits only; "isolated" is what a run does. References run without isolation
here: use a dataset that you trust.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from traceproof.pipeline.stages.actor import SETUP_MANY
from traceproof.pipeline.stages.plan import plan
from traceproof.pipeline.stages.plan_selection import Selection
from traceproof.pipeline.stages.stack_workers import PRELOAD
from traceproof.worker import Isolation, ItemOutcome, Limits, Pool, Status
from traceproof.worker.sandbox import LAYERS

Definitions = dict[str, dict[str, Any]]
Mode = Callable[[Definitions, Path], Iterator[ItemOutcome]]
LIMITS = Limits(seconds=300.0)
GIVEN = {"actor": "reference", "device": "cpu", "threads": 1}


def together(pool: Pool, dataset: Path) -> Mode:
    """All definitions in one worker that is not shut in."""

    def run(chosen: Definitions, scratch: Path) -> Iterator[ItemOutcome]:
        definitions = {name: entry["definition"] for name, entry in chosen.items()}
        items = [item | {"definition": name} for name, entry in chosen.items() for item in _items(entry)]
        payload = GIVEN | {"dataset": str(dataset), "definitions": definitions}
        yield from pool.run_items(
            setup=SETUP_MANY,
            payload=payload,
            items=items,
            limits=LIMITS,
            isolation=Isolation.TRUSTED,
            scratch=scratch,
        )

    return run


def apart(pool: Pool, dataset: Path) -> Mode:
    """A worker a definition, shut in as far as the pool does it."""

    def run(chosen: Definitions, scratch: Path) -> Iterator[ItemOutcome]:
        for name, entry in chosen.items():
            payload = GIVEN | {"dataset": str(dataset), "definitions": {name: entry["definition"]}}
            items = [item | {"definition": name} for item in _items(entry)]
            yield from pool.run_items(
                setup=SETUP_MANY, payload=payload, items=items, limits=LIMITS, scratch=scratch
            )

    return run


def _items(entry: dict[str, Any]) -> list[dict[str, Any]]:
    planned = [one for one in entry["cases"] if one["skip"] is None]
    return [{"case": one["case"], "key": str(index), "repeat": one["repeat"]} for index, one in enumerate(planned)]


def main() -> int:
    """Print a table. 1 if the modes do not agree on how many cases end well."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dataset", type=Path, required=True)
    parser.add_argument("--op-type", nargs="*", default=())
    parser.add_argument("--sizes", nargs="*", default=("small", "medium"))
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        selection = Selection(op_types=tuple(options.op_type), sizes=tuple(options.sizes))
        chosen: Definitions = {}
        for path in plan(options.dataset, folder / "cases", selection):
            chosen |= json.loads(path.read_text(encoding="utf-8"))["definitions"]
        op_types = sorted({entry["definition"]["op_type"] for entry in chosen.values()})
        preload = (*PRELOAD, *(f"traceproof.ops.{op_type}.oracle" for op_type in op_types))
        started = time.perf_counter()
        shut_in = stack.enter_context(Pool(preload=preload))
        shut_in.layers()
        start = time.perf_counter() - started
        open_pool = stack.enter_context(Pool(preload=preload, without=LAYERS))
        modes = {
            "together": together(open_pool, options.dataset),
            "apart": apart(open_pool, options.dataset),
            "isolated": apart(shut_in, options.dataset),
        }
        seconds: dict[str, list[float]] = {name: [] for name in modes}
        well = dict.fromkeys(modes, 0)
        for turn in range(options.rounds + 1):
            for name, mode in modes.items():
                with tempfile.TemporaryDirectory(dir=folder) as scratch:
                    started = time.perf_counter()
                    well[name] = sum(outcome.status is Status.OK for outcome in mode(chosen, Path(scratch)))
                    if turn:  # the first starts the interpreters
                        seconds[name].append(time.perf_counter() - started)
        sys.stdout.write(f"{shut_in.line()}\n\n{_table(seconds, well, len(chosen))}")
        sys.stdout.write(f"\nOnce a run: {start:.2f} s until the pool that shuts in is up, torch imported.\n")
    return int(len(set(well.values())) > 1)


def _table(seconds: dict[str, list[float]], well: dict[str, int], definitions: int) -> str:
    lines = [
        "| mode | cases that end well | seconds: least | median | most | more a definition, ms: least | median |"
    ]
    lines += ["|---|---:|---:|---:|---:|---:|---:|"]
    for name, values in seconds.items():
        found = [min(values), statistics.median(values), max(values)]
        more = [1000 * (of(values) - of(seconds["together"])) / definitions for of in (min, statistics.median)]
        cells = [name, str(well[name]), *(f"{one:.2f}" for one in found), *(f"{one:.0f}" for one in more)]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
