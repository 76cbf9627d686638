"""Running a program that gets no secrets and asks nothing, and what it said last."""

import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from traceproof.untrusted.tokens import without_secrets

QUERY_SECONDS = 60.0
LAST = 8  # lines of a failed program's output that an error shows; the cause stands last


def run(
    command: Sequence[str], *, environment: Mapping[str, str] | None = None, cwd: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a program to its end, its output captured, by default without secrets. Raises OSError: it can not."""
    given = without_secrets() if environment is None else environment
    return subprocess.run(
        command, check=False, text=True, capture_output=True, stdin=subprocess.DEVNULL, env=given, cwd=cwd
    )


def nvidia_smi(fields: str, *, units: bool = False) -> list[list[str]]:
    """Fields of each GPU, as nvidia-smi lists them; none where there is no driver, or it does not answer."""
    command = ["nvidia-smi", f"--query-gpu={fields}", f"--format=csv,noheader{'' if units else ',nounits'}"]
    try:
        done = subprocess.run(command, check=True, text=True, capture_output=True, timeout=QUERY_SECONDS)
    except (OSError, subprocess.SubprocessError):
        return []
    rows = [[cell.strip() for cell in line.split(",")] for line in done.stdout.splitlines()]
    return [row for row in rows if len(row) == fields.count(",") + 1]


def last_lines(said: str) -> list[str]:
    """The last lines of a program's output, empty ones left out."""
    return [line for line in said.splitlines() if line.strip()][-LAST:]
