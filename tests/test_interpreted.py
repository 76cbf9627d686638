"""Kernels in Triton on a CPU, by its interpreter: what replays of bugs catch with them there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

pytest.importorskip("triton")

ROOT = Path(__file__).resolve().parents[1]
# A rotation of our own under Liger-Kernel's name: FACTOR is what every second sequence is turned by.
KERNEL = """
import torch
import triton
import triton.language as tl
from triton.language.extra.libdevice import rsqrt


@triton.jit
def turn(rows, cos, sin, tokens, heads, width: tl.constexpr, half: tl.constexpr, scale):
    token = tl.program_id(0)
    sequence = token // tokens * FACTOR
    columns = tl.arange(0, half)
    angle = (sequence * tokens + token % tokens) * 2 * half + columns
    c, s = tl.load(cos + angle), tl.load(sin + angle)
    one = rsqrt(scale.to(tl.float32))
    for head in range(heads):
        at = rows + (token * heads + head) * width + columns
        low, high = tl.load(at).to(tl.float32), tl.load(at + half).to(tl.float32)
        tl.store(at, ((low * c - high * s) * one).to(rows.dtype.element_ty))
        tl.store(at + half, ((high * c + low * s) * one).to(rows.dtype.element_ty))


def rope_forward(q, k, cos, sin):
    cos, sin, turned = cos.contiguous(), sin.contiguous(), []
    for rows in (q, k):
        rows = rows.transpose(1, 2).contiguous()
        batch, tokens, heads, width = rows.shape
        turn[(batch * tokens,)](rows, cos, sin, tokens, heads, width, cos.shape[-1] // 2, 1.0)
        turned.append(rows.transpose(1, 2))
    return *turned, cos, sin
"""


def wheel(folder: Path, version: str, *, factor: str) -> None:
    files = {
        "liger_kernel/__init__.py": "",
        "liger_kernel/ops/__init__.py": "",
        "liger_kernel/ops/rope.py": KERNEL.replace("FACTOR", factor),
        f"liger_kernel-{version}.dist-info/METADATA": f"Name: liger-kernel\nVersion: {version}\n",
    }
    with zipfile.ZipFile(folder / f"liger_kernel-{version}-py3-none-any.whl", "w") as archive:
        for name, text in files.items():
            archive.writestr(name, text)


def test_a_sequence_that_is_turned_by_the_positions_of_another_is_caught_without_a_gpu(tmp_path: Path) -> None:
    for name in ("src", "scripts", "Snakefile", "envs"):
        (tmp_path / name).symlink_to(ROOT / name)
    config = {
        "dataset": {"path": str(ROOT / "tests" / "dataset")},
        "stacks": {name: {"python": sys.executable} for name in ("torch", "liger")},
        "test_sizes": ["small"],
    }
    (tmp_path / "config.yaml").write_text(json.dumps(config))
    (tmp_path / "wheels").mkdir()
    wheel(tmp_path / "wheels", "0.5.2", factor="0")
    wheel(tmp_path / "wheels", "0.5.3", factor="1")
    answer = tmp_path / "answer.json"
    words = ["--bug", "liger-rope-batch-cosines", "--packages", "wheels", "--json", str(answer)]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, str(ROOT / "lab" / "replay_history.py"), *words],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    (found,) = json.loads(answer.read_text())["outcomes"]
    assert (found["found"], found["bad"], found["good"], found["alarms"]) == ("caught", "0.5.2", "0.5.3", [])
    assert found["flips"]
