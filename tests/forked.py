"""Runs Python programs in forks of an interpreter that has imported what takes longest: PyTorch, or Snakemake."""

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

# As `python -m MODULE` and `python FILE` would: a line on stdin asks for a run, its exit code is the answer.
PARENT = """
import gc, json, os, runpy, sys
import {}
gc.freeze()
for line in sys.stdin:
    cwd, environment, said, program, *arguments = json.loads(line)
    if child := os.fork():
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
        continue
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environment)
    for number, file in enumerate((os.devnull, *said)):
        os.dup2(os.open(file, os.O_RDWR | os.O_CREAT | os.O_APPEND), number)
    module = not program.endswith(".py")
    sys.argv = [program, *arguments]
    sys.path[:1] = [cwd if module else os.path.dirname(program), *environment.get("PYTHONPATH", "").split(":")]
    (runpy.run_module if module else runpy.run_path)(program, run_name="__main__")
    break
"""


@cache
def _parent(python: str, having: str) -> subprocess.Popen[str]:
    given = {"PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"}
    command, pipe = [python, "-c", PARENT.format(having)], subprocess.PIPE
    process = subprocess.Popen(command, env=given, cwd="/", stdin=pipe, stdout=pipe, text=True)
    atexit.register(process.communicate)
    return process


def run(
    *command: str,
    cwd: Path,
    env: Mapping[str, str],
    python: str = sys.executable,
    having: str = "pytest, torch",
) -> subprocess.CompletedProcess[str]:
    """Run a module or a file, with arguments, `having` these modules; its stdout has its stderr, too."""
    process = _parent(python, having)
    assert process.stdin is not None
    assert process.stdout is not None
    with TemporaryDirectory() as folder:
        both = os.path.join(folder, "both")  # noqa: PTH118 - as JSON
        process.stdin.write(json.dumps([str(cwd), dict(env), [both, both], *command]) + "\n")
        process.stdin.flush()
        code = int(process.stdout.readline())
        return subprocess.CompletedProcess(command, code, Path(both).read_text(), "")
