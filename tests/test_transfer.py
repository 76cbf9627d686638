"""What lies in the memory of a call: inputs, their surroundings, outputs, and what was never written."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch
from definitions import rmsnorm, write
from safetensors.torch import save_file

from traceproof.dataset.definition import Definition
from traceproof.dataset.tree import read_definition
from traceproof.files import BorderError
from traceproof.ops import registry
from traceproof.ops.base import Values, tensor
from traceproof.ops.cases import Case
from traceproof.ops.generic import GenericOp
from traceproof.run import tensors
from traceproof.run.calls import UNWRITTEN, poisoned
from traceproof.run.runner import differing, load_module, write_back, write_outputs
from traceproof.run.tensors import plain_tensor, plain_tensors, values_in, whole
from traceproof.run.trusted import Implementation, Runner
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
    assert differing([(inputs[0][:0], before[0]), (before[0], inputs[0][:0])]) == [True, True]  # resized


def odd_tensors() -> list[object]:
    held = torch.arange(24, dtype=torch.float32)
    return [
        held[1:7].view(2, 3).t(), 2.5, held[3], held.long().view(3, 8)[:, 1], held[:1].as_strided((1,), (512,)),
        torch.tensor([True, False]), held, held, held[:0], held.bfloat16()[1:],
    ]  # fmt: skip


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
            shared.outputs.held, [("output", torch.empty(1 + shared.outputs.size, dtype=torch.int8))]
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


FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2]
INTEGERS = [torch.int64, torch.int32, torch.int8, torch.uint8]
GIVEN = torch.zeros(3, 4)
MAKERS: dict[str, Callable[[], torch.Tensor]] = {
    "empty": lambda: torch.empty(3, 4),
    "empty_like": lambda: torch.empty_like(GIVEN),
    "empty_strided": lambda: torch.empty_strided((3, 4), (1, 3)),
    "empty_permuted": lambda: torch.empty_permuted((3, 4), (1, 0)),
    "new_empty": lambda: GIVEN.new_empty(3, 4),
    "new_empty_strided": lambda: GIVEN.new_empty_strided((3, 4), (4, 1)),
}


@pytest.mark.parametrize("dtype", [*FLOATS, torch.float8_e8m0fnu, *INTEGERS, torch.bool])
def test_floats_are_nan_or_any_fill_and_integers_the_largest(dtype: torch.dtype) -> None:
    values = []
    for fill in ((), (-217.0,), (20.0,)):
        with poisoned(*fill):
            values.append(torch.empty(5, dtype=dtype))
            assert torch.empty(0, 7, dtype=dtype).shape == (0, 7)
    if dtype.is_floating_point:
        assert bool(values[0].float().isnan().all())
        assert all(bool((value.float().abs() >= 16).all()) for value in values[1:])
    else:
        assert bool((values[0] == (1 if dtype is torch.bool else torch.iinfo(dtype).max)).all())


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS.keys())
def test_every_way_to_get_such_memory(make: Callable[[], torch.Tensor]) -> None:
    with poisoned():
        value = make()
    assert bool(value.isnan().all())
    assert value.shape == (3, 4)


def test_what_was_there_is_put_back_even_after_an_error() -> None:
    before = [vars(owner).get(name) for owner, name in UNWRITTEN]
    with pytest.raises(ZeroDivisionError), poisoned():
        raise ZeroDivisionError
    assert [vars(owner).get(name) for owner, name in UNWRITTEN] == before


def test_names_that_a_reference_takes_out_of_torch_are_covered(tmp_path: Path) -> None:
    text = "from torch import empty\n\n\ndef run(hidden_states, weight):\n    return empty(hidden_states.shape)\n"
    definition = read_definition(write(tmp_path, rmsnorm("rmsnorm_a", reference=text))).definition
    with poisoned():
        returned = load_module(definition.reference, "poisoned_reference").run(torch.ones(2, 3), torch.ones(3))
    assert bool(returned.isnan().all())


GIVEN_INPUTS = {"values": torch.arange(8.0), "out": torch.full((8,), torch.nan)}  # `out`: memory to write to
COPIED = Definition.model_validate(
    {
        "name": "copied",
        "op_type": "unheard_of",
        "axes": {"rows": {"type": "var"}},
        "inputs": {name: {"shape": ["rows"], "dtype": "float32"} for name in GIVEN_INPUTS},
        "outputs": {"copy": {"shape": ["rows"], "dtype": "float32"}},
        "reference": "def run(values, out):\n    return values\n",
    }
)


class _Copies(Implementation):
    def run(self, definition: Definition, inputs: Values) -> Any:  # noqa: ANN401 - as it returns
        del definition
        return {"copy": tensor(inputs, "values").clone()}


class _Draws(Implementation):
    def run(self, definition: Definition, inputs: Values) -> Any:  # noqa: ANN401 - as it returns
        del definition
        return {"copy": tensor(inputs, "values") + torch.rand(8)}


@pytest.mark.parametrize("implementation", [_Copies, _Draws])
def test_what_an_init_made_is_one_set_of_inputs_and_a_sampler_draws_from_the_case_s_seed(
    implementation: type[Implementation], tmp_path: Path
) -> None:
    save_file(GIVEN_INPUTS, tmp_path / "made.safetensors")
    given = {
        name: {"type": "safetensors", "path": "made.safetensors", "tensor_key": name} for name in GIVEN_INPUTS
    }
    case = Case("small-0", "small", {"rows": 8}, 0, {"inputs": given})
    op, device = GenericOp("unheard_of"), torch.device("cpu")
    runner = Runner(COPIED, op, implementation("copies"), device, tmp_path)
    said = runner.run({"case": case.as_json(), "repeat": True})
    assert said["varying"] == []
    assert not said["remembered"]
