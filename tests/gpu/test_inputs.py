"""Inputs have the same bits wherever they are drawn; needs CUDA. TRACEPROOF_DATASET adds a dataset."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch

from traceproof.dataset.definition import Definition
from traceproof.ops import registry
from traceproof.ops.cases import Case
from traceproof.run.case import fingerprints, make_inputs
from traceproof.run.plan import PlanSelection, plan

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
TESTS = Path(__file__).parents[1]
DATASETS = [TESTS / "dataset"]
DATASETS += [Path(os.environ["TRACEPROOF_DATASET"])] if "TRACEPROOF_DATASET" in os.environ else []
LARGEST = 4 << 30  # bytes of a case


@pytest.mark.parametrize("dataset", DATASETS, ids=range(len(DATASETS)))
def test_a_gpu_draws_what_a_cpu_draws(dataset: Path, tmp_path: Path) -> None:
    differ, cases = [], 0
    for op_type in plan(
        dataset, tmp_path, PlanSelection(sizes=("small", "medium"), memory_limit=LARGEST)
    ).op_types:
        planned = json.loads((tmp_path / f"{op_type}.json").read_text(encoding="utf-8"))
        for name, entry in planned["definitions"].items():
            definition = Definition.model_validate(entry["definition"])
            op, _ = registry.for_definition(definition)
            for case in (Case(**each["case"]) for each in entry["cases"] if each["skip"] is None):
                here, there = (
                    fingerprints(make_inputs(op, definition, case, device=torch.device(device), dataset=dataset))
                    for device in ("cpu", "cuda")
                )
                differ += [(name, case.id, tensor) for tensor in here if here[tensor] != there[tensor]]
                cases += 1
    assert cases
    assert not differ
