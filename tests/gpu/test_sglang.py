"""SGLang's ground truths on our own definitions, by the judge; needs a CUDA device and SGLang."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path

import op_support as support
import pytest
import torch

from traceproof.dataset.definition import Definition
from traceproof.ops import registry
from traceproof.run.case import place
from traceproof.run.implementations import for_op_type
from traceproof.run.known import read_known
from traceproof.run.trusted import Implementation, call

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    # What the pinned packages use is theirs to bring up to date.
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning"),
]
TESTS = Path(__file__).parents[1]
FILES = sorted([*TESTS.glob("dataset/definitions/*/*.json"), *TESTS.glob("gpu/dataset/definitions/*/*.json")])


@pytest.mark.parametrize("truth", ["sglang", "sglang_native"])
@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_the_judge_passes_it(path: Path, truth: str) -> None:
    definition = Definition.model_validate_json(path.read_text(encoding="utf-8"))
    op, _ = registry.for_definition(definition)
    if truth not in for_op_type(definition.op_type):
        pytest.skip(f"{truth} has no adapters for {definition.op_type}")
    called = Implementation(truth)
    called.device = "cuda"
    unavailable = called.unavailable(definition)
    if unavailable is not None:
        pytest.skip(f"{unavailable.reason.value}: {unavailable.message}")
    found: dict[str, str] = {}
    for case in support.cases(definition):
        inputs = support.inputs_of(definition, case)
        on_gpu = place(dict(inputs), torch.device("cuda"))
        outputs = call(called, definition, op, case, on_gpu, further=True)
        given = [outputs[name].cpu() for name in definition.outputs]
        rulings = support.judged(definition, case, given, support.truth(definition, inputs))
        found |= {f"{case.id} {name}": r.message for name, r in rulings.items() if r.verdict.value != "pass"}
    known = read_known(TESTS.parent / "known.yaml").findings
    versions = {name: metadata.version(name) for name in ("sglang", "sglang-kernel")}
    listed = [
        entry
        for entry in known
        if entry.implementation == truth and entry.means(definition.name, definition.digest)
    ]
    ran = {case.id for case in support.cases(definition)}  # those of size class stress are not
    expected = {
        f"{case} {name}" for e in listed if e.stands(versions) for case in ran & set(e.cases) for name in e.outputs
    }
    assert found.keys() == expected, found
