"""Findings F1 and F2 of docs/findings.md: references of flashinfer-bench 0.1.2's dataset. Needs torch and that dataset, and no GPU.

`python flashinfer-bench-references.py FOLDER`: `flashinfer_trace` of the package's source archive (`pip download --no-binary :all:
flashinfer-bench==0.1.2`). A query without a key gives NaN, and a sequence without tokens loses its state.
"""

import json
import sys
from pathlib import Path

import torch

MASKED = (
    "gqa_ragged_prefill_causal_h32_kv4_d128",
    "gqa_ragged_prefill_causal_h32_kv8_d128",
    "mla_paged_prefill_causal_h16_ckv512_kpe64_ps1",
    "mla_paged_prefill_causal_h16_ckv512_kpe64_ps64",
)
STATES = ("gdn_prefill_qk4_v8_d128_k_last", "gdn_prefill_qk8_v16_d128_k_last")
# Three queries and one key; of the delta rule three tokens in the first of two sequences.
SIZES = {"total_q": 3, "total_kv": 1, "num_kv_indices": 1, "num_pages": 1, "total_seq_len": 3, "num_seqs": 2}
OFFSETS = {"qo_indptr": [0, 3], "kv_indptr": [0, 1], "cu_seqlens": [0, 3, 3], "kv_indices": [0], "kv_last_page_len": [1]}


def called(name):
    """What a reference gives."""
    [path] = Path(sys.argv[1]).glob(f"definitions/*/{name}.json")
    definition = json.loads(path.read_text(encoding="utf-8"))
    sizes = SIZES | {axis: spec["value"] for axis, spec in definition["axes"].items() if "value" in spec}
    given = []
    for key, spec in definition["inputs"].items():
        dtype = getattr(torch, spec["dtype"])
        if key in OFFSETS:
            given.append(torch.tensor(OFFSETS[key], dtype=dtype))
        elif spec["shape"] is None:
            given.append(0.1)
        else:
            given.append(torch.ones([sizes[axis] for axis in spec["shape"]], dtype=dtype))
    module = {}
    exec(definition["reference"], module)
    return module["run"](*given)


def of(outputs, name, place):
    return outputs[name] if isinstance(outputs, dict) else outputs[place]


for one in MASKED:
    rows = of(called(one), "output", 0).float().isnan().flatten(1).any(1).tolist()
    print(f"F1: {one}: queries 0 and 1 of 3 see no key; rows that are NaN: {rows} (right: none)")
for one in STATES:
    state = of(called(one), "new_state", 1)[1].unique().tolist()
    print(f"F2: {one}: the state of a sequence without tokens becomes {state} (right: [1.0], as it was)")
