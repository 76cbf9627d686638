"""Runs Python programs in forks of an interpreter that has imported PyTorch, which is most of what they take."""

from __future__ import annotations

import atexit
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

# As `python -m pytest` and `python FILE` would: a line on stdin asks for a run, its exit code is the answer.
PARENT = """
import json, os, runpy, sys
import pytest, torch
for line in sys.stdin:
    cwd, environment, said, program, *arguments = json.loads(line)
    if child := os.fork():
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
        continue
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environment)
    for number, file in enumerate((os.devnull, *said)):
        os.dup2(os.open(file, os.O_RDWR | os.O_CREAT), number)
    module = program == "pytest"
    sys.argv = [program, *arguments]
    sys.path[:1] = [cwd if module else os.path.dirname(program), *environment.get("PYTHONPATH", "").split(":")]
    (runpy.run_module if module else runpy.run_path)(program, run_name="__main__")
    break
"""


@cache
def _parent(python: str) -> subprocess.Popen[str]:
    given = {"PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"}
    command, pipe = [python, "-c", PARENT], subprocess.PIPE
    process = subprocess.Popen(command, env=given, cwd="/", stdin=pipe, stdout=pipe, text=True)
    atexit.register(process.communicate)
    return process


def run(
    *command: str, cwd: Path, env: Mapping[str, str], python: str = sys.executable
) -> subprocess.CompletedProcess[str]:
    """Run `pytest` or a file, with arguments."""
    process = _parent(python)
    assert process.stdin is not None
    assert process.stdout is not None
    with TemporaryDirectory() as folder:
        said = [os.path.join(folder, name) for name in ("out", "err")]  # noqa: PTH118 - as JSON
        process.stdin.write(json.dumps([str(cwd), dict(env), said, *command]) + "\n")
        process.stdin.flush()
        code = int(process.stdout.readline())
        return subprocess.CompletedProcess(command, code, *(Path(file).read_text() for file in said))
