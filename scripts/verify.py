"""Rule `verify`: the verdicts of one op_type, or of a group of its definitions."""

from __future__ import annotations

import argparse
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from traceproof.codedigest import verdict_code
from traceproof.files import read_sealed
from traceproof.ops import registry
from traceproof.programs import nvidia_smi
from traceproof.run import entry
from traceproof.run.implementations import for_op_type
from traceproof.run.job import Computes, Job, Progress
from traceproof.run.records import OpTypePlan
from traceproof.sandbox import Limits
from traceproof.sandbox.model import CONNECTIONS
from traceproof.stacks import MAIN

if TYPE_CHECKING:
    from traceproof.run.engine import Settings

PARSER = argparse.ArgumentParser(description=__doc__)
PARSER.add_argument("--cases", type=Path, required=True, help="the op_type's plan")
PARSER.add_argument("--group", default="", help="which of the op_type's jobs this is; empty: its only one")
PARSER.add_argument("--verdicts", type=Path, required=True)
PARSER.add_argument("--cache", type=Path, help="the file of finished rows; absent: none are kept")
PARSER.add_argument("--caches", type=Path, required=True, help="folder for what is compiled on the way")
PARSER.add_argument("--environments", required=True, help="JSON, or a file of it: by name python, record, ...")
PARSER.add_argument("--implementations", nargs="*", default=[], help="empty: all of the op_type")
PARSER.add_argument("--code", default="", help="digest of the code that the rows depend on")
PARSER.add_argument("--limits", type=json.loads, required=True, help="JSON, `limits` of config.yaml")
PARSER.add_argument("--tolerance", type=json.loads, default=None, help="a number, or null")
PARSER.add_argument("--repeat", default="", help="further options of commands that repeat a case")
PARSER.add_argument("--lanes", type=int, default=1, help="definitions that run side by side")
PARSER.add_argument("--force", type=int, default=0, help="1: compute what is kept, too")
PARSER.add_argument(
    "--allow-weak-isolation", action="store_true", help="run references where isolation is not whole"
)
PARSER.add_argument("--log", type=Path, required=True)


def main() -> None:
    """Verify."""
    plan = OpTypePlan.read(options.cases).of_group(options.group)
    code = options.code or verdict_code(plan.op_type, registry.file_of(plan.op_type))
    environments = environments_in(options.environments)

    @contextmanager
    def engine(progress: Progress) -> Iterator[Computes]:
        if environments[MAIN]["record"]["device_type"] == "cuda":
            choose_gpu()
        from traceproof.run.engine import Engine  # imports torch, which takes seconds

        with Engine(settings(plan, environments, code, progress)) as made:
            yield made

    Job(
        plan=plan,
        group=options.group,
        implementations=options.implementations or for_op_type(plan.op_type),
        code=code,
        records={name: one["record"] for name, one in environments.items()},
        engine=engine,
        cache=options.cache,
        tolerance=options.tolerance,
        options=options.repeat,
        weak=options.allow_weak_isolation,
        force=bool(options.force),
        lanes=options.lanes,
    ).verify(options.verdicts)


def environments_in(given: str) -> dict[str, dict[str, Any]]:
    """The environments that this machine can use, by name, their records read."""
    text = given if given.lstrip().startswith("{") else Path(given).read_text(encoding="utf-8")
    found: dict[str, dict[str, Any]] = json.loads(text)
    for one in found.values():
        if isinstance(one["record"], str):
            one["record"] = read_sealed(Path(one["record"]))
        python = shutil.which(one["python"]) or one["python"]
        one["python"] = str(Path(python).absolute())  # links stay, since they tell a virtual environment
        one["path"] = [str(Path(folder).absolute()) for folder in one.get("path", [])]
    return found


def settings(plan: OpTypePlan, environments: Mapping[str, Any], code: str, progress: Progress) -> Settings:
    """What the engine runs with."""
    from traceproof.run.engine import Settings
    from traceproof.run.workers import environments_of

    limits = options.limits
    return Settings(
        environments=environments_of(environments),
        limits=Limits(
            seconds=limits["wall_s"],
            memory_bytes=int(limits["memory_gb"] * 2**30),
            output_bytes=int(limits["output_mb"] * 2**20),
        ),
        build_seconds=limits["build_s"],
        dataset=Path(plan.dataset),
        caches=options.caches,
        scratch=options.verdicts.parent.parent,
        conceal=[options.verdicts.parent.parent, Path(plan.dataset)],
        code=code,
        tolerance=options.tolerance,
        weak=options.allow_weak_isolation,
        progress=progress,
    )


def choose_gpu() -> None:
    """Have this process see the GPU with the most free memory, of equal ones another than others do.

    It sets up one channel to it, as workers do: processes wait for each other's.
    """
    os.environ.setdefault(CONNECTIONS, "1")
    rows = [(int(free), uuid) for uuid, free in nvidia_smi("uuid,memory.free") if free.isdigit()]
    if len(rows) > 1 and "CUDA_VISIBLE_DEVICES" not in os.environ:
        best = [uuid for free, uuid in rows if free == max(rows)[0]]
        os.environ["CUDA_VISIBLE_DEVICES"] = best[os.getpid() % len(best)]


if __name__ == "__main__":
    options = PARSER.parse_args()
    entry.run(main, log=options.log)
