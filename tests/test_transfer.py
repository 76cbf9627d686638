"""What lies in the memory that a call shares: inputs and their surroundings, what was changed there, outputs."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch

from traceproof.dataset.definition import Definition
from traceproof.files import BorderError
from traceproof.ops import registry
from traceproof.ops.base import Values
from traceproof.ops.cases import Case
from traceproof.run import tensors
from traceproof.run.runner import differing, write_back, write_outputs
from traceproof.run.tensors import plain_tensor, plain_tensors, values_in, whole
from traceproof.run.untrusted import PLAIN, CallMemory, Layout

DATASET = Path(__file__).parent / "dataset"
CASE = Case("small-0", "small", {"batch_size": 2}, 0)


def definition() -> Definition:
    path = DATASET / "definitions" / "rmsnorm" / "rmsnorm_h96.json"
    return Definition.model_validate_json(path.read_text())


def memory(values: Values, *, on_gpu: bool = False, layout: Layout = PLAIN) -> AbstractContextManager[CallMemory]:
    found = definition()
    return CallMemory.of(found, registry.get(found.op_type), CASE, values, layout=layout, on_gpu=on_gpu)


@pytest.mark.parametrize(("kept", "wanted"), [(True, [1]), (False, [0, 1])])
def test_only_what_differs_from_its_copy_is_written_back(*, kept: bool, wanted: list[int]) -> None:
    before = [torch.zeros(3), torch.tensor([1.0, float("nan")]), 2.5, torch.empty(0)]
    mapped = [value.clone() if isinstance(value, torch.Tensor) else value for value in before]
    inputs = [value.clone() if isinstance(value, torch.Tensor) else value for value in before]
    inputs[1][0] = 7  # type: ignore[index]
    assert write_back(mapped, inputs, before if kept else None) == wanted
    assert mapped[1][0] == 7  # type: ignore[index]


def test_another_size_is_a_change_of_that_input_alone() -> None:
    before = [torch.zeros(3), torch.zeros(16), torch.zeros(2, dtype=torch.bool)]
    inputs = [torch.zeros(3), torch.zeros(16), torch.zeros(2, dtype=torch.bool)]
    inputs[1].resize_(8)
    assert differing(list(zip(inputs, before, strict=True))) == [False, True, False]


def odd_tensors() -> list[object]:
    held = torch.arange(24, dtype=torch.float32)
    return [
        held[1:7].view(2, 3).t(),
        2.5,
        held[3],
        held.long().view(3, 8)[:, 1],
        held[:1].as_strided((1,), (512,)),
        torch.tensor([True, False]),
        held,
        held,
        held[:0],
        held.bfloat16()[1:],
    ]


def test_tensors_put_together_are_what_each_is_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensors, "_packs", lambda value: isinstance(value, torch.Tensor) and value.numel())
    values = odd_tensors()
    found = plain_tensors(values)
    for one, value in zip(found, values, strict=True):
        alone = plain_tensor(value)
        assert (one.dtype, one.shape) == (alone.dtype, alone.shape)
        assert one.is_contiguous()
        assert torch.equal(one, alone)
    owners = [one.untyped_storage().data_ptr() for one in found if one.numel()]
    assert len(set(owners)) == len(owners)


def test_bytes_in_one_tensor_are_what_lies_in_memory() -> None:
    three = torch.tensor([[1.0, float("nan")]]).bfloat16()
    with memory({"one": torch.arange(5), "two": 0.5, "three": three}) as shared:
        for held in (shared.inputs.held, whole(shared.inputs.held).clone()):
            one, two, found = values_in(held, shared.specs)
            assert torch.equal(one, torch.arange(5))
            assert two == 0.5
            assert differing([(found, three)]) == [False]


VALUES: dict[str, torch.Tensor] = {
    "hidden_states": torch.arange(192).reshape(2, 96).bfloat16(),
    "weight": torch.linspace(-1, 1, 96).bfloat16(),
}


def answer(shared: CallMemory, written: Sequence[int] = ()) -> dict[str, Any]:
    """What a worker says of a right call."""
    outputs = write_outputs(shared.outputs.held, [("output", torch.ones(2, 96).bfloat16())])
    return {"outputs": outputs, "aliased": [], "subclassed": [], "written": list(written)}


@pytest.mark.parametrize(
    ("on_gpu", "said", "wanted"),
    [
        (False, [], ["hidden_states"]),  # on a CPU the memory is the evidence, whatever is said
        (True, [0], ["hidden_states"]),
        (True, [0, 1], ["hidden_states"]),
    ],
)
def test_a_changed_input_is_named(*, on_gpu: bool, said: Sequence[int], wanted: list[str]) -> None:
    with memory({**VALUES}, on_gpu=on_gpu) as shared:
        hidden, _ = values_in(shared.inputs.held, shared.specs)
        hidden[0, 0] = 3
        taken = shared.taken(answer(shared, said))
    assert taken.mutated == wanted
    assert torch.equal(taken.outputs["output"], torch.ones(2, 96).bfloat16())


def test_what_was_taken_stays_as_it_was_whatever_is_written_later() -> None:
    with memory({**VALUES}) as shared:
        taken = shared.taken(answer(shared))
        whole(shared.outputs.held).fill_(7)
        assert torch.equal(taken.outputs["output"], torch.ones(2, 96).bfloat16())
    assert torch.equal(taken.outputs["output"], torch.ones(2, 96).bfloat16())
    assert not whole(shared.inputs.held).any()  # its pages are given back


def test_more_than_there_is_room_for_is_refused() -> None:
    with memory({**VALUES}) as shared:
        said = write_outputs(
            shared.outputs.held, [("output", torch.empty(shared.outputs.size + 1, dtype=torch.int8))]
        )
        with pytest.raises(BorderError, match="far more than the definition says"):
            shared.taken({"outputs": said, "aliased": [], "subclassed": []})


@pytest.mark.parametrize("shift", [0, 1])
def test_inputs_lie_between_bytes_of_ours(shift: int) -> None:
    with memory({**VALUES}, layout=Layout(room=128, byte=0xFF, shift=shift)) as shared:
        assert [spec["offset"] % 64 for spec in shared.specs] == [2 * shift] * 2
        held = whole(shared.inputs.held)
        found = values_in(shared.inputs.held, shared.specs)
        assert all(torch.equal(one, other) for one, other in zip(found, VALUES.values(), strict=True))
        inside = sum(96 * rows * 2 for rows in (2, 1))
        assert int((held == 0xFF).sum()) >= shared.inputs.size - inside
        assert sum(end - start for _, start, end in shared.gaps) == shared.inputs.size - inside


@pytest.mark.parametrize(("place", "wanted"), [(-1, ["hidden_states"]), (384, ["hidden_states"]), (0, [])])
def test_a_byte_changed_beside_an_input_is_named(place: int, wanted: list[str]) -> None:
    with memory({**VALUES}, layout=Layout(room=128, byte=0xFF)) as shared:
        whole(shared.inputs.held)[shared.specs[0]["offset"] + place] = 7
        taken = shared.taken(answer(shared))
    assert taken.overrun == wanted
    assert taken.mutated == ([] if wanted else ["hidden_states"])


def test_places_for_outputs_follow_the_inputs_and_hold_no_number() -> None:
    with memory({**VALUES}, layout=Layout(room=64, destinations=True)) as shared:
        assert shared.destinations == 1
        *_, place = values_in(shared.inputs.held, shared.specs)
        assert place.shape == (2, 96)
        assert bool(place.isnan().all())


def test_inputs_out_of_one_buffer_lie_on_its_device_the_empty_ones_too() -> None:
    specs = [{"dtype": "float32", "shape": [2], "offset": 0}, {"dtype": "float32", "shape": [0, 4], "offset": 64}]
    found = values_in(torch.empty(64, dtype=torch.uint8, device="meta"), specs)
    assert [value.device.type for value in found] == ["meta", "meta"]
    assert [tuple(value.shape) for value in found] == [(2,), (0, 4)]
