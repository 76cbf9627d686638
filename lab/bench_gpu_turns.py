"""What a wait for the GPU costs where several processes have it open, by whether they ask all the time or sleep.

    python lab/bench_gpu_turns.py --processes 1 2 4 8 16

Each process repeats one small operation and waits for it, then copies 1 MiB there, adds to it twenty times and
copies it back. Printed per number of processes, for all of them together: waits per second, cores that they kept
busy, and copies there and back per second.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import time
from collections.abc import Callable
from multiprocessing.synchronize import Barrier

import torch

from traceproof.execution.device import wait_asleep

ADDITIONS = 20
HEAD = "| processes | they | waits per second | cores busy | copies per second |\n|---:|---|---:|---:|---:|\n"
START: list[Barrier] = []  # of the processes, which begin together
PARSER = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
PARSER.add_argument("--processes", type=int, nargs="+", default=[1, 2, 4, 8, 16])
PARSER.add_argument("--seconds", type=float, default=1.5)


def _rate(call: Callable[[], object], seconds: float) -> tuple[float, float]:
    """Calls per second, and the share of a core that they took."""
    count, busy, start = 0, time.process_time(), time.monotonic()
    while time.monotonic() - start < seconds:
        call()
        count += 1
    return count / seconds, (time.process_time() - busy) / seconds


def _process(job: tuple[bool, float]) -> tuple[float, float, float]:
    """Of one process: waits per second, the share of a core, and copies there and back per second."""
    asleep, seconds = job
    device = torch.device("cuda")
    if asleep:
        wait_asleep(device)
    there, here = torch.ones(64, device=device), torch.ones(1 << 18)
    torch.cuda.synchronize()
    START[0].wait()

    def small() -> None:
        there.add_(1.0)
        torch.cuda.synchronize()

    def copied() -> None:
        sent = here.to(device)
        for _ in range(ADDITIONS):
            sent = sent + 1.0
        sent.cpu()

    waits, busy = _rate(small, seconds)
    return waits, busy, _rate(copied, seconds)[0]


def _begin(start: Barrier) -> None:
    START.append(start)


def main() -> int:
    """Print a Markdown table. Returns 2 where there is no GPU."""
    options = PARSER.parse_args()
    if not torch.cuda.is_available():
        sys.stderr.write("bench_gpu_turns: there is no CUDA device\n")
        return 2
    context = multiprocessing.get_context("spawn")
    sys.stdout.write(HEAD)
    for count in options.processes:
        for asleep in (False, True):
            barrier = context.Barrier(count)
            with context.Pool(count, initializer=_begin, initargs=(barrier,)) as pool:
                rates = pool.map(_process, [(asleep, options.seconds)] * count, chunksize=1)
            waits, busy, copies = (sum(column) for column in zip(*rates, strict=True))
            how = "sleep" if asleep else "ask"
            sys.stdout.write(f"| {count} | {how} | {waits:.0f} | {busy:.1f} | {copies:.0f} |\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
