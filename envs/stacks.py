"""Build the stacks' environments, then import in each all that its adapters name (`nox -s stacks`).

No GPU is needed. What lacks the NVIDIA driver's library alone is no fault here, and said.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from traceproof import programs
from traceproof.environments import toolkit
from traceproof.environments.building import FOLDER, Installation, has_driver, ready
from traceproof.errors import TraceproofError
from traceproof.stacks import ENVIRONMENTS, READER, truths_of

ROOT = Path(__file__).resolve().parent.parent
PARSER = argparse.ArgumentParser(description=__doc__)
PARSER.add_argument("--stack", action="append", choices=ENVIRONMENTS, help="more than once for several; else all")
PARSER.add_argument("--no-index", action="store_true", help="ask no package index")
PARSER.add_argument("--find-links", type=Path, help="folder of packages, with --no-index: see `nox -s bundle`")


def main() -> int:
    """Exit code 1: something can not be imported; 2: an environment can not be built."""
    options = PARSER.parse_args()
    if options.no_index:
        os.environ["PIP_NO_INDEX"] = "1"
    if options.find_links is not None:
        os.environ["PIP_FIND_LINKS"] = str(options.find_links.absolute())
    failed = False
    for name in options.stack or ENVIRONMENTS:
        started = time.monotonic()
        try:
            ready(Installation.at(name, str(FOLDER / name / "bin" / "python")), root=ROOT, say=_say)
        except TraceproofError as error:
            _say(str(error))
            return 2
        built = time.monotonic() - started
        found = check(name, root=ROOT)
        imported = time.monotonic() - started - built
        sys.stdout.write(f"{name:11} {_summary(found)}\n  built in {built:.0f} s, imported in {imported:.0f} s\n")
        sys.stdout.flush()
        failed = failed or bool(found.problems)
    return int(failed)


def _summary(found: Imports) -> str:
    good = len(found.names) - len(found.problems)
    lines = [f"{good} of {len(found.names)} imported"]
    if found.behind_driver:
        lines.append(f"  {len(found.behind_driver)} of them lack the NVIDIA driver's library ({DRIVER}) alone:")
        lines += [f"    {name}" for name in found.behind_driver]
    if found.problems:
        lines.append("  can not be imported, the driver's library aside:")
        lines += [f"    {name}: {problem}" for name, problem in found.problems.items()]
    return "\n".join(lines)


def _say(text: str) -> None:
    sys.stderr.write(f"{text}\n")


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
            _reading(Path(scratch))
            if reads
            else ["traceproof.environments.inside", "entry-points", *truths_of(environment)]
        )
        variables = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
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


if __name__ == "__main__":
    sys.exit(main())
