"""What a ground truth takes in a far case, as far as a CPU shows it, fits into what its job leases."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.profiler import profile

from traceproof.dataset.definition import Definition
from traceproof.dataset.tree import read_tree
from traceproof.ops import far, lookup, registry
from traceproof.ops.cases import Case
from traceproof.run.case import make_inputs
from traceproof.run.plan import SLACK
from traceproof.run.trusted import Implementation

NAME = "torch"
OURS = {name: entry.definition for name, entry in read_tree(Path(__file__).parent / "dataset").definitions.items()}
HOST = torch.device("cpu")
BYTES = 64 << 20  # that a case is scaled down to


def enlarged(definition: Definition) -> far.Far:
    found = registry.get(definition.op_type).of_form(definition).enlarged(definition)
    assert found is not None
    return found


def far_case(definition: Definition) -> Case | None:
    """The far case of rows, scaled down; None: there is none, or none of PyTorch's forms takes it."""
    cases = registry.get(definition.op_type).of_form(definition).stress(definition, seed=0)
    whole = next((one for one in cases if far.SIZE in one.params), None)
    if whole is None or enlarged(definition).slots or lookup.serving(NAME, definition) is None:
        return None
    grown = enlarged(definition)
    own, size = whole.axes[grown.axis], whole.params[far.SIZE]
    times = size * BYTES // (own * grown.eager_bytes(definition, whole))
    return replace(whole, params={**whole.params, far.SIZE: own * times})


FAR = {name: (definition, one) for name, definition in OURS.items() if (one := far_case(definition)) is not None}


def peak(call: Callable[[], object]) -> int:
    """Bytes of memory that a call has at once, what it gives included."""
    with profile(profile_memory=True) as profiled:
        held = call()
    del held
    assert profiled.profiler is not None

    def totals() -> Iterator[int]:
        total = 0
        for event in profiled.profiler.kineto_results.events():
            total += event.nbytes() if event.name() == "[memory]" else 0
            yield total

    return max(totals())


@pytest.mark.parametrize(("definition", "one"), FAR.values(), ids=FAR)
def test_pytorchs_forms_take_no_more_than_their_estimate(definition: Definition, one: Case) -> None:
    op, grown = registry.get(definition.op_type).of_form(definition), enlarged(definition)
    truth = Implementation(NAME)
    truth.device = "cpu"
    if truth.unavailable(definition) is not None:
        pytest.skip("needs a GPU")
    drawn = make_inputs(op, definition, one, device=HOST)

    def call() -> object:
        given = grown.spread(definition, one, drawn)
        return given, truth.run(definition, given)

    most = op.memory(definition, one) + grown.eager_bytes(definition, one)
    assert 0.1 * most < peak(call) < SLACK * most
