"""Wall time and peak memory of verifying the configured dataset, from nothing but built environments.

Memory is the proportional set size of snakemake and all its descendants together, sampled four times a second.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from _run_processes import of_run

ROOT = Path(__file__).resolve().parent.parent
INTERVAL = 0.25


def run_bytes(root: int) -> int:
    """Proportional set size of all processes of a run; what is gone or may not be read counts as 0."""
    total = 0
    for pid in of_run(root):
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
                if line.startswith("Pss:"):
                    total += int(line.split()[1]) * 1024
    return total


def main() -> int:
    """Run once into a folder of its own and print one line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cores", type=int, default=os.cpu_count() or 1)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=ROOT) as folder:
        config = Path(folder) / "config.json"
        config.write_text(json.dumps({"results": str(Path(folder) / "results")}))
        command = [sys.executable, "-m", "snakemake", "--cores", str(options.cores), "--configfile", str(config)]
        started = time.monotonic()
        with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as run:
            peak = 0
            while run.poll() is None:
                peak = max(peak, run_bytes(run.pid))
                time.sleep(INTERVAL)
        seconds = time.monotonic() - started
    sys.stdout.write(
        f"exit code {run.returncode}, {seconds:.0f} s on {options.cores} cores, peak {peak / 2**30:.2f} GiB\n"
    )
    return run.returncode


if __name__ == "__main__":
    sys.exit(main())
