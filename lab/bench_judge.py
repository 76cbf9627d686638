"""Seconds that judging one case takes on one core, on all cores and on the GPU, by the size of its output.

Inputs are drawn, the float64 oracle is computed and one output is compared with it, as the judge does for large
cases (traceproof.run.judging); `LARGE_BYTES` is chosen by this table. Run it with the interpreter of the
torch stack and PYTHONPATH=src.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

import torch

from traceproof.dataset.definition import Definition
from traceproof.ops import registry
from traceproof.ops.base import Values
from traceproof.ops.cases import Case
from traceproof.run.inputs import make_inputs
from traceproof.run.judging import LargeCase

PARSER = argparse.ArgumentParser(description=__doc__)
PARSER.add_argument(
    "definition", type=Path, nargs="+", help="definitions with independent rows: gemm, rmsnorm, rope"
)
PARSER.add_argument("--elements", type=int, nargs="+", default=[1 << power for power in range(16, 27, 2)])


def measure(definition: Definition, elements: int) -> dict[str, float]:
    """Seconds by where it runs, for an output of about `elements` elements."""
    op, _ = registry.for_definition(definition)
    axis = op.row_axis(definition)
    if axis is None or len(definition.var_axes) != 1:
        raise SystemExit(f"{definition.name}: rows are not independent, or depend on more than one axis")
    (spec, *_) = definition.outputs.values()
    width = torch.Size(definition.shape_of(spec, {axis: 1}) or ()).numel()
    case = Case("bench", "large", {axis: max(1, elements // width)}, 0)
    inputs = make_inputs(op, definition, case, device=torch.device("cpu"))
    outputs = op.floor(definition, inputs) or product(definition, inputs)
    devices = {"one core": ("cpu", 1), "all cores": ("cpu", len(os.sched_getaffinity(0)))}
    if torch.cuda.is_available():
        devices["gpu"] = ("cuda", 1)
    found = {}
    for name, (device, threads) in devices.items():
        torch.set_num_threads(threads)
        for _ in range(2):  # the first one loads libraries and kernels
            judge = LargeCase(definition=definition, op=op, case=case, inputs=inputs, tolerance=None)
            started = time.perf_counter()
            judge.on(torch.device(device), {"bench": outputs})
            found[name] = time.perf_counter() - started
    return found


def product(definition: Definition, inputs: Values) -> dict[str, torch.Tensor]:
    """A product as a kernel gives it, for ops that have no floor."""
    left, right = (value for value in inputs.values() if isinstance(value, torch.Tensor))
    (name,) = definition.outputs
    return {name: (left.float() @ right.float().T).to(left.dtype)}


def main() -> None:
    """Print the table."""
    options = PARSER.parse_args()
    sys.stdout.write(f"torch {torch.__version__}, {len(os.sched_getaffinity(0))} cores\n")
    for path in options.definition:
        definition = Definition.model_validate_json(path.read_text(encoding="utf-8"))
        for elements in options.elements:
            seconds = measure(definition, elements)
            figures = "  ".join(f"{name} {value:8.3f}" for name, value in seconds.items())
            sys.stdout.write(f"{definition.name:24} {elements:>10,}  {figures}\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
