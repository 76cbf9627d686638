"""Set up the driver environment, .venv, from hashed pins. Standard library only: nothing is installed yet."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
PINS = ROOT / "envs" / "driver.txt"
STAMP = VENV / ".traceproof.json"  # written last: without it the environment counts as half-built
OLDEST = (3, 11)
BAD_USE, INTERRUPTED = 2, 130  # exit codes; the last as shells have it for Ctrl-C


def run(text: str | None, *command: str) -> None:
    """Become a module of the driver environment, which is set up first; where help is asked for, print `text`.

    The module runs in the repository, with the environment's programs first on PATH.

    Raises:
        SystemExit: 2, with what to do, where it can not be installed; 130 on an interrupt.
    """
    if text and {"-h", "--help"} & set(sys.argv[1:]):
        sys.stdout.write(f"usage: python3 {sys.argv[0]} [arguments]\n\n{text}")
        return
    try:
        _set_up()
    except KeyboardInterrupt:
        sys.stderr.write("\nStopped. Nothing half-built is used: the same command starts the set-up again.\n")
        raise SystemExit(INTERRUPTED) from None
    except subprocess.CalledProcessError as error:
        sys.stderr.write(
            f"The driver environment could not be installed: {' '.join(map(str, error.cmd))} ended with "
            f"{error.returncode}.\nIs a package index reachable (pip config list), and is venv there "
            "(Debian: apt install python3-venv)? Nothing half-built is used: run the same command again.\n"
        )
        raise SystemExit(BAD_USE) from None
    path = os.pathsep.join([str(VENV / "bin"), os.environ.get("PATH", os.defpath)])
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # without, each process compiles torch's files again
    os.chdir(ROOT)
    os.execve(PYTHON, [str(PYTHON), "-m", *command], {**os.environ, "PATH": path})  # noqa: S606 - signals reach it


def _set_up() -> None:
    """Install what is absent, or whose pins changed; bytecode is written when it is imported."""
    if sys.version_info < OLDEST:
        sys.stderr.write(f"Python {OLDEST[0]}.{OLDEST[1]} or newer is needed, this is {sys.version.split()[0]}.\n")
        raise SystemExit(BAD_USE)
    wanted = {
        "pins": hashlib.sha256(PINS.read_bytes()).hexdigest(),
        "project": hashlib.sha256((ROOT / "pyproject.toml").read_bytes()).hexdigest(),
        "root": str(ROOT),  # the editable install names it
        "python": sys.version.split()[0],
    }
    try:
        found = json.loads(STAMP.read_text()) if PYTHON.exists() else {}
    except (OSError, ValueError):
        found = {}
    if found == wanted:
        return
    pip = [str(PYTHON), "-m", "pip", "--disable-pip-version-check", "install", "-qq", "--no-deps", "--no-compile"]
    if {**found, "project": wanted["project"]} != wanted:
        sys.stderr.write(f"Setting up {VENV.name} from {PINS.relative_to(ROOT)} (once, about half a minute) ")
        _do(sys.executable, "-m", "venv", "--clear", str(VENV))
        _install(pip)
    _do(*pip, "--no-build-isolation", "-e", str(ROOT))
    sys.stderr.write("\n")
    STAMP.write_text(json.dumps(wanted))


def _install(pip: list[str]) -> None:
    """Install all pins: by the pinned uv, in less than half of pip's time, unless pip has an index of its own."""
    configured = subprocess.run([*pip[:4], "config", "list"], check=False, capture_output=True, text=True).stdout
    if ".index-url=" not in configured and ".no-index=" not in configured:
        first = VENV / "uv.txt"
        first.write_text(re.findall(r"^uv==.*?(?=^\S)", PINS.read_text(), re.DOTALL | re.MULTILINE)[0])
        _do(*pip, "--require-hashes", "-r", str(first))
        uv = [str(PYTHON), "-m", "uv", "pip", "install", "-qq", "--no-deps", "--python", str(PYTHON)]
        with contextlib.suppress(subprocess.CalledProcessError):  # it does not know pip's proxies: pip goes on
            _do(*uv, "--require-hashes", "-r", str(PINS))
            return
    _do(*pip, "--require-hashes", "-r", str(PINS))


def _do(*command: str) -> None:
    """Run a command that says nothing, with a dot for each two seconds. Raises CalledProcessError: it failed."""
    with subprocess.Popen(command, cwd=ROOT) as process:
        while True:
            with contextlib.suppress(subprocess.TimeoutExpired):
                if process.wait(2):
                    raise subprocess.CalledProcessError(process.returncode, command)
                return
            sys.stderr.write(".")
            sys.stderr.flush()
