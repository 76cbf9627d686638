"""What a call changed of its inputs is found: in the file on a CPU, by the caller's copies on a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from traceproof.dataset.definition import Definition
from traceproof.execution.tensor_files import read_mapped, write_back, write_outputs
from traceproof.execution.transfer import Transfer
from traceproof.ops import registry
from traceproof.ops.base import Values
from traceproof.ops.cases import Case

DATASET = Path(__file__).parent / "dataset"
CASE = Case("small-0", "small", {"batch_size": 2}, 0)


def definition() -> Definition:
    path = DATASET / "definitions" / "rmsnorm" / "rmsnorm_h96.json"
    return Definition.model_validate_json(path.read_text())


def transfer(folder: Path, *, on_gpu: bool) -> Transfer:
    found = definition()
    return Transfer(found, registry.get(found.op_type), folder, on_gpu=on_gpu)


@pytest.mark.parametrize(("kept", "wanted"), [(True, [1]), (False, [0, 1])])
def test_only_what_differs_from_its_copy_is_written_back(*, kept: bool, wanted: list[int]) -> None:
    before = [torch.zeros(3), torch.tensor([1.0, float("nan")]), 2.5, torch.empty(0)]
    mapped = [value.clone() if isinstance(value, torch.Tensor) else value for value in before]
    inputs = [value.clone() if isinstance(value, torch.Tensor) else value for value in before]
    inputs[1][0] = 7  # type: ignore[index]
    assert write_back(mapped, inputs, before if kept else None) == wanted
    assert mapped[1][0] == 7  # type: ignore[index]


def test_a_zero_of_the_other_sign_is_a_change() -> None:
    before, inputs, mapped = [torch.zeros(2)], [torch.tensor([0.0, -0.0])], [torch.zeros(2)]
    assert write_back(mapped, inputs, before) == [0]


@pytest.mark.parametrize(
    ("on_gpu", "said", "wanted"),
    [
        (False, [], ["hidden_states"]),  # on a CPU the file is the evidence, whatever is said
        (True, [0], ["hidden_states"]),
        (True, [0, 1], ["hidden_states"]),
    ],
)
def test_a_changed_input_is_named(tmp_path: Path, *, on_gpu: bool, said: Sequence[int], wanted: list[str]) -> None:
    files = transfer(tmp_path, on_gpu=on_gpu)
    values: Values = {
        "hidden_states": torch.ones(2, 96, dtype=torch.bfloat16),
        "weight": torch.ones(96).bfloat16(),
    }
    sent = files.send(values, "in")
    hidden, _ = read_mapped(tmp_path / "in", sent.specs)
    hidden[0, 0] = 3
    outputs = write_outputs(tmp_path / "out", [("output", torch.ones(2, 96).bfloat16())])
    answer = {"outputs": outputs, "aliased": [], "subclassed": [], "written": list(said)}
    taken = files.take(sent, answer, CASE, data="in", out="out")
    assert taken.mutated == wanted
    assert torch.equal(taken.outputs["output"], torch.ones(2, 96).bfloat16())
