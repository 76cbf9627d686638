"""Definitions for tests: a small rmsnorm whose reference can be replaced by anything."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

HIDDEN = 32

PREAMBLE = "import torch\n\n\n"

GOOD = (
    PREAMBLE
    + """
def run(hidden_states, weight):
    EPS = 1e-6
    x = hidden_states.float()
    y = x * torch.rsqrt((x * x).mean(-1, keepdim=True) + EPS)
    return (y * weight.float()).to(torch.bfloat16)
"""
)


def rmsnorm(name: str, reference: str = GOOD, **changes: Any) -> dict[str, Any]:  # noqa: ANN401 - JSON
    """An rmsnorm definition over 32 columns."""
    definition: dict[str, Any] = {
        "name": name,
        "description": "Root mean square norm, epsilon 1e-6.",
        "op_type": "rmsnorm",
        "tags": ["status:unverified"],
        "axes": {"batch_size": {"type": "var"}, "hidden_size": {"type": "const", "value": HIDDEN}},
        "inputs": {
            "hidden_states": {"shape": ["batch_size", "hidden_size"], "dtype": "bfloat16"},
            "weight": {"shape": ["hidden_size"], "dtype": "bfloat16"},
        },
        "outputs": {"output": {"shape": ["batch_size", "hidden_size"], "dtype": "bfloat16"}},
        "reference": reference,
    }
    return definition | changes


def write(root: Path, definition: dict[str, Any]) -> Path:
    """Write a definition where the dataset's layout wants it."""
    path: Path = root / "definitions" / definition["op_type"] / f"{definition['name']}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(definition), encoding="utf-8")
    return path


def write_files(root: Path, files: Mapping[str, str]) -> Path:
    """Write texts below a folder, by path."""
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return root


def write_workloads(root: Path, name: str, lines: Iterable[dict[str, Any]]) -> Path:
    """Write the workload lines of an rmsnorm definition."""
    path = f"workloads/rmsnorm/{name}.jsonl"
    rest = {"definition": name, "solution": None, "evaluation": None}
    write_files(root, {path: "".join(json.dumps(rest | {"workload": line}) + "\n" for line in lines)})
    return root / path
