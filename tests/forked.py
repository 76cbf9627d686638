"""Runs Python programs in forks of an interpreter that has imported what takes longest: PyTorch, or Snakemake."""

from __future__ import annotations

import atexit
import shutil
import subprocess
import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

# As `python -P -m MODULE`, `python -m MODULE` and `python FILE` would. A connection brings the open descriptors of
# the process that asks, and what to run; the exit code is the answer. Whoever asked has gone: so does what it ran.
SERVER = """
import fcntl, gc, json, os, runpy, select, signal, socket, sys
import {having}

server = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
server.bind(sys.argv[1])
server.listen()
print(flush=True)
gc.freeze()
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
while True:
    if server not in select.select([server, sys.stdin], [], [])[0]:
        os._exit(0)
    connection, _ = server.accept()
    if not os.fork():
        break
    connection.close()
signal.signal(signal.SIGCHLD, signal.SIG_DFL)
server.close()
asked, given, _, _ = socket.recv_fds(connection, 1 << 20, 250)
if job := os.fork():
    ended = os.pidfd_open(job)
    if ended not in select.select([connection, ended], [], [])[0]:
        os.kill(job, signal.SIGTERM)
    code = os.waitstatus_to_exitcode(os.waitpid(job, 0)[1])
    try:
        connection.send(str(code).encode())
    finally:
        os._exit(0)
connection.close()
sys.executable = sys.argv[2]
cwd, environment, numbers, *command = json.loads(asked)
kept = [fcntl.fcntl(one, fcntl.F_DUPFD, 300) for one in given]
for one in given:
    os.close(one)
for one, number in zip(kept, numbers):
    os.dup2(one, number)
    os.close(one)
os.chdir(cwd)
os.environ.clear()
os.environ.update(environment)
safe = command[0] == "-P"
module = command[safe] == "-m"
program, *arguments = command[safe + module:]
sys.argv = [program, *arguments]
sys.path[:1] = [] if safe else [cwd if module else os.path.dirname(program)]
sys.path[not safe:not safe] = filter(None, environment.get("PYTHONPATH", "").split(":"))
(runpy.run_module if module else runpy.run_path)(program, run_name="__main__")
"""
# An interpreter as a program of its own: what it is asked to run, a fork runs with its descriptors.
CLIENT = """#!{python} -IS
import json, os, signal, socket, sys
numbers = [int(one) for one in os.listdir("/proc/self/fd") if os.path.exists("/proc/self/fd/" + one)]
with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as server:
    server.connect({place!r})
    asked = json.dumps([os.getcwd(), dict(os.environ), numbers, *sys.argv[1:]])
    socket.send_fds(server, [asked.encode()], numbers)
    code = int(server.recv(100) or 1)
if code < 0:
    if -code != signal.SIGKILL:
        signal.signal(-code, signal.SIG_DFL)
    os.kill(os.getpid(), -code)
sys.exit(code)
"""


@cache
def interpreter(having: str = "pytest, torch", python: str = sys.executable) -> str:
    """A program that runs Python files and modules as `python` does, which has imported these modules before."""
    folder = TemporaryDirectory()
    atexit.register(folder.cleanup)
    place, program = f"{folder.name}/socket", Path(folder.name, "python")
    given = {"PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"}
    known = str(program if "snakemake" in having else python)  # what it starts itself by
    if "snakemake" in having:
        shutil.copy2(Path(python).with_name("snakemake"), folder.name)  # looked for beside the interpreter
    command, pipe = [python, "-c", SERVER.format(having=having), place, known], subprocess.PIPE
    process = subprocess.Popen(command, env=given, cwd="/", stdin=pipe, stdout=pipe)
    atexit.register(process.communicate)
    assert process.stdout is not None
    assert process.stdout.readline() == b"\n"
    program.write_text(CLIENT.format(python=python, place=place))
    program.chmod(0o755)
    return str(program)


def run(
    *command: str,
    cwd: Path,
    env: Mapping[str, str],
    python: str = sys.executable,
    having: str = "pytest, torch",
) -> subprocess.CompletedProcess[str]:
    """Run a module or a file, with arguments, `having` these modules; its stdout has its stderr, too."""
    start = () if command[0].endswith(".py") else ("-m",)
    both, none = subprocess.STDOUT, subprocess.DEVNULL
    return subprocess.run(
        [interpreter(having, python), *start, *command],
        cwd=cwd,
        env=env,
        check=False,
        text=True,
        stdin=none,
        stdout=subprocess.PIPE,
        stderr=both,
    )
