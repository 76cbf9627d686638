"""Runs Python programs in forks of an interpreter that has imported what takes longest: PyTorch, or Snakemake."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
import tempfile
import uuid
import zlib
from collections.abc import Mapping
from functools import cache
from pathlib import Path

# As `python -P -m MODULE`, `python -m MODULE`, `python -c CODE` and `python FILE` would. A connection brings the
# open descriptors of the process that asks, and what to run; the exit code is the answer. If the one that asked
# ends, so does what it ran; the server ends with its owner.
SERVER = """
import atexit, fcntl, gc, json, os, runpy, select, shutil, signal, socket, sys, threading
import {having}

folder, owner = sys.argv[1], os.pidfd_open(int(sys.argv[2]))
server = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
server.bind(folder + "/socket")
server.listen()
print(flush=True)
gc.freeze()
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
while True:
    if server not in select.select([server, owner], [], [])[0]:
        shutil.rmtree(folder, ignore_errors=True)
        os._exit(0)
    connection, _ = server.accept()
    if not os.fork():
        break
    connection.close()
signal.signal(signal.SIGCHLD, signal.SIG_DFL)
server.close()
os.close(owner)
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
sys.executable = folder + "/python"
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
if command[0] in ("-P", "-u"):
    command.pop(0)
kind = command.pop(0) if command[0] in ("-m", "-c") else ""
program, *arguments = command
sys.argv = ["-c" if kind == "-c" else program, *arguments]
sys.path[:1] = [] if safe else [cwd if kind else os.path.dirname(program)]
sys.path[not safe:not safe] = filter(None, environment.get("PYTHONPATH", "").split(":"))
code = 0
try:
    if kind == "-c":
        exec(program, globals())
    else:
        (runpy.run_module if kind else runpy.run_path)(program, run_name="__main__")
except SystemExit as end:
    code = end.code or 0
    if not isinstance(code, int):
        code = print(code, file=sys.stderr) or 1
except BaseException:
    code = sys.excepthook(*sys.exc_info()) or 1
threading._shutdown()
atexit._run_exitfuncs()
sys.stdout.flush()
sys.stderr.flush()
os._exit(code)  # to free what these modules have takes a third of a second
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
RUN = (os.environ.get("PYTEST_XDIST_TESTRUNUID") or uuid.uuid4().hex)[:16]  # of all processes that run tests


@cache
def interpreter(having: str = "pytest, torch", python: str = sys.executable) -> str:
    """A program that runs Python files and modules as `python` does, which has imported these modules before.

    Of several processes that run tests, the first one starts it for all.
    """
    owner = os.getppid() if "PYTEST_XDIST_WORKER" in os.environ else os.getpid()
    folder = Path(tempfile.gettempdir(), f"{RUN}-{zlib.crc32(f'{having} {python}'.encode())}")
    folder.mkdir(exist_ok=True)
    program = folder / "python"
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if program.exists():
            return str(program)
        if "snakemake" in having:
            shutil.copy2(Path(python).with_name("snakemake"), folder)  # looked for beside the interpreter
        given = {"PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"}
        command = [python, "-c", SERVER.format(having=having), str(folder), str(owner)]
        none, pipe = subprocess.DEVNULL, subprocess.PIPE
        process = subprocess.Popen(command, env=given, cwd="/", stdin=none, stdout=pipe, start_new_session=True)
        assert process.stdout is not None
        with process.stdout as said:
            assert said.readline() == b"\n"
        process.returncode = 0  # nobody waits for it
        program.write_text(CLIENT.format(python=python, place=f"{folder}/socket"))
        program.chmod(0o755)
    return str(program)


def run(
    *command: str, cwd: Path, env: Mapping[str, str], python: str = sys.executable, having: str = "pytest, torch"
) -> subprocess.CompletedProcess[str]:
    """Run a module or a file, with arguments, `having` these modules; its stdout has its stderr, too."""
    given = [interpreter(having, python), *(() if command[0].endswith(".py") else ("-m",)), *command]
    none, both, pipe = subprocess.DEVNULL, subprocess.STDOUT, subprocess.PIPE
    return subprocess.run(given, cwd=cwd, env=env, check=False, text=True, stdin=none, stdout=pipe, stderr=both)
