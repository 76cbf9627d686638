"""What tests written by hand beside the generated ones can use: a definition, its reference, its ground truth."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from traceproof.actors.base import Unavailable, named_outputs
from traceproof.actors.reference import Reference
from traceproof.dataset.definition import Definition
from traceproof.ops import registry
from traceproof.stacks import FIRST_TRUTHS
from traceproof.testgen.support.definition import read_definition
from traceproof.testgen.support.trial import resolve
from traceproof.worker import policy

Function = Callable[..., Any]
DATASET = Path(__file__).resolve().parents[3]  # <dataset>/tests/references/<this package>/


@cache
def load_definition(name: str, dataset: Path = DATASET) -> Definition:
    """The definition of that name.

    Raises:
        LookupError: the dataset has none, or two.
    """
    found = sorted((dataset / "definitions").rglob(f"{name}.json"))
    if len(found) != 1:
        raise LookupError(f"{dataset / 'definitions'} holds {len(found)} files {name}.json; expected one")
    definition: Any = read_definition(found[0])  # the same by the name that it has beside tests
    return cast("Definition", definition)


def reference_of(definition: Definition) -> Function:
    """The definition's own reference, to be called with its inputs in their order.

    Raises:
        AssertionError: its code says what no reference has a reason to say.
    """
    refused = policy.check(definition.reference)
    assert not refused, "the reference may not run:\n" + "\n".join(str(refusal) for refusal in refused)
    actor = Reference()
    actor.prepare(definition)
    op, _ = registry.for_definition(definition)
    return lambda *inputs: actor.run(definition, op, dict(zip(definition.inputs, inputs, strict=True)))


def get_ground_truth(definition: Definition, device: torch.device | str | None = None) -> Function:
    """The first ground truth that runs on the device, by the order FlashInfer, SGLang, FLA, PyTorch.

    Called with the inputs in the definition's order, it returns the outputs by name. The test is skipped, with
    the reason of each, where there is none.

    Args:
        definition: what it has to compute.
        device: None: a GPU if there is one.
    """
    place = torch.device(device if device is not None else "cuda" if torch.cuda.is_available() else "cpu")
    reasons = []
    for stack in FIRST_TRUTHS:
        found = resolve(stack, definition, place)
        if isinstance(found, Unavailable):
            reasons.append(f"{stack}: {found.reason}: {found.message}")
            continue
        adapter, api = found
        return lambda *inputs, adapter=adapter, api=api: named_outputs(
            definition, adapter.call(api, definition, dict(zip(definition.inputs, inputs, strict=True)))
        )
    pytest.skip("; ".join(reasons))
