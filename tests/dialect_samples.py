"""Definitions as FlashInfer dumps them, written for tests."""

from __future__ import annotations

import copy
from typing import Any

Json = dict[str, Any]

GATED_INIT = """
import torch


def helper(shape, device):
    return torch.ones(shape, device=device)


def _init(*, num_tokens: int, hidden_size: int = 64, hidden_div_2: int = 0, device="cuda", seed: int = 0):
    torch.manual_seed(seed)
    return {"input": torch.randn(num_tokens, hidden_size, dtype=torch.bfloat16, device=device)}
"""
GATED_REFERENCE = """
import torch
import torch.nn.functional as F


@torch.no_grad()
def _gated_reference(input):
    half = input.shape[-1] // 2
    return F.silu(input[..., :half]) * input[..., half:]
"""
GATED: Json = {
    "name": "silu_and_mul_h64",
    "description": "Gated.",
    "op_type": "activation",
    "tags": ["fi_api:flashinfer.activation.silu_and_mul", "status:verified"],
    "axes": {
        "num_tokens": {"type": "var"},
        "hidden_size": {"type": "const", "value": 64},
        "hidden_div_2": {"type": "var"},
    },
    "constraints": ["hidden_size == 2 * hidden_div_2"],
    "inputs": {"input": {"shape": ["num_tokens", "hidden_size"], "dtype": "bfloat16"}},
    "outputs": {"output": {"shape": ["num_tokens", "hidden_div_2"], "dtype": "bfloat16"}},
    "reference": GATED_REFERENCE,
    "check": "def check(a, b):\n    return True\n",
    "init": GATED_INIT,
}
APPEND: Json = {
    "name": "append",
    "op_type": "page_append",
    "tags": ["fi_api:flashinfer.page.append"],
    "axes": {
        "nnz": {"type": "var"},
        "width": {"type": "const"},
        "top_k": {"type": "const", "value": 4},
        "window_left": {"type": "const", "value": -1},
    },
    "inputs": {
        "rows": {"shape": ["nnz", "width"], "dtype": "unknown"},
        "slot_ids": {"shape": ["nnz"], "dtype": "unknown"},
        "cache": {"shape": ["slots", "1", "width"], "dtype": "unknown"},
        "layout": {"shape": None, "dtype": "string", "optional": True},
    },
    "outputs": {"cache": {"shape": ["slots", "1", "width"], "dtype": "unknown", "param": "cache"}},
    "reference": (
        "def _append(rows, slot_ids, cache, top_k, workspace, layout='NHD', **_unused):\n"
        "    cache[slot_ids.long()] = rows[:, None]\n"
    ),
    "check": "",
}


def changed(sample: Json, **changes: Any) -> Json:  # noqa: ANN401 - JSON
    """A sample of its own with keys replaced; None takes a key out."""
    value = copy.deepcopy(sample) | changes
    return {key: given for key, given in value.items() if given is not None}
