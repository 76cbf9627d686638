"""A ground truth's second run, and its run on other inputs: what counts as other bits, and what as remembered."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from traceproof.dataset.definition import Definition
from traceproof.ops.base import Values, tensor
from traceproof.ops.cases import Case
from traceproof.ops.generic import GenericOp
from traceproof.run.trusted import Implementation, Runner

INPUTS = {"values": torch.arange(8.0), "out": torch.full((8,), torch.nan)}  # `out`: memory to write to
DEFINITION = Definition.model_validate(
    {
        "name": "copied",
        "op_type": "unheard_of",
        "axes": {"rows": {"type": "var"}},
        "inputs": {name: {"shape": ["rows"], "dtype": "float32"} for name in INPUTS},
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
    save_file(INPUTS, tmp_path / "made.safetensors")
    given = {name: {"type": "safetensors", "path": "made.safetensors", "tensor_key": name} for name in INPUTS}
    case = Case("small-0", "small", {"rows": 8}, 0, {"inputs": given})
    op, device = GenericOp("unheard_of"), torch.device("cpu")
    runner = Runner(DEFINITION, op, implementation("copies"), device, tmp_path)
    said = runner.run({"case": case.as_json(), "repeat": True})
    assert said["varying"] == []
    assert not said["remembered"]
