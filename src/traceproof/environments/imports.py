"""Whether an environment holds all that its ground truths' adapters name, and what it lacks if not."""

import json
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from traceproof import programs
from traceproof.environments import toolkit
from traceproof.environments.building import FOLDER, has_driver
from traceproof.stacks import READER, truths_of

HEADER = "lib/python*/site-packages/nvidia/cu*/include/cuda.h"
DRIVER = f"{toolkit.STUB}.1"
READS_MODELS = "traceproof.extract.bootstrap"


@dataclass(frozen=True, slots=True, kw_only=True)
class Imports:
    """What came of importing an environment's entry points."""

    names: tuple[str, ...]  # all of them
    behind_driver: tuple[str, ...]  # those that lack nothing but the NVIDIA driver's library
    problems: Mapping[str, str]  # those that can not be imported, with the reason


def check(environment: str, *, root: Path) -> Imports:
    """Import every entry point in .venvs/<environment>.

    What fails on a machine without a driver is imported once more with a stub of the driver's library: what then
    succeeds lacks that library alone.
    """
    folder = root / FOLDER / environment
    found = _ask(environment, root=root)
    problems = {name: problem for name, problem in found.items() if problem is not None}
    if not problems or has_driver():
        return Imports(names=tuple(found), behind_driver=(), problems=problems)
    with tempfile.TemporaryDirectory() as scratch:
        for header in folder.glob(HEADER):
            toolkit.compile_stub(header, Path(scratch) / DRIVER)
        stubbed = _ask(environment, root=root, libraries=scratch)
    left = {name: stubbed[name] or "" for name in problems if stubbed.get(name, "") is not None}
    behind = tuple(name for name in problems if name not in left)
    return Imports(names=tuple(found), behind_driver=behind, problems=left)


def _ask(environment: str, *, root: Path, libraries: str = "") -> dict[str, str | None]:
    """Every entry point with its problem, by the interpreter, which searches the folder `libraries` first."""
    reads = environment == READER
    with tempfile.TemporaryDirectory() as scratch:
        module = (
            _reading(Path(scratch)) if reads else ["traceproof.environments.entry_points", *truths_of(environment)]
        )
        variables = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
        if libraries:
            variables["LD_LIBRARY_PATH"] = os.pathsep.join([libraries, os.environ.get("LD_LIBRARY_PATH", "")])
        python = root / FOLDER / environment / "bin" / "python"
        command = [str(python), "-P", "-W", "ignore", "-m", *module]
        done = programs.run(command, environment=variables, cwd=Path(scratch))
        if done.returncode:
            said = programs.last_lines(done.stderr)
            return {module[0]: "\n".join(said) or f"ended with {done.returncode}"}
        if reads:
            answer = json.loads(Path(scratch, "0.json").read_text(encoding="utf-8"))
            return {module[0]: json.dumps(answer["error"]) if "error" in answer else None}
    found: dict[str, str | None] = json.loads(done.stdout.splitlines()[-1])
    return found


def _reading(scratch: Path) -> list[str]:
    """Module and arguments that have the models listed which an environment can read, in `scratch`/0.json."""
    jobs = scratch / "jobs.json"
    jobs.write_text("[null]", encoding="utf-8")
    return [READS_MODELS, "--out", str(scratch), "--jobs", str(jobs)]
