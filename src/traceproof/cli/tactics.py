"""`traceproof tactics`: judges each backend and each tactic of a ground truth's call separately."""

import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue
from typing import Annotated, Any

import typer

from traceproof.cli import options, run
from traceproof.dataset.definition import Definition
from traceproof.dataset.fetch import fetch
from traceproof.dataset.tree import find, read_tree
from traceproof.environments.building import has_driver, probe, ready, resolve
from traceproof.errors import TraceproofError
from traceproof.programs import nvidia_smi, telling
from traceproof.reasons import Error, Skip, Verdict
from traceproof.run.report import headed, plain
from traceproof.run.schema import WHOLE, ClosedModel, environment_of
from traceproof.run.workers import Environment, Worker
from traceproof.sandbox import Reply, Status
from traceproof.stacks import TRUTHS
from traceproof.text import printable

WIDTH = 200  # characters per line of the table
VISIBLE = "CUDA_VISIBLE_DEVICES"
CORES = 4  # per worker: one draws, solves, compares and waits for the GPU, but packages compile on several
SETUP = "traceproof.tactics:setup"
FIRST = next(iter(TRUTHS))
WRONG_VALUE = f"{ValueError.__name__}: "  # start of the message if a backend refuses a value


class TacticRow(ClosedModel):
    """The verdict on one output of one way of calling a ground truth in one case."""

    definition: str
    implementation: str
    case: str | None  # None: it can not be called here
    backend: str  # empty: the default one
    tactic: str  # operation, name and numbers; empty: the tuner's default
    output: str
    # verdict, reason, message: as in a VerdictRow
    verdict: Verdict
    reason: str | None = None
    message: str = ""
    margin: float | None = None  # used share of the gate's limit

    @property
    def bad(self) -> bool:
        """Whether it is a failure or an error."""
        return self.verdict in {Verdict.FAIL, Verdict.ERROR}


def tactics(  # noqa: PLR0913 - one parameter per option
    names: Annotated[
        list[str] | None, typer.Argument(metavar="[NAME]...", help="Definitions by name; none: all.")
    ] = None,
    *,
    truth: Annotated[str, typer.Option("--truth", help="The ground truth whose kernels are called.")] = FIRST,
    case: options.Cases = None,
    test_sizes: options.Sizes = None,
    seed: options.Seed = None,
    dataset: options.Dataset = None,
    json_file: options.JsonFile = None,
) -> None:
    """Judge every backend and tactic of a ground truth for definitions, each separately, case by case.

    Exit codes: 0 all that run are right, 1 one is wrong or fails, 2 bad use.
    """
    if truth not in TRUTHS:
        raise TraceproofError(f"--truth {truth}: there is no such ground truth; known: {', '.join(TRUTHS)}")
    root, config = run.configured(dataset=run.dataset_in(dataset), test_sizes=test_sizes, seed=seed)
    folder = dataset or fetch(config.dataset, root=root / config.results / "dataset")
    tree = read_tree(folder, naming=names or ())
    entries = [find(tree, name) for name in names] if names else [*tree.definitions.values()]
    definitions = [entry.definition for entry in entries]
    installation = resolve(config, environment_of(truth))
    python = str(ready(installation, root=root, say=run.say))
    with telling("asking its environment"):
        record = {**probe(installation, root=root), "cuda_home": installation.cuda_home}
    here = Environment(name=installation.name, python=python, record=record)
    order = {
        "implementation": truth,
        "device": "cuda" if has_driver() and here.on_gpu else "cpu",
        "dataset": str(Path(folder).absolute()),
        "selection": {"sizes": list(config.test_sizes), "seed": config.seed},
    }
    caches, side_by_side = root / config.results / "compiled", max(1, len(os.sched_getaffinity(0)) // CORES)
    workers: SimpleQueue[Worker] = SimpleQueue()
    gpus = [uuid for (uuid,) in nvidia_smi("uuid")]  # one per worker
    with ExitStack() as stack, ThreadPoolExecutor(side_by_side) as threads:
        for number in range(side_by_side):
            variables = {VISIBLE: gpus[number % len(gpus)]} if gpus and VISIBLE not in os.environ else {}
            at = replace(here, variables=variables)
            worker = Worker(at, SETUP, order, config.limits.of_call(), caches=caches)
            stack.callback(worker.close)
            workers.put(worker)

        def rows_of(definition: Definition) -> list[TacticRow]:
            worker, as_json = workers.get(), definition.as_json()
            try:  # the limit is that of building, since a call may compile
                ask = lambda item: worker.ask({"definition": as_json, **item}, config.limits.build_s)  # noqa: E731
                names: dict[str, Any] = {"definition": definition.name, "implementation": truth}
                return [TacticRow(**names, **row) for row in ways(ask, case or ())]
            finally:
                workers.put(worker)

        futures = {threads.submit(rows_of, definition): definition.name for definition in definitions}
        rows: list[TacticRow] = []
        with telling(f"calling {truth}"):
            for done, future in enumerate(as_completed(futures), 1):
                rows += future.result()
                counts = Counter(str(row.verdict) for row in future.result())
                summary = ", ".join(f"{count} {verdict}" for verdict, count in sorted(counts.items()))
                run.say(f"{done} of {len(futures)}: {futures[future]}: {summary}")
    if not rows:
        todo = "`traceproof show NAME` lists the cases of a definition that was verified."
        raise TraceproofError(f"no definition has a case {', '.join(case or ())}: nothing was called", todo=todo)
    rows.sort(key=lambda row: row.definition)
    value = {"rows": [row.model_dump(mode="json") for row in rows]}
    run.end(json_file, value, table(rows), bad=any(row.bad for row in rows))


def ways(call: Callable[[dict[str, Any]], Reply], only: Sequence[str] = ()) -> Iterator[dict[str, Any]]:
    """Rows of all ways to call: by default, by each backend, by each tactic of each; `only` limits the cases."""

    def ask(item: dict[str, Any]) -> Mapping[str, Any]:
        reply = call(item)
        if reply.status is Status.OK and isinstance(reply.value, Mapping):
            return reply.value
        ended = Error.EXCEPTION if reply.status is Status.ERROR else Error[reply.status.name]
        last = (reply.message.strip().splitlines() or [str(reply.status)])[-1]
        return {"rows": [{"output": WHOLE, "verdict": "error", "reason": ended, "message": last}], "tactics": []}

    plan = ask({})
    if "cases" not in plan:
        yield from ({"case": None, "backend": "", "tactic": "", **row} for row in plan["rows"])
        return
    for case in (planned for planned in plan["cases"] if not only or planned["id"] in only):
        for backend in ("", *plan["backends"]):
            way = {"case": case["id"], "backend": backend}
            first = ask({"case": case, "backend": backend, "tactic": None})
            yield from ({**way, "tactic": "", **row} for row in first["rows"])
            for place, name in first["tactics"]:
                tactic = f"{place[0]}: {name} (tactic {place[2]} of runner {place[1]})"
                answer = ask({"case": case, "backend": backend, "tactic": place})
                yield from ({**way, "tactic": tactic, **row} for row in answer["rows"])


def table(rows: Sequence[TacticRow]) -> str:
    """A table by definition, backend and tactic: how many cases pass, and the message of the first that does not.

    Below it are values that backends refuse as wrong, since the adapter may have caused that.
    """
    kinds = (Verdict.PASS, Verdict.FAIL, Verdict.ERROR, Verdict.SKIP)
    grid = headed("Backends and tactics", ("definition", "backend", "tactic"), (*kinds, "worst margin"), "says")
    groups: dict[tuple[str, str, str], list[TacticRow]] = {}
    for row in rows:
        groups.setdefault((row.definition, row.backend, row.tactic), []).append(row)
    for (name, backend, tactic), members in groups.items():
        counts = Counter(row.verdict for row in members)
        margins = [row.margin for row in members if row.margin is not None]
        odd = sorted((row for row in members if row.verdict is not Verdict.PASS), key=lambda row: not row.bad)
        says = f"{odd[0].case or 'no case'} {odd[0].output}: {odd[0].reason}: {odd[0].message}" if odd else ""
        numbers = [*(str(counts[kind]) for kind in kinds), f"{max(margins):.3g}" if margins else ""]
        names = (name, backend or "by default", printable(tactic) or "by default")
        grid.add_row(*names, *numbers, printable(says)[:200])
    console = plain(WIDTH)
    console.print(grid)
    text = console.export_text()
    refused: dict[tuple[str, str], set[str]] = {}
    for row in rows:
        if row.reason == Skip.UNSUPPORTED and row.message.startswith(WRONG_VALUE):
            refused.setdefault((row.backend, row.message.removeprefix(WRONG_VALUE)), set()).add(row.definition)
    if refused:
        text += "Refused as a wrong value: the backend does not take the case, or our adapter calls it wrongly:\n"
    for (backend, message), named in refused.items():
        text += f"  {backend}: {printable(message)[:WIDTH]} ({', '.join(sorted(named))})\n"
    return text
