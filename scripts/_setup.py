"""Set up the driver environment, .venv, from hashed pins. Standard library only: nothing is installed yet."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import venv
from pathlib import Path
from typing import NoReturn

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
PINS = ROOT / "envs" / "driver.txt"
STAMP = VENV / ".traceproof.json"  # written last: without it the environment counts as half-built
OLDEST = (3, 11)
INTERRUPTED = 130  # exit code, as shells have it for Ctrl-C


def ensure() -> Path:
    """The driver's interpreter, installed first where it is absent or its pins changed.

    Raises:
        SystemExit: 2, with what to do, where it can not be installed; 130 on an interrupt.
    """
    if sys.version_info < OLDEST:
        _stop(f"Python {OLDEST[0]}.{OLDEST[1]} or newer is needed, this is {sys.version.split()[0]}.")
    wanted = {
        "pins": _digest(PINS),
        "project": _digest(ROOT / "pyproject.toml"),
        "root": str(ROOT),  # the editable install names it
        "python": sys.version.split()[0],
    }
    found = _stamp()
    if found == wanted:
        return PYTHON
    try:
        if {**found, "project": wanted["project"]} != wanted:
            _say(f"Setting up {VENV.name} from {PINS.relative_to(ROOT)} (once, about half a minute)")
            venv.create(VENV, clear=True, with_pip=True)
            _pip("--require-hashes", "--no-deps", "-r", str(PINS))
        _pip("--no-deps", "--no-build-isolation", "-e", str(ROOT))
    except KeyboardInterrupt:
        _say("\nStopped. Nothing half-built is used: the same command starts the set-up again.")
        raise SystemExit(INTERRUPTED) from None
    except subprocess.CalledProcessError as error:
        _stop(
            f"The driver environment could not be installed: {' '.join(map(str, error.cmd))} ended with "
            f"{error.returncode}.\nIs a package index reachable (pip config list), and is venv there "
            "(Debian: apt install python3-venv)? Nothing half-built is used: run the same command again."
        )
    STAMP.write_text(json.dumps(wanted))
    return PYTHON


def run(command: list[str]) -> NoReturn:
    """Go on as a command in the repository, with the driver environment's programs first on PATH.

    This process becomes the command, so that signals reach it, and nothing else.
    """
    path = os.pathsep.join([str(VENV / "bin"), os.environ.get("PATH", os.defpath)])
    os.chdir(ROOT)
    os.execve(command[0], command, {**os.environ, "PATH": path})  # noqa: S606 - no shell is wanted


def help_asked(text: str | None) -> bool:
    """Print `text` where the command line asks for help; nothing is set up for it."""
    asked = bool({"-h", "--help"} & set(sys.argv[1:]))
    if asked:
        sys.stdout.write(f"usage: python3 {sys.argv[0]} [arguments]\n\n{text}")
    return asked


def _pip(*arguments: str) -> None:
    command = [str(PYTHON), "-m", "pip", "--disable-pip-version-check", "install", "-qq", *arguments]
    subprocess.run(command, cwd=ROOT, check=True)


def _stamp() -> dict[str, str]:
    try:
        found: dict[str, str] = json.loads(STAMP.read_text())
    except (OSError, ValueError):
        return {}
    return found if PYTHON.exists() else {}


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _say(text: str) -> None:
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


def _stop(text: str) -> None:
    _say(text)
    raise SystemExit(2)
