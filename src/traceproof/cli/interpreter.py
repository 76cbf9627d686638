"""The interpreter that a command runs tests of others with: a given one, or a stack's as a run resolves it."""

import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from traceproof.cli import run
from traceproof.environments.building import ready, resolve
from traceproof.errors import TraceproofError

SECONDS = 60.0  # of an interpreter that looks for packages, on a slow disk
FIND = (
    "import importlib.util, json, sys; "
    "print(json.dumps([name for name in sys.argv[1:] if importlib.util.find_spec(name) is None]))"
)


def interpreter(given: Path | None, *, stack: str, needs: Sequence[str], option: str) -> str:
    """An interpreter that has the packages `needs`: the given one, else that of `stack`, built where it is absent.

    Raises TraceproofError: there is none, or it lacks one of `needs`; `option` gives another one.
    """
    python = _given(given, option) if given is not None else str(stack_interpreter(stack))
    lacking = _lacking(python, needs, option)
    if lacking:
        todo = f"Install {' and '.join(lacking)} there, or give an interpreter that has them as {option}."
        if given is None:
            todo = f"Name an interpreter that has {' and '.join(needs)} as stacks.{stack}.python, or as {option}."
        raise TraceproofError(f"{python} has no {' and no '.join(lacking)}", todo=todo)
    return python


def _given(path: Path, option: str) -> str:
    found = shutil.which(path.expanduser())
    if found is None:
        todo = f"Give one with torch and pytest as {option}, or leave {option} out: a stack's is taken."
        raise TraceproofError(f"there is no interpreter {path}", todo=todo)
    return str(Path(found).absolute())


def stack_interpreter(name: str) -> Path:
    """A stack's interpreter by config.yaml, built first where it is absent."""
    root, config = run.configured()
    return ready(resolve(config, name), root=root, say=say)


def say(text: str) -> None:
    """Tell on stderr how far a command is."""
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


def _lacking(python: str, needs: Sequence[str], option: str) -> list[str]:
    try:
        done = subprocess.run(
            [python, "-P", "-c", FIND, *needs], check=True, capture_output=True, text=True, timeout=SECONDS
        )
        found: list[str] = json.loads(done.stdout)
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        todo = f"Give a working Python 3.11 or newer as {option}."
        raise TraceproofError(f"{python} is no interpreter that can be used: {error}", todo=todo) from error
    return found
