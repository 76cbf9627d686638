"""What rules run in a stack's environment, a function per job; its parameters are its options."""

import signal

signal.signal(signal.SIGINT, signal.SIG_DFL)  # until `entry.run`: an interrupted import is no traceback

import os
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import Json

from traceproof.dataset.tree import paused_collection
from traceproof.errors import TraceproofError
from traceproof.files import own_folder, read_sealed
from traceproof.ops import registry
from traceproof.programs import choose_gpu
from traceproof.run import entry
from traceproof.run.job import Job
from traceproof.run.schema import OpTypePlan, workers_of
from traceproof.run.workers import EngineSettings, Environment
from traceproof.sandbox.model import CONNECTIONS, Limits
from traceproof.stacks import LIBRARIES, MAIN
from traceproof.text import printable

if TYPE_CHECKING:
    from traceproof.run.engine import Engine


def cases(
    *,
    dataset: Path,
    stack: Path,
    selection: Json[dict[str, Any]],
    out: Path,
    foreign: Json[dict[str, str]],
    code: str = "",
) -> None:
    """Write a plan per job, and last their index, `out`, beside them.

    `stack` is the torch environment's record, `code` the digest of what plans (empty: all is planned anew),
    `foreign` what packages beside traceproof declare in the driver's environment.

    Raises TraceproofError: they declare something else here.
    """
    here = registry.foreign()
    differing = sorted(name for name in {**foreign, **here} if foreign.get(name) != here.get(name))
    if differing:
        raise TraceproofError(
            f"{', '.join(differing)}: the package that declares it is not the same in .venv and in {sys.prefix}",
            todo="Install it in both: .venv/bin/python -m uv pip install --python "
            f"{shlex.quote(sys.executable)} --no-deps PACKAGE",
        )
    from traceproof.run.plan import PlanSelection, plan

    record = read_sealed(stack)
    gpu = record["device_type"] == "cuda"
    selection["workloads"] = gpu if selection["workloads"] == "auto" else selection["workloads"]
    state = f"{code} {record['digest']}" if code else ""
    plan(dataset, out.parent, PlanSelection.model_validate(selection), code=state, gpu=gpu)


def verify(
    *,
    cases: Path,
    verdicts: Path,
    caches: Path,
    environments: Json[dict[str, Any]],
    implementations: list[str],
    code: str,
    limits: Json[Limits],
    build_seconds: float,
    group: str = "",
    cache: Path | None = None,
    tolerance: Json[float | None] = None,
    repeat: str = "",
    parallel: int = 1,
    force: bool = False,
    weak: bool = False,
) -> None:
    """Write the verdicts of a plan, `cases`: of an op_type, or of one `group` of its definitions.

    `environments` has python, record (or its file) and path of each that is here; `caches` gets what is compiled,
    `cache` the finished rows. `code` is the digest of what rows depend on, `repeat` are options of commands that
    repeat a case. `force` computes what is kept, too; `weak` runs references where isolation is not whole.
    """
    plan = OpTypePlan.read(cases)
    found = {
        name: Environment(
            name=name,
            python=str(Path(one["python"]).absolute()),  # links stay, since they tell a virtual environment
            record=read_sealed(Path(one["record"])) if isinstance(one["record"], str) else one["record"],
            path=tuple(str(Path(folder).absolute()) for folder in one["path"]),
        )
        for name, one in environments.items()
    }
    settings = EngineSettings(
        environments=found,
        limits=limits,
        build_seconds=build_seconds,
        dataset=Path(plan.dataset),
        caches=caches,
        conceal=[verdicts.parent.parent, Path(plan.dataset)],
        code=code,
        tolerance=tolerance,
        weak=weak,
        workers=workers_of(parallel),
    )

    def engine(settings: EngineSettings) -> "Engine":
        if found[MAIN].on_gpu:
            os.environ.setdefault(CONNECTIONS, "1")  # as workers do: processes wait for each other's
            choose_gpu()
        os.environ["OPENBLAS_NUM_THREADS"] = "1"  # NumPy's: with a second thread, a worker can not be forked
        with paused_collection(kept=True), entry.TELLING:
            from traceproof.run.engine import Engine  # imports torch, which takes seconds
        return Engine(settings)

    Job(
        plan=plan,
        group=group,
        implementations=implementations,
        settings=settings,
        engine=engine,
        cache=cache,
        options=repeat,
        force=force,
        parallel=parallel,
    ).verify(verdicts)


def run_tests(
    *,
    cases: list[Path],
    tolerance: Json[float | None],
    sizes: list[str],
    stack: Path,
    dataset: Path,
    caches: Path,
    limits: Json[Limits],
    options: Json[list[str]],
    parallel: int,
    rows: Path,
) -> None:
    """Generate an op_type's tests and run them; a failing one is a row: the report decides what is a finding.

    `cases` are the plans of the op_type's jobs, `stack` the record of the stack, `options` are pytest's. What the
    tests compile stays in a folder of their own below `caches`, since references run beside it.
    """
    from traceproof.environments import jit
    from traceproof.testgen import generate, running

    record = read_sealed(stack)
    plans, stack_name = list(map(OpTypePlan.read, cases)), record["stack"]
    digests = {name: entry.digest for plan in plans for name, entry in plan.whole.items()}
    op_type = plans[0].op_type
    own = caches / "tests" / f"{op_type}-{stack_name}"
    own.mkdir(parents=True, exist_ok=True)
    on_gpu = record["device_type"] == "cuda"
    environment = Environment(name=stack_name, python=sys.executable, record=record)
    with own_folder() as scratch:
        wanted = generate.GenerateOptions(
            root=dataset, out=scratch, definitions=tuple(digests), sizes=tuple(sizes), tolerance=tolerance
        )
        generate.generate(wanted, generate.Divergences(), planned=True)
        order = running.OpTypeTests(
            folder=wanted.place,
            op_type=op_type,
            stack=stack_name,
            dataset=dataset,
            digests=digests,
            options=options,
            limits=limits,
            variables={LIBRARIES: jit.environment(caches, record)[LIBRARIES]} if on_gpu else {},
        )
        found = list(running.run_tests(order, environment, caches=own, parallel=parallel))
    failed = [row for row in found if row["outcome"] in running.BAD]
    sys.stderr.write(f"tests      {op_type} in {stack_name}: {len(found)} run, {len(failed)} not passed\n")
    sys.stderr.write("".join(f"  {printable(running.failure_line(row))}\n" for row in failed[: running.SHOWN]))
    running.write_rows(found, rows)


if __name__ == "__main__":
    entry.main()
