"""`traceproof tactics`: each backend and each tactic of a ground truth's call, judged by itself."""

import io
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from traceproof.cli import options, run
from traceproof.dataset.fetch import fetch
from traceproof.dataset.tree import find, read_tree
from traceproof.environments.building import has_driver, probe, ready, resolve
from traceproof.programs import telling
from traceproof.reasons import Error, Verdict
from traceproof.run.report import headed
from traceproof.run.schema import WHOLE, ClosedModel, environment_of
from traceproof.run.workers import Environment, Worker
from traceproof.sandbox import Reply, Status
from traceproof.stacks import TRUTHS
from traceproof.text import printable

WIDTH = 180  # of the table
SETUP = "traceproof.tactics:setup"
FIRST = next(iter(TRUTHS))
Truth = Annotated[str, typer.Option("--truth", help="The ground truth whose kernels are called.")]


class TacticRow(ClosedModel):
    """What came of one output of one way of calling a ground truth in one case."""

    definition: str
    implementation: str
    case: str | None  # None: nothing can be called here
    backend: str  # empty: the one that is called by default
    tactic: str  # its operation and name, and its numbers; empty: what the tuner takes by default
    output: str
    # verdict, reason, message: as in a verdict's row
    verdict: Verdict
    reason: str | None = None
    message: str = ""
    margin: float | None = None  # the share of the gate's limit that was used

    @property
    def bad(self) -> bool:
        """Whether it is a failure or an error."""
        return self.verdict in {Verdict.FAIL, Verdict.ERROR}


def tactics(  # noqa: PLR0913 - one parameter per option
    name: Annotated[str, typer.Argument(metavar="NAME", help="A definition's name.")],
    *,
    truth: Truth = FIRST,
    case: options.Cases = None,
    test_sizes: options.Sizes = None,
    seed: options.Seed = None,
    dataset: options.Dataset = None,
    json_file: options.JsonFile = None,
) -> None:
    """Judge every backend and tactic of a ground truth for a definition, each by itself, case by case.

    Exit codes: 0 all that run are right, 1 one is wrong or fails, 2 bad use.
    """
    root, config = run.configured(dataset=run.dataset_in(dataset), test_sizes=test_sizes, seed=seed)
    folder = dataset or fetch(config.dataset, root=root / config.results / "dataset")
    definition = find(read_tree(folder, naming=[name]), name).definition
    installation = resolve(config, environment_of(truth))
    python = str(ready(installation, root=root, say=run.say))
    with telling("asking its environment"):
        record = {**probe(installation, root=root), "cuda_home": installation.cuda_home}
    here = Environment(name=installation.name, python=python, record=record)
    order = {
        "implementation": truth,
        "definition": definition.as_json(),
        "device": "cuda" if has_driver() and here.on_gpu else "cpu",
        "dataset": str(Path(folder).absolute()),
        "selection": {"sizes": list(config.test_sizes), "seed": config.seed},
    }
    limits = config.limits.of_call()
    with Worker(here, SETUP, order, limits, caches=root / config.results / "compiled") as worker:
        asked = lambda item: worker.ask(item, config.limits.build_s)  # noqa: E731 - a call may compile
        with telling(f"calling {truth} for {name}"):
            rows = [TacticRow(definition=name, implementation=truth, **row) for row in ways(asked, case or ())]
    value = {"rows": [row.model_dump(mode="json") for row in rows]}
    run.end(json_file, value, table(rows), bad=any(row.bad for row in rows))


def ways(asked: Callable[[dict[str, Any]], Reply], only: Sequence[str] = ()) -> Iterator[dict[str, Any]]:
    """Rows of all ways of calling: by default, by each backend, by each tactic of each, in the cases of `only`."""

    def ask(item: dict[str, Any]) -> Mapping[str, Any]:
        reply = asked(item)
        if reply.status is Status.OK and isinstance(reply.value, Mapping):
            return reply.value
        ended = Error.EXCEPTION if reply.status is Status.ERROR else Error[reply.status.name]
        last = (reply.message.strip().splitlines() or [str(reply.status)])[-1]
        return {"rows": [{"output": WHOLE, "verdict": "error", "reason": ended, "message": last}], "tactics": []}

    plan = ask({})
    if "cases" not in plan:
        yield from ({"case": None, "backend": "", "tactic": "", **row} for row in plan["rows"])
        return
    for case in (one for one in plan["cases"] if not only or one["id"] in only):
        for backend in ("", *plan["backends"]):
            way = {"case": case["id"], "backend": backend}
            first = ask({"case": case, "backend": backend, "tactic": None})
            yield from ({**way, "tactic": "", **row} for row in first["rows"])
            for place, name in first["tactics"]:
                told = f"{place[0]}: {name} (tactic {place[2]} of runner {place[1]})"
                found = ask({"case": case, "backend": backend, "tactic": place})
                yield from ({**way, "tactic": told, **row} for row in found["rows"])


def table(rows: Sequence[TacticRow]) -> str:
    """The rows by backend and tactic: in how many cases each passes, and what the first other one says."""
    out = io.StringIO()
    kinds = (Verdict.PASS, Verdict.FAIL, Verdict.ERROR, Verdict.SKIP)
    grid = headed("Backends and tactics", ("backend", "tactic"), (*kinds, "worst margin"), "says")
    groups: dict[tuple[str, str], list[TacticRow]] = {}
    for row in rows:
        groups.setdefault((row.backend, row.tactic), []).append(row)
    for (backend, tactic), members in groups.items():
        counts = Counter(row.verdict for row in members)
        margins = [row.margin for row in members if row.margin is not None]
        other = next((row for row in members if row.bad), None)
        other = other or next((row for row in members if row.verdict is Verdict.SKIP), None)
        says = "" if other is None else f"{other.case} {other.output}: {other.reason}: {other.message}"
        numbers = [*(str(counts[kind]) for kind in kinds), f"{max(margins):.3g}" if margins else ""]
        names = (backend or "by default", printable(tactic) or "by default")
        grid.add_row(*names, *numbers, printable(says)[:200])
    Console(file=out, width=WIDTH).print(grid)
    return out.getvalue()
