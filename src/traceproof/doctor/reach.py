"""Which op_types have a ground truth on which machines: `python -m traceproof.doctor.reach` prints it as JSON.

Runs in the torch stack's interpreter: adapters are made of torch, and import the rest when they are called.
"""

import gc
import json
import os
import sys
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

from traceproof.doctor.ask import ask
from traceproof.ops import registry
from traceproof.stacks import TRUTHS

# op_type -> ground truth -> first and last compute capability of each adapter; None: one needs no GPU.
Declared = Mapping[str, Mapping[str, list[tuple[tuple[int, int], tuple[int, int]]] | None]]


def declared() -> Declared:
    """What the adapters say."""
    from traceproof.ops import lookup

    found: dict[str, dict[str, list[tuple[tuple[int, int], tuple[int, int]]] | None]] = {}
    for op_type in registry.known():
        found[op_type] = {}
        for truth in TRUTHS:
            ranges = [adapter.sm for adapter in lookup.adapters(truth, op_type)]
            if ranges:
                needs = [sm for sm in ranges if sm is not None]
                found[op_type][truth] = needs if len(needs) == len(ranges) else None
    return found


def asked(python: str, *, root: Path, seconds: float) -> Declared:
    """What the adapters say, by an interpreter; nothing where it can not be used."""
    environment = {**os.environ, "PYTHONPATH": str(root / "src"), "PYTHONDONTWRITEBYTECODE": "1"}
    answer = ask([python, "-P", "-m", __name__], seconds=seconds, environment=environment)
    found: Declared = {} if answer.problem else json.loads(answer.out.splitlines()[-1])
    return found


def here(told: Declared, sms: Iterable[str], truths: Collection[str]) -> dict[str, tuple[str, ...]]:
    """By op_type, which of `truths` run on a GPU of one of these compute capabilities, or on the CPU."""
    gpus = [tuple(map(int, sm.split("."))) for sm in sms]
    return {
        op_type: tuple(
            truth
            for truth, ranges in by_truth.items()
            if truth in truths
            and (ranges is None or any(tuple(low) <= gpu <= tuple(high) for gpu in gpus for low, high in ranges))
        )
        for op_type, by_truth in told.items()
    }


if __name__ == "__main__":
    sys.stdout.write(json.dumps(declared()) + "\n")
    gc.freeze()  # ending, Python would look for cycles in all of torch: half a second
