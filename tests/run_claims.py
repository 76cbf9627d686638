"""Another process that holds a selection's folder, as a run does."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from traceproof import runs

CLAIM = """
import sys, time
from pathlib import Path
from traceproof import runs
runs.claim(Path(sys.argv[1]), sys.argv[2], environments=sys.argv[3])
print("claimed", flush=True)
time.sleep(60)
"""


def claimed(results: Path, folder: str, environments: str) -> subprocess.Popen[str]:
    """Start it; it ends by itself after a minute."""
    environment = {**os.environ, "PYTHONPATH": str(Path(runs.__file__).parent.parent)}
    process = subprocess.Popen(
        [sys.executable, "-c", CLAIM, str(results), folder, environments],
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "claimed\n"
    return process
