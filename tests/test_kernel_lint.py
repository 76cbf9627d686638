"""Every planted violation in a Triton source is found, and none in a kernel that is right."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from traceproof.errors import TraceproofError
from traceproof.kernel_lint import lint_kernels

HEAD = "import triton\nimport triton.language as tl\n\n\n"
SIGNATURE = "@triton.jit\ndef kernel(x, y, n, stride, H: tl.constexpr, BT: tl.constexpr):\n"
LAUNCH = "\n\ndef launch(x, y, n):\n    kernel[(triton.cdiv(n, BT),)](x, y, n, 1, 1, BT)\n"

RIGHT = {
    "cast at once": """
    i_t, i_b = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    o = i_t * BT + tl.arange(0, BT)
    v = tl.load(x + i_b * n * H + o, mask=o < n)
    tl.store(y + i_b * n * H + o, v, mask=o < n)
""",
    "cast by tl.cast, before a loop": """
    i_b = tl.cast(tl.program_id(0), tl.int64)
    p = x + i_b * n * stride
    for i_t in range(0, tl.cdiv(n, BT)):
        o = i_t * BT + tl.arange(0, BT)
        tl.store(p + o, 0.0, mask=o < n)
""",
    "an index within a tile": """
    o = tl.arange(0, BT)
    tl.store(y + o, tl.load(x + o))
""",
    "the mask in the branch where it is needed": """
    i = tl.program_id(0).to(tl.int64)
    if H > 1:
        p = x + i
    else:
        p = x + i * BT + tl.arange(0, BT)
    if H > 1:
        v = tl.load(p)
    else:
        v = tl.load(p, mask=i * BT + tl.arange(0, BT) < n)
    tl.store(y + i, v)
""",
    "the mask in the branch where it is needed, the pointer moved in a loop": """
    i = tl.program_id(0).to(tl.int64)
    o = i * BT + tl.arange(0, BT)
    if H > 1:
        p = x + o
    else:
        p = x + i
    for j in range(0, n):
        if stride > 1:
            tl.store(y + i, 0.0)
        if H > 1:
            v = tl.load(p, mask=o < n)
        else:
            v = tl.load(p)
        p += n * (BT if H > 1 else 1)
""",
    "columns of a block inside another": """
    i, j = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    o = tl.arange(0, BT)
    tl.store(y + (i * BT + o) * H, 0.0, mask=i * BT + o < n)
    for r in range(0, min(BT, n - i * BT)):
        v = tl.load(x + (i * BT + r) * BT + o)
""",
    "a remainder has its bound in it": """
    o = tl.program_id(0).to(tl.int64) * BT + tl.arange(0, BT)
    v = tl.load(x + o % H)
    tl.store(y + o, v, mask=o < n)
""",
    "a loop index that is widened before it is multiplied": """
    for i in range(0, tl.cdiv(n, BT)):
        tl.store(y + i.to(tl.int64) * stride, 0.0)
""",
    "a loop that is unrolled": """
    for i in range(0, H):
        tl.store(y + i * stride, 0.0)
""",
    "a loop whose bound is wide": """
    start = tl.program_id(0)
    end = tl.cast(n, tl.int64) * H
    for i in range(start, end, tl.num_programs(0)):
        tl.store(y + i * stride * H, 0.0)
""",
}
PLANTED = {
    "KL101": {
        "in the address": "    tl.store(y + tl.program_id(0) * stride, 0.0)\n",
        "through an assignment": ("    i = tl.program_id(0)\n    o = i * stride\n    tl.store(y + o, 0.0)\n"),
        "a tuple": ("    a, b = tl.program_id(0), tl.program_id(1)\n    tl.store(y + a * n * H + b, 0.0)\n"),
        "followed through three": (
            "    i = tl.program_id(0)\n    j = i // H\n    k = j * n\n    m = k + 1\n"
            "    tl.store(y + m * H, 0.0)\n"
        ),
        "a pointer that is moved": "    i = tl.program_id(0)\n    y += i * n\n    tl.store(y, 0.0)\n",
        "a pointer assigned before": "    p = y + tl.program_id(0) * stride * H\n    tl.store(p, 0.0)\n",
        "a flat block": (
            "    o = tl.program_id(0) * BT + tl.arange(0, BT)\n    tl.store(y + o, 0.0, mask=o < n)\n"
        ),
        "in one branch": (
            "    i = tl.program_id(0)\n    if H > 1:\n        o = i.to(tl.int64) * n\n"
            "    else:\n        o = i * n\n"
            "    tl.store(y + o, 0.0)\n"
        ),
        "cast too late": "    o = (tl.program_id(0) * n * stride).to(tl.int64)\n    tl.store(y + o, 0.0)\n",
        "cut to 32 bits after loading": (
            "    i = tl.program_id(0).to(tl.int64)\n    j = tl.load(x + i).to(tl.int32)\n"
            "    tl.store(y + j * stride, 0.0)\n"
        ),
        "a loop from the grid": (
            "    for i in range(tl.program_id(0), n, tl.num_programs(0)):\n        tl.store(y + i * stride, 0.0)\n"
        ),
        "an index, strided": ("    for i in range(0, tl.cdiv(n, BT)):\n        tl.store(y + i * stride, 0.0)\n"),
        "a block of a loop times a stride": (
            "    for i in range(0, tl.cdiv(n, BT)):\n        tl.store(y + (i * BT + 1) * stride, 0.0)\n"
        ),
        "a loop index times sizes known at compile time": (
            "    for i in range(0, tl.cdiv(n, BT)):\n        tl.store(y + i * BT * H, 0.0)\n"
        ),
        "the base of a block pointer": (
            "    p = tl.make_block_ptr(y + tl.program_id(0) * n * H, (n,), (1,), (0,), (BT,), (0,))\n"
            "    tl.store(p, 0.0, boundary_check=(0,))\n"
        ),
    },
    "KL102": {"a pointer": "    p = tl.make_block_ptr(x, (n,), (1,), (0,), (BT,), (0,))\n    tl.store(p, 0.0)\n"},
    "KL103": {
        "a load": (
            "    i = tl.program_id(0).to(tl.int64)\n    o = i * BT + tl.arange(0, BT)\n    v = tl.load(x + o)\n"
            "    tl.store(y + o, v, mask=o < n)\n"
        ),
        "a store": "    i = tl.program_id(0).to(tl.int64)\n    tl.store(y + i * BT + tl.arange(0, BT), 0.0)\n",
        "where another access has a mask": (
            "    o = tl.arange(0, 64)\n    v = tl.load(x + o * stride, mask=o < n)\n"
            "    tl.store(y + o * stride, v)\n"
        ),
        "where the sum is masked elsewhere": (
            "    i = tl.program_id(0).to(tl.int64)\n    o = (i * BT + tl.arange(0, BT))[:, None]\n"
            "    p = y + (o + 16) * H + stride\n    v = tl.load(p, mask=o + 16 < n)\n    tl.store(p, v)\n"
        ),
        "in a loop": (
            "    for i in range(0, tl.cdiv(n, BT)):\n        p = x + i * BT + tl.arange(0, BT)\n"
            "        v = tl.load(p)\n"
        ),
    },
    "KL104": {
        "through a helper's argument": (
            "    helper(y, tl.program_id(0))\n\n\n@triton.jit\ndef helper(y, i):\n    tl.store(y + i, 0.0)\n"
        ),
        "a bare program id": "    tl.store(y + tl.program_id(0), 0.0)\n",
    },
}
ALL = [(code, name) for code, cases in PLANTED.items() for name in cases]


def codes(tmp_path: Path, text: str, name: str = "kernels.py") -> list[str]:
    path = tmp_path / name
    path.write_text(text)
    return [finding.code for finding in lint_kernels(path).findings]


@pytest.mark.parametrize("name", sorted(RIGHT))
def test_a_right_kernel_has_no_findings(tmp_path: Path, name: str) -> None:
    assert codes(tmp_path, HEAD + SIGNATURE + RIGHT[name].strip("\n") + LAUNCH) == []


@pytest.mark.parametrize(("code", "name"), ALL, ids=[f"{code} {name}" for code, name in ALL])
def test_a_planted_violation_is_found(tmp_path: Path, code: str, name: str) -> None:
    assert code in codes(tmp_path, HEAD + SIGNATURE + PLANTED[code][name] + LAUNCH)


@pytest.mark.parametrize(
    "line",
    [
        "x = torch.zeros(3, device='cuda')",
        "x = y.cuda()",
        "x = y.to('cuda:1')",
        "device = 'cuda'",
        "d = torch.device('cuda')",
        "def make(device='cuda'): ...",
        "def make(*, device='cuda'): ...",
        "with torch.autocast('cuda'): ...",
        "x = y.to(f'cuda:{i}')",
    ],
)
def test_a_hard_coded_device_is_found_in_a_test_and_not_elsewhere(tmp_path: Path, line: str) -> None:
    assert codes(tmp_path, line + "\n", "test_x.py") == ["KL201"]
    assert codes(tmp_path, line + "\n", "x.py") == []


def test_a_platform_check_is_found_in_a_test(tmp_path: Path) -> None:
    assert codes(tmp_path, "skip = not torch.cuda.is_available()\n", "test_x.py") == ["KL202"]
    assert codes(tmp_path, "x = torch.zeros(3, device=device)\ny = 'cuda is fine in prose'\n", "test_x.py") == []


def test_the_command_gives_exit_codes_and_json(tmp_path: Path) -> None:
    path, told = tmp_path / "kernels.py", tmp_path / "out.json"
    path.write_text(HEAD + SIGNATURE + PLANTED["KL104"]["a bare program id"])
    command = [sys.executable, "-m", "traceproof", "lint-kernels", str(path), "--json", str(told)]
    assert subprocess.run(command, check=False, capture_output=True).returncode == 1
    (finding,) = json.loads(told.read_text())["findings"]
    line = path.read_text().splitlines()[finding["line"] - 1]
    assert line[finding["column"] - 1 :].startswith("tl.program_id(0)")
    assert subprocess.run([*command, "--select", "KL101"], check=False, capture_output=True).returncode == 0
    absent = [*command[:4], str(tmp_path / "no")]
    assert subprocess.run(absent, check=False, capture_output=True).returncode == 2


def test_a_folder_without_python_is_refused_and_a_file_that_is_none_is_a_finding(tmp_path: Path) -> None:
    with pytest.raises(TraceproofError, match="holds no Python files"):
        lint_kernels(tmp_path)
    assert codes(tmp_path, "def f(:") == ["KL000"]
