"""What a call changed of its inputs is found: in the file on a CPU, by the caller's copies on a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from traceproof.dataset.definition import Definition
from traceproof.ops import registry
from traceproof.ops.base import Values
from traceproof.ops.cases import Case
from traceproof.run import tensor_files
from traceproof.run.tensor_files import (
    placed,
    plain_tensor,
    plain_tensors,
    read_mapped,
    views,
    write_back,
    write_outputs,
)
from traceproof.run.transfer import Layout, Transfer

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


def test_another_size_is_a_change_of_that_input_alone() -> None:
    before = [torch.zeros(3), torch.zeros(16), torch.zeros(2, dtype=torch.bool)]
    inputs = [torch.zeros(3), torch.zeros(16), torch.zeros(2, dtype=torch.bool)]
    inputs[1].resize_(8)
    assert tensor_files.differing(list(zip(inputs, before, strict=True))) == [False, True, False]


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
    monkeypatch.setattr(tensor_files, "_packs", lambda value: isinstance(value, torch.Tensor) and value.numel())
    values = odd_tensors()
    found = plain_tensors(values)
    for one, value in zip(found, values, strict=True):
        alone = plain_tensor(value)
        assert (one.dtype, one.shape) == (alone.dtype, alone.shape)
        assert one.is_contiguous()
        assert torch.equal(one, alone)
    owners = [one.untyped_storage().data_ptr() for one in found if one.numel()]
    assert len(set(owners)) == len(owners)


def test_a_file_is_placed_as_what_it_holds_and_once_more_untouched(tmp_path: Path) -> None:
    three = torch.tensor([[1.0, float("nan")]]).bfloat16()
    values: Values = {"one": torch.arange(5), "two": 0.5, "three": three}
    sent = transfer(tmp_path, on_gpu=True).send(values, "case.in")
    inputs, before = placed(tmp_path / "case.in", sent.specs, torch.device("cpu"))
    assert torch.equal(inputs[0], torch.arange(5))
    assert inputs[1] == 0.5
    assert tensor_files.differing([(inputs[2], three)]) == [False]
    inputs[0][2] = 7
    assert torch.equal(before[0], torch.arange(5))
    assert write_back(read_mapped(tmp_path / "case.in", sent.specs), inputs, before) == [0]


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


VALUES = {
    "hidden_states": torch.arange(192).reshape(2, 96).bfloat16(),
    "weight": torch.linspace(-1, 1, 96).bfloat16(),
}


@pytest.mark.parametrize("shift", [0, 1])
def test_inputs_lie_between_bytes_of_ours_in_the_file_and_in_one_buffer_as_on_a_gpu(
    shift: int, tmp_path: Path
) -> None:
    files = transfer(tmp_path, on_gpu=False)
    sent = files.send({**VALUES}, "in", layout=Layout(room=128, byte=0xFF, shift=shift), case=CASE)
    assert [spec["offset"] % 64 for spec in sent.specs] == [2 * shift] * 2
    whole = torch.from_file(str(tmp_path / "in"), size=sent.size, dtype=torch.uint8)
    for found in (read_mapped(tmp_path / "in", sent.specs), views(whole, sent.specs)):
        assert all(torch.equal(one, other) for one, other in zip(found, VALUES.values(), strict=True))
    inside = sum(96 * rows * 2 for rows in (2, 1))
    assert int((whole == 0xFF).sum()) >= sent.size - inside
    assert sum(end - start for _, start, end in sent.gaps) == sent.size - inside


@pytest.mark.parametrize(("place", "wanted"), [(-1, ["hidden_states"]), (384, ["hidden_states"]), (0, [])])
def test_a_byte_changed_beside_an_input_is_named(place: int, wanted: list[str], tmp_path: Path) -> None:
    files = transfer(tmp_path, on_gpu=False)
    sent = files.send({**VALUES}, "in", layout=Layout(room=128, byte=0xFF), case=CASE)
    whole = torch.from_file(str(tmp_path / "in"), shared=True, size=sent.size, dtype=torch.uint8)
    whole[sent.specs[0]["offset"] + place] = 7
    outputs = write_outputs(tmp_path / "out", [("output", torch.ones(2, 96).bfloat16())])
    answer = {"outputs": outputs, "aliased": [], "subclassed": [], "written": []}
    taken = files.take(sent, answer, CASE, data="in", out="out")
    assert taken.overrun == wanted
    assert taken.mutated == ([] if wanted else ["hidden_states"])


def test_places_for_outputs_follow_the_inputs_and_hold_no_number(tmp_path: Path) -> None:
    files = transfer(tmp_path, on_gpu=False)
    sent = files.send({**VALUES}, "in", layout=Layout(room=64, destinations=True), case=CASE)
    assert sent.destinations == 1
    *_, place = read_mapped(tmp_path / "in", sent.specs)
    assert place.shape == (2, 96)
    assert bool(place.isnan().all())
