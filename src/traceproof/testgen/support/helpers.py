"""What tests written by hand beside the generated ones can use: a definition, its reference, its ground truth."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from traceproof.dataset.definition import Definition
from traceproof.ops.cases import Case
from traceproof.reasons import Unavailable
from traceproof.run.implementation import named_outputs
from traceproof.stacks import FIRST_TRUTHS
from traceproof.testgen.support.cases import definitions_of, read_definition
from traceproof.testgen.support.trial import WORKERS, truth

Function = Callable[..., Any]
DATASET = Path(__file__).resolve().parents[3]  # <dataset>/tests/references/<this package>/


@cache
def load_definition(name: str, dataset: Path = DATASET) -> Definition:
    """The definition of that name. Raises LookupError: the dataset has none, or two."""
    folder = definitions_of(dataset)
    found = sorted(folder.rglob(f"{name}.json"))
    if len(found) != 1:
        raise LookupError(f"{folder} holds {len(found)} files {name}.json; expected one")
    return read_definition(found[0])


def reference_of(definition: Definition) -> Function:
    """The definition's own reference, called with its inputs in their order, in a process of its own.

    It returns one output, or several as a tuple in the definition's order.
    """

    def run(*inputs: Any) -> Any:  # noqa: ANN401 - tensors and scalars
        values = dict(zip(definition.inputs, inputs, strict=True))
        axes = {
            axis: size
            for name, spec in definition.inputs.items()
            if isinstance(values[name], torch.Tensor)
            for axis, size in zip(spec.shape or (), values[name].shape, strict=False)
        }
        case = Case("own", "small", axes, 0)
        device = next((v.device.type for v in inputs if isinstance(v, torch.Tensor)), "cpu")
        taken = WORKERS.source(definition, device).run(case, values, seed=0)
        outputs = [value.to(device) for value in taken.outputs.values()]
        return outputs[0] if len(outputs) == 1 else tuple(outputs)

    return run


def get_ground_truth(definition: Definition, device: torch.device | str | None = None) -> Function:
    """The first ground truth that runs on the device, by the order FlashInfer, SGLang, FLA, PyTorch.

    Called with the inputs in the definition's order, it returns the outputs by name. The test is skipped, with the
    reason of each, where there is none. The device is a GPU, if there is one, unless it is given.
    """
    place = torch.device(device if device is not None else "cuda" if torch.cuda.is_available() else "cpu")
    reasons = []
    for name in FIRST_TRUTHS:
        found = truth(name, definition, place)
        if isinstance(found, Unavailable):
            reasons.append(f"{name}: {found.reason}: {found.message}")
            continue
        return lambda *inputs, called=found: named_outputs(
            definition, called.run(definition, dict(zip(definition.inputs, inputs, strict=True)))
        )
    pytest.skip("; ".join(reasons))
