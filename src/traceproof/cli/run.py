"""Run Snakemake for a command, and tell findings from a run that could not finish."""

import json
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from traceproof.cli.supervise import supervise
from traceproof.config.reading import config_of
from traceproof.config.schema import Config
from traceproof.errors import TraceproofError
from traceproof.owner import own_folder
from traceproof.pipeline import ahead
from traceproof.pipeline.flow import Pipeline
from traceproof.pipeline.interrupts import INTERRUPTED
from traceproof.pipeline.jit import available_memory
from traceproof.pipeline.stages.standing import OUTCOME
from traceproof.untrusted import tokens
from traceproof.worker.shared import commanding

__all__ = ["config_of"]  # for commands, which take all that they need of a run from here
FINE, FINDINGS, UNFINISHED = 0, 1, 2
MEMORY_SHARE = 0.85  # of what is free at the start; estimates were up to a fifth below what was measured
STATE_RESOURCES = frozenset({"--resources", "--res", "--profile", "--workflow-profile"})


def repository() -> Path:
    """The folder with the Snakefile of this package. Raises TraceproofError: it was installed without it."""
    for folder in (Path.cwd(), Path(__file__).resolve().parents[3]):
        if (folder / "Snakefile").is_file() and (folder / "src" / "traceproof").is_dir():
            return folder
    todo = "Run the command inside a clone, installed with `pip install -e`."
    raise TraceproofError("there is no traceproof repository here", todo=todo)


def configured(**changes: Any) -> tuple[Path, Config]:  # noqa: ANN401 - as config.yaml has them
    """That folder, and the configuration there, with what options give (None: nothing) in place of some keys."""
    root = repository()
    return root, config_of(root, given(**changes))


def given(**options: Any) -> dict[str, Any]:  # noqa: ANN401 - as config.yaml has them
    """The options that have a value."""
    return {name: value for name, value in options.items() if value is not None}


def dataset_in(folder: Path | None) -> dict[str, str | None] | None:
    """A dataset's folder as config.yaml has it; None: none is given."""
    return None if folder is None else {"path": str(folder.expanduser().resolve()), "pypi": None, "git": None}


def snakemake(
    root: Path,
    changes: Mapping[str, Any],
    *,
    cores: int,
    extra: Sequence[str] = (),
    forced: Pipeline | None = None,  # what is sure to be run here; None: Snakemake alone knows
) -> int:
    """Run the default target.

    Gives the exit code: FINE, FINDINGS, UNFINISHED if the run did not get to its table, or INTERRUPTED.
    """
    command = [
        sys.executable,
        "-m",
        "traceproof.pipeline.engine",
        *memory_of_jobs(extra),
        "--cores",
        str(cores),
        *extra,
    ]
    with own_folder("traceproof") as scratch:
        if changes:  # as a file, since --config would turn every value inside a mapping into text
            overrides = scratch / "overrides.json"
            overrides.write_text(json.dumps(changes), encoding="utf-8")
            command += ["--configfile", str(overrides)]
        outcome = scratch / "outcome"
        environment = commanding({**os.environ, OUTCOME: str(outcome)})
        if forced is not None and forced.on_gpu:
            environment[ahead.STARTED] = "1"
            _begun = ahead.start(forced, tokens.without_secrets(environment))
        code = supervise(command, cwd=root, env=environment, mark=scratch / "interrupted")
        if code == INTERRUPTED:
            return INTERRUPTED
        if code == 0:
            return FINE
        if code < 0:
            name = signal.Signals(-code).name
            sys.stderr.write(f"Snakemake was ended by {name}. What is finished is kept; run the command again.\n")
        told = outcome.read_text(encoding="utf-8") if outcome.is_file() else ""
    return FINDINGS if told == str(FINDINGS) else UNFINISHED


def memory_of_jobs(extra: Sequence[str]) -> list[str]:
    """Options that let all jobs together take most of the free memory; none where the caller states resources."""
    if any(word.split("=")[0] in STATE_RESOURCES for word in extra):
        return []
    return ["--resources", f"mem_mb={int(available_memory() * MEMORY_SHARE) >> 20}"]


def all_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0))


def told(*results: Path | None) -> TextIO:
    """Where what is for people goes: stderr where stdout has a result."""
    return sys.stderr if "-" in map(str, results) else sys.stdout


def write_result(target: Path | None, value: Mapping[str, Any], *, option: str = "--json") -> None:
    """Write what `--json FILE`, say, asks for; `-` is stdout. Raises TraceproofError: it can not be written."""
    if target is None:
        return
    text = json.dumps(value, indent=1, ensure_ascii=False) + "\n"
    if str(target) == "-":
        sys.stdout.write(text)
        return
    try:
        target.write_text(text, encoding="utf-8")
    except OSError as error:
        raise TraceproofError(f"{option} {target} cannot be written: {error.strerror}") from error
