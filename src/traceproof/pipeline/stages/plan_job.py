"""Planning by a worker of the run: the job itself has no torch, whose import takes longer than most plans."""

from collections.abc import Callable, Mapping
from contextlib import chdir
from pathlib import Path
from typing import Any

from traceproof.dataset.tree import read_tree
from traceproof.errors import TraceproofError
from traceproof.pipeline.stages.plan_selection import Selection, selected
from traceproof.pipeline.stages.shards import Split
from traceproof.pipeline.stages.stack_workers import OWN_CODE
from traceproof.worker import Isolation, Pool, Status

SETUP = "traceproof.pipeline.stages.plan_job:setup"
RUNS_INIT = "init"  # the answer in place of plans where definitions make their inputs by code of their own
PLANS = "plans"


def planned(  # noqa: PLR0913 - as `plan`
    dataset: Path, out: Path, selection: Selection, split: Split, pool: Pool, *, code: str = ""
) -> list[Path] | None:
    """The plans, as `plan` writes them; `code` is the digest of all that plans, empty: all is planned anew.

    None: definitions bring an `init`, which is run while planning, in workers that a worker can not have. Raises
    TraceproofError: as `plan` does.
    """
    item = {
        "dataset": str(dataset),
        "out": str(out),
        "selection": selection.as_json(),
        "split": {"slots": split.slots, "actors": str(split.actors), "gpu": split.gpu},
        "code": code,
        "folder": str(Path.cwd()),
    }
    (outcome,) = pool.run_items(
        setup=SETUP, payload=None, items=[item], limits=OWN_CODE, isolation=Isolation.TRUSTED
    )
    if outcome.status is not Status.OK:
        raise RuntimeError(f"planning: {outcome.status}: {outcome.message}")
    if RUNS_INIT in outcome.value:
        return None
    if PLANS not in outcome.value:
        raise TraceproofError.of_json(outcome.value)
    return [Path(path) for path in outcome.value[PLANS]]


def setup(payload: None, scratch: Path) -> Callable[[Mapping[str, Any]], dict[str, Any]]:
    """Called once in a worker; the result plans what an item says."""
    del payload, scratch
    from traceproof.pipeline.stages.plan import plan_tree  # imports torch

    def run(item: Mapping[str, Any]) -> dict[str, Any]:
        selection = Selection.of_json(item["selection"])
        split = Split(**item["split"] | {"actors": Path(item["split"]["actors"])})
        with chdir(item["folder"]):
            try:
                tree = read_tree(Path(item["dataset"]))
                names = [name for group in selected(tree, selection).values() for name in group]
                if any(tree.definitions[name].definition.init is not None for name in names):
                    return {RUNS_INIT: True}
                plans = plan_tree(tree, Path(item["out"]), selection, None, split, item["code"])
                return {PLANS: [str(path) for path in plans]}
            except TraceproofError as error:
                return error.as_json()

    return run
