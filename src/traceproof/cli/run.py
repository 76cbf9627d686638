"""Shared by commands: the repository, its configuration, Snakemake, other interpreters, results as JSON."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, TextIO

import typer

from traceproof import programs
from traceproof.config import Config, config_of
from traceproof.dataset.fetch import fetch
from traceproof.environments.building import ready, resolve
from traceproof.errors import TraceproofError
from traceproof.files import own_folder, sweep
from traceproof.run.entry import FINDINGS, INTERRUPTED, UNFINISHED
from traceproof.sandbox.kernel import PR_SET_PDEATHSIG, prctl

__all__ = ["FINDINGS", "UNFINISHED", "config_of"]  # names that commands import from here
FINE = 0
# Snakemake's exit code for findings, as 1 is its own for errors; its plugin reads it from the variable CODE
FOUND = 3
CODE = "TRACEPROOF_FINDINGS"
STDERR = 2  # file descriptor
STDOUT = "-"  # instead of a file
FIND = (
    "import importlib.util, json, sys; "
    "print(json.dumps([name for name in sys.argv[1:] if importlib.util.find_spec(name) is None]))"
)


def repository() -> Path:
    """The folder with this package's Snakefile. Raises TraceproofError: the package was installed without it."""
    for folder in (Path.cwd(), Path(__file__).resolve().parents[3]):
        if (folder / "Snakefile").is_file() and (folder / "src" / "traceproof").is_dir():
            return folder
    todo = "Run the command inside a clone, installed with `pip install -e`."
    raise TraceproofError("there is no traceproof repository here", todo=todo)


def configured(**changes: Any) -> tuple[Path, Config]:  # noqa: ANN401 - as config.yaml has them
    """(the repository's folder, its configuration); `changes`, unless None, replace keys of the latter."""
    root = repository()
    return root, config_of(root, without_none(**changes))


def configured_dataset() -> Path:
    """The folder of the dataset in config.yaml, fetched if absent."""
    root, config = configured()
    return root / fetch(config.dataset, root=root / config.results / "dataset")


def without_none(**options: Any) -> dict[str, Any]:  # noqa: ANN401 - as config.yaml has them
    """The options that are not None."""
    return {name: value for name, value in options.items() if value is not None}


def dataset_in(folder: Path | None) -> dict[str, str | None] | None:
    """The key `dataset` of a configuration for a folder; None: no folder."""
    return None if folder is None else {"path": str(folder.expanduser().resolve()), "pypi": None, "git": None}


# Output of commands.


def say(text: str) -> None:
    """Print a line of progress on stderr."""
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


def text_stream(*results: Path | None) -> TextIO:
    """The stream for text: stderr if one of the results goes to stdout, else stdout."""
    return sys.stderr if STDOUT in map(str, results) else sys.stdout


def end(target: Path | None, value: Mapping[str, Any], text: str = "", *, bad: bool = False) -> None:
    """Write a command's result, as JSON to `target` unless it is None, and as text.

    Raises typer.Exit: with FINDINGS, if it is `bad`.
    """
    write_result(target, value)
    text_stream(target).write(text)
    if bad:
        raise typer.Exit(FINDINGS)


def write_result(target: Path | None, value: Mapping[str, Any]) -> None:
    """Write a result as JSON to a file, or to stdout if that is `-`; None writes nothing."""
    text = json.dumps(value, indent=1, ensure_ascii=False) + "\n"
    text = text.encode(errors="backslashreplace").decode()  # names of files may have any bytes
    if target is not None and str(target) == STDOUT:
        sys.stdout.write(text)
    elif target is not None:
        target.write_text(text, encoding="utf-8")


# Interpreters for others' tests and for SGLang.


def stack_interpreter(name: str, python: Path | None = None) -> Path:
    """The given interpreter, else that of a stack in config.yaml, built if absent."""
    if python is not None:
        # not resolved, since the path of the link shows a virtual environment
        return python.expanduser().absolute()
    root, config = configured()
    return ready(resolve(config, name), root=root, say=say)


def interpreter(wanted: Path | None, *, stack: str, needs: Sequence[str], option: str) -> str:
    """An interpreter with the packages `needs`: the given one, else that of `stack`, built if absent.

    Raises TraceproofError: there is none, or it lacks a package; `option` is named as the way to give another.
    """
    if wanted is None:
        python = str(stack_interpreter(stack))
    elif (path := shutil.which(wanted.expanduser())) is not None:
        python = str(Path(path).absolute())
    else:
        todo = f"Give one with {' and '.join(needs)} as {option}, or leave {option} out: a stack's is taken."
        raise TraceproofError(f"there is no interpreter {wanted}", todo=todo)
    try:
        done = programs.run([python, "-P", "-c", FIND, *needs])
        lacking: list[str] = json.loads(done.stdout)
    except (OSError, ValueError) as error:
        todo = f"Give a working Python 3.11 or newer as {option}."
        raise TraceproofError(f"{python} is no interpreter that can be used: {error}", todo=todo) from error
    if lacking:
        todo = f"Install {' and '.join(lacking)} there, or give an interpreter that has them as {option}."
        if wanted is None:
            todo = f"Name an interpreter that has {' and '.join(needs)} as stacks.{stack}.python, or as {option}."
        raise TraceproofError(f"{python} has no {' and no '.join(lacking)}", todo=todo)
    return python


# Snakemake.


def snakemake(
    root: Path,
    changes: Mapping[str, Any],
    *,
    cores: int,
    extra: Sequence[str] = (),
    out: TextIO = sys.stdout,  # stdout or stderr, for the table
) -> int:
    """Run the default target.

    Returns the exit code: FINE, FINDINGS, UNFINISHED if the run did not print its table, or INTERRUPTED.
    """
    program = str(Path(sys.executable).parent / "snakemake")  # its errors begin with this name
    command = [sys.executable, program, "--cores", str(cores), *extra]
    sweep(Path(tempfile.gettempdir()))
    with own_folder() as scratch:
        if changes:  # as a file, since --config turns every value in a mapping into text
            overrides = scratch / "overrides.json"
            overrides.write_text(json.dumps(changes), encoding="utf-8")
            command += ["--configfile", str(overrides)]
        code = _run(command, cwd=root, stdout=STDERR if out is sys.stderr else None)
    if code < 0:
        name = signal.Signals(-code).name
        say(f"Snakemake was ended by {name}. What is finished is kept; run the command again.")
    return {0: FINE, FOUND: FINDINGS, INTERRUPTED: INTERRUPTED}.get(code, UNFINISHED)


def _run(command: Sequence[str], *, cwd: Path, stdout: int | None) -> int:
    """Run Snakemake in a separate process group; returns its exit code, INTERRUPTED if it was stopped.

    So a terminal's Ctrl-C reaches only this process, like SIGTERM; the first is passed on to the group as SIGINT,
    the second kills it. If this process is killed, the kernel kills Snakemake.
    """
    caught: list[int] = []
    started: list[subprocess.Popen[bytes]] = []

    def forward(number: int, _: FrameType | None) -> None:
        caught.append(number)
        for process in started:
            with contextlib.suppress(ProcessLookupError):  # it has just ended
                os.killpg(process.pid, signal.SIGINT if len(caught) == 1 else signal.SIGKILL)

    before = {number: signal.signal(number, forward) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    options: dict[str, Any] = {"cwd": cwd, "env": {**os.environ, CODE: str(FOUND)}, "stdin": subprocess.DEVNULL}
    # safe, since this process has no other threads
    ends_with_this = partial(prctl, PR_SET_PDEATHSIG, signal.SIGKILL)
    options |= {"stdout": stdout, "process_group": 0, "preexec_fn": ends_with_this}
    try:
        started.append(subprocess.Popen(command, **options))
        if caught:  # before the process started
            forward(caught[0], None)
        code = started[0].wait()
        return INTERRUPTED if caught else code
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
