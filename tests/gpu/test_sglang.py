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
from traceproof.run.known import read_known
from traceproof.run.schema import for_op_type
from traceproof.run.trusted import Implementation, call

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    # What the pinned packages use is theirs to bring up to date.
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning"),
]
OWN = support.OWN
# At sizes that SGLang's kernels take, with the name of such a definition.
LARGER: dict[str, tuple[str, dict[str, int]]] = {
    "rope_with_cos_sin_cache_gptj_style_d32_rd32": ("d64_rd64", {"head_size": 64, "rotary_dim": 64}),
    "rope_with_cos_sin_cache_neox_style_d64_rd32": ("d128_rd64", {"head_size": 128, "rotary_dim": 64}),
    "gdn_mtp_qk2_v4_d32_k_last": (
        "qk4_v8_d128_k_last",
        {"num_q_heads": 4, "num_k_heads": 4, "num_v_heads": 8, "head_size": 128},
    ),
    "mamba_ssu_decode_h8_d16_s32_ng2": (
        "h64_d64_s128_ng8",
        {"nheads": 64, "head_dim": 64, "dstate": 128, "ngroups": 8},
    ),
}


def larger(definition: Definition) -> Definition:
    end, sizes = LARGER[definition.name]
    start = definition.name.rsplit("_", end.count("_") + 1)[0]
    return support.variant(definition, **sizes).model_copy(update={"name": f"{start}_{end}"})


DEFINITIONS = [*OWN, *(larger(one) for one in OWN if one.name in LARGER)]


@pytest.mark.parametrize("truth", ["sglang", "sglang_native"])
@pytest.mark.parametrize("definition", DEFINITIONS, ids=lambda definition: definition.name)
def test_the_judge_passes_it(definition: Definition, truth: str) -> None:
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
    known = read_known(Path(__file__).parents[2] / "known.yaml").findings
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
