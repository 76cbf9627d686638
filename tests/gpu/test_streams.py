"""Work that a reference leaves on another stream is waited for, also in its repeats; needs CUDA."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from definitions import GOOD, rmsnorm

from traceproof.dataset.definition import Definition
from traceproof.ops import registry
from traceproof.ops.base import Values
from traceproof.run.trusted import Implementation, Runner

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
LATE = (
    GOOD.replace("def run(", "def norm(")
    + """

def run(hidden_states, weight):
    output = torch.zeros_like(hidden_states)
    stream = torch.cuda.Stream()
    busy = torch.ones(4096, 4096, device=hidden_states.device)
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(100):
            busy = busy @ busy / 4096
        output.copy_(norm(hidden_states, weight))
    return output
"""
)
CASE = {"id": "small-1", "size": "small", "axes": {"batch_size": 7}, "seed": 0, "params": {}}


class Written(Implementation):
    """What a text defines, on a GPU."""

    device = "cuda"

    def __init__(self, text: str) -> None:
        super().__init__("written")
        self._module: dict[str, Any] = {}
        exec(text, self._module)  # noqa: S102 - written above

    def run(self, definition: Definition, inputs: Values) -> Any:  # noqa: ANN401 - what it returns
        """One call."""
        return self._module["run"](*(inputs[name] for name in definition.inputs))


def outcome(reference: str) -> tuple[dict[str, Any], torch.Tensor]:
    """What a run of one case says, and its output."""
    definition = Definition.model_validate(rmsnorm("norm", reference))
    op, _ = registry.for_definition(definition)
    runner = Runner(definition, op, Written(reference), torch.device("cuda"), None)
    said = runner.run({"case": CASE, "repeat": True})
    return said, said["outputs"]["output"]


def test_where_inputs_are_drawn_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    on_host, from_host = outcome(GOOD)
    monkeypatch.setattr("traceproof.run.case.HOST_BYTES", 0)
    on_gpu, from_gpu = outcome(GOOD)
    assert on_host["inputs"] == on_gpu["inputs"]
    assert torch.equal(from_host, from_gpu)


def test_late_work_is_in_every_output() -> None:
    _, expected = outcome(GOOD)
    said, output = outcome(LATE)
    assert torch.equal(output, expected)
    assert bool(output.any())
    assert said["varying"] == []
    assert not said["remembered"]
