"""What judges tests and kernels of others: audit, lint of kernels, what a change reaches, coverage."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from itertools import combinations, product
from pathlib import Path

import forked
import pytest
from definitions import GOOD, rmsnorm, write, write_files
from repository import PROGRAMS
from source_remotes import Upstream

from traceproof.audit import audit
from traceproof.checkouts.sources import CommitTree, FolderTree, changed_between
from traceproof.cli.sources import dependents
from traceproof.coverage import SPACE, Space, as_text, cover, of_suite, read, smallest
from traceproof.dependents import Graph, Reached
from traceproof.errors import TraceproofError
from traceproof.kernel_lint import lint_kernels

RIGHT = """
import json
import torch

def load_definition(name):
    raise LookupError(name)

def make_inputs(batch_size, device="cpu"):
    return {"hidden_states": torch.randn(batch_size, 32), "weight": torch.randn(32)}

def test_right():
    torch.manual_seed(0)
    reference = load_definition("rmsnorm_a")
    inputs = make_inputs(4)
    torch.testing.assert_close(reference(**inputs), inputs["hidden_states"], atol=1e-3, rtol=1e-3)
"""
SCRIPT = 'def test_a():\n    assert f() == 1\n\nif __name__ == "__main__":\n    '
PLANTED = [
    ("TA000", "def test(:"),
    ("TA101", "def test_a():\n    print(1)\n"),
    ("TA102", "def test_a():\n    return 1 == 2\n"),
    ("TA103", "def test_a():\n    try:\n        assert f() == 1\n    except Exception as e:\n        print(e)\n"),
    ("TA104", "def main():\n    try:\n        f()\n    except Exception:\n        print(1)\n"),
    ("TA105", "def test_a():\n    if not torch.cuda.is_available():\n        return\n    assert f() == 1\n"),
    ("TA106", "def test_a():\n    out = f()\n    assert out.shape == (2, 3)\n    assert not out.isnan().any()\n"),
    ("TA203", 'def test_a():\n    assert load_definition("rmsnorm_z").x == 1\n'),
    ("TA302", "def inputs():\n    return torch.randn(3)\n\ndef test_a():\n    assert close(f(inputs()))\n"),
    ("TA303", "def test_a():\n    kv_indices = torch.arange(7)\n    assert close(f(kv_indices))\n"),
    # An assertion of a helper about its arguments is none about an output.
    ("TA101", "def half(x):\n    assert x.dim() == 2\n    return x\n\ndef test_a():\n    print(half(1))\n"),
    ("TA102", "def test_a():\n    print(f())\n    return True\n"),
    ("TA104", f"{SCRIPT}pytest.main(sys.argv)\n"),  # drops the exit status
]
PERMUTED = "pages = torch.randperm(7)\n    kv_indices = pages[:3]\n    page_ids = torch.arange(3)"
INNOCENT = [
    ("TA101", "def check(x):\n    assert x == 1\n\ndef test_a():\n    check(f())\n"),
    ("TA102", "def test_a():\n    assert f() == 1\n    return True\n"),
    ("TA104", f"{SCRIPT}sys.exit(pytest.main(sys.argv))\n"),
    ("TA303", f"def test_a():\n    {PERMUTED}"),
    ("TA103", "def test_a():\n    try:\n        assert f() == 1\n    except KeyError:\n        print(1)\n"),
    ("TA103", "def test_a():\n    try:\n        assert f() == 1\n    except Exception:\n        pytest.fail()\n"),
]


@pytest.fixture
def dataset(tmp_path: Path) -> Path:
    write(tmp_path, rmsnorm("rmsnorm_a"))
    return tmp_path


def codes(dataset: Path, text: str, name: str = "test_x.py") -> list[str]:
    folder = dataset / "tests"
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(text)
    return [finding.code for finding in audit(folder, dataset).findings]


def test_a_right_file_has_no_findings(dataset: Path) -> None:
    assert codes(dataset, RIGHT) == []


@pytest.mark.parametrize(("code", "text"), PLANTED)
def test_a_planted_fault_is_found(dataset: Path, code: str, text: str) -> None:
    assert code in codes(dataset, text)


@pytest.mark.parametrize(("code", "text"), INNOCENT)
def test_what_looks_like_a_fault_is_none(dataset: Path, code: str, text: str) -> None:
    assert code not in codes(dataset, text)


def test_a_copy_of_the_reference_is_told_from_one_that_differs(dataset: Path) -> None:
    test = "\ndef test_a():\n    torch.manual_seed(0)\n    assert close(run(1, 2))\n"
    assert codes(dataset, GOOD + test, "test_rmsnorm_a.py") == ["TA201"]
    assert codes(dataset, GOOD.replace("1e-6", "1e-5") + test, "test_rmsnorm_a.py") == ["TA202"]
    (dataset / "tests" / "test_rmsnorm_a.py").unlink()
    assert codes(dataset, GOOD + test, "test_layernorm.py") == ["TA204"]


def test_a_folder_without_tests_and_a_folder_that_is_no_dataset_are_refused(tmp_path: Path) -> None:
    with pytest.raises(TraceproofError, match=r"holds no test_\*.py"):
        audit(tmp_path, tmp_path)
    (tmp_path / "test_x.py").write_text("")
    with pytest.raises(TraceproofError, match="is not a dataset"):
        audit(tmp_path, tmp_path)


def test_the_command_gives_exit_codes(dataset: Path) -> None:
    folder = dataset / "tests"
    folder.mkdir()
    (folder / "test_x.py").write_text(RIGHT)
    command = [forked.interpreter(PROGRAMS), "-m", "traceproof", "audit-tests", str(folder)]
    assert subprocess.run(command, check=False, capture_output=True).returncode == 0
    (folder / "test_x.py").write_text("def test_a():\n    print(1)\n")
    assert subprocess.run(command, check=False, capture_output=True).returncode == 1
    absent = subprocess.run([*command[:-1], str(folder / "no")], check=False, capture_output=True, text=True)
    assert absent.returncode == 2
    assert "is no folder" in absent.stderr


HEAD = "import triton\nimport triton.language as tl\n\n\n"
SIGNATURE = "@triton.jit\ndef kernel(x, y, n, stride, H: tl.constexpr, BT: tl.constexpr):\n"
LAUNCH = "\n\ndef launch(x, y, n):\n    kernel[(triton.cdiv(n, BT),)](x, y, n, 1, 1, BT)\n"

RIGHT_KERNELS = {
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
PLANTED_KERNELS = {
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
        "flat block": ("    o = tl.program_id(0) * BT + tl.arange(0, BT)\n    tl.store(y + o, 0.0, mask=o < n)\n"),
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
ALL = [(code, name) for code, cases in PLANTED_KERNELS.items() for name in cases]


def linted(tmp_path: Path, text: str, name: str = "kernels.py") -> list[str]:
    path = tmp_path / name
    path.write_text(text)
    return [finding.code for finding in lint_kernels(path).findings]


@pytest.mark.parametrize("name", sorted(RIGHT_KERNELS))
def test_a_right_kernel_has_no_findings(tmp_path: Path, name: str) -> None:
    assert linted(tmp_path, HEAD + SIGNATURE + RIGHT_KERNELS[name].strip("\n") + LAUNCH) == []


@pytest.mark.parametrize(("code", "name"), ALL, ids=[f"{code} {name}" for code, name in ALL])
def test_a_planted_violation_is_found(tmp_path: Path, code: str, name: str) -> None:
    assert code in linted(tmp_path, HEAD + SIGNATURE + PLANTED_KERNELS[code][name] + LAUNCH)


@pytest.mark.parametrize(
    ("line", "codes"),
    [
        ("x = torch.zeros(3, device='cuda')", ["KL201"]),
        ("x = y.cuda()", ["KL201"]),
        ("x = y.to('cuda:1')", ["KL201"]),
        ("device = 'cuda'", ["KL201"]),
        ("d = torch.device('cuda')", ["KL201"]),
        ("def make(device='cuda'): ...", ["KL201"]),
        ("def make(*, device='cuda'): ...", ["KL201"]),
        ("with torch.autocast('cuda'): ...", ["KL201"]),
        ("x = y.to(f'cuda:{i}')", ["KL201"]),
        ("device = f'cuda_of_{host}'", []),
        ("skip = not torch.cuda.is_available()", ["KL202"]),
        ("x = torch.zeros(3, device=device)\ny = 'cuda is fine in prose'", []),
    ],
)
def test_a_hard_coded_device_or_platform_is_found_in_tests(tmp_path: Path, line: str, codes: list[str]) -> None:
    assert linted(tmp_path, line + "\n", "test_x.py") == codes
    (tmp_path / "tests" / "mine").mkdir(parents=True)
    assert linted(tmp_path, line + "\n", "tests/x.py") == codes
    assert (
        linted(tmp_path, line + "\n", "tests/mine/x.py") == []
    )  # of a folder, what lies above counts for nothing


def test_the_command_gives_exit_codes_and_json(tmp_path: Path) -> None:
    path, told = tmp_path / "kernels.py", tmp_path / "out.json"
    path.write_text(HEAD + SIGNATURE + PLANTED_KERNELS["KL104"]["a bare program id"])
    command = [forked.interpreter(PROGRAMS), "-m", "traceproof", "lint-kernels", str(path), "--json", str(told)]
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
    assert linted(tmp_path, "def f(:") == ["KL000"]
    assert linted(tmp_path, f"x = {'-' * 50_000}1") == ["KL000"]
    assert [finding.code for finding in lint_kernels(tmp_path, select=["KL1"]).findings] == ["KL000"]


def test_only_line_breaks_of_python_end_a_line(tmp_path: Path) -> None:
    (tmp_path / "test_x.py").write_text("ENDS = '\u2028\x85'\n\x0c\nx = y.cuda()\n")
    (finding,) = lint_kernels(tmp_path).findings
    assert finding.text == "x = y.cuda()"


def test_a_helper_that_is_called_like_a_cast_is_none(tmp_path: Path) -> None:
    assert linted(tmp_path, HEAD + SIGNATURE + "    z = to()\n" + LAUNCH) == []


FILES = {
    "pkg/__init__.py": "from pkg.core import run\n",
    "pkg/core.py": "def run():\n    from .deep import nested\n    return nested\n",
    "pkg/deep/__init__.py": "from .inner import nested as nested\n",
    "pkg/deep/inner.py": "from ...other import leaf\nnested = leaf\n",
    "pkg/alone.py": "VALUE = 1\n",
    "pkg/table.json": "{}",
    "pkg/reader.py": "import pathlib\nTABLE = pathlib.Path(__file__).with_name('table.json')\n",
    "other/__init__.py": "",
    "other/leaf.py": "x = 1\n",
    "tests/conftest.py": "import helpers\n",
    "tests/helpers.py": "y = 1\n",
    "tests/test_core.py": "import pkg.core\n",
    "tests/test_alone.py": "from pkg import alone\n",
    "tests/test_named.py": "import pytest\nalone = pytest.importorskip('pkg.alone')\n",
    "tests/test_table.py": "import pkg.reader\n",
    "free/test_nothing.py": "import os\n",
    "pyproject.toml": "[tool.pytest]\n",
    "README.md": "words\n",
}


def reached(root: Path, *changed: str) -> tuple[set[str], Reached]:
    """The tests that a change reaches."""
    graph = Graph(FolderTree(root))
    found = graph.reach(changed)
    return {path for path in graph.tests if found.everything or path in found.chains}, found


ALL_DEPENDENTS = {"free/test_nothing.py", *(name for name in FILES if name.startswith("tests/test_"))}
UNDER_PKG = ALL_DEPENDENTS - {"free/test_nothing.py"}


@pytest.mark.parametrize(
    ("changed", "tests"),
    [
        pytest.param("other/leaf.py", UNDER_PKG, id="nested and relative imports, and a re-export"),
        pytest.param("pkg/__init__.py", UNDER_PKG, id="an __init__ on the way"),
        pytest.param("pkg/alone.py", {"tests/test_alone.py", "tests/test_named.py"}, id="a module, also by name"),
        pytest.param("tests/conftest.py", UNDER_PKG, id="a conftest, for the tests below it"),
        pytest.param("tests/helpers.py", UNDER_PKG, id="what a conftest imports"),
        pytest.param("pkg/table.json", {"tests/test_table.py"}, id="a file that a module names"),
        pytest.param("free/test_nothing.py", {"free/test_nothing.py"}, id="a test itself"),
        pytest.param("pyproject.toml", ALL_DEPENDENTS, id="settings"),
        pytest.param("README.md", set(), id="prose"),
    ],
)
def test_a_change_reaches_what_needs_it(tmp_path: Path, changed: str, tests: set[str]) -> None:
    assert reached(write_files(tmp_path, FILES), changed)[0] == tests


def test_a_chain_says_why(tmp_path: Path) -> None:
    _, found = reached(write_files(tmp_path, FILES), "other/leaf.py")
    chain = [str(step) for step in found.chains["tests/test_core.py"]]
    assert chain[0].startswith("tests/test_core.py:1 imports pkg/")
    assert chain[-1] == "pkg/deep/inner.py:1 imports other/leaf.py"


def test_a_file_that_can_not_be_parsed_reaches_everything_and_is_reached_by_all(tmp_path: Path) -> None:
    root = write_files(tmp_path, {**FILES, "tests/test_broken.py": "def (:\n"})
    tests, found = reached(root, "tests/test_broken.py")
    assert tests == {*ALL_DEPENDENTS, "tests/test_broken.py"}
    assert found.everything is not None
    assert "can not be parsed" in found.everything
    assert "tests/test_broken.py" in reached(root, "pkg/alone.py")[0]


def test_an_unknown_name_may_mean_any_module_and_an_unread_file_reaches_everything(tmp_path: Path) -> None:
    text = "import importlib, sys\nimportlib.import_module(sys.argv[1])\n"
    root = write_files(tmp_path, {**FILES, "free/test_nothing.py": text, "data/x.bin": "0"})
    assert "free/test_nothing.py" in reached(root, "pkg/alone.py")[0]
    assert reached(root, "data/x.bin")[0] == ALL_DEPENDENTS


def test_two_commits_are_compared_without_a_checkout(tmp_path: Path) -> None:
    upstream = Upstream(tmp_path / "repository")
    before = upstream.commit(dict(FILES))
    after = upstream.commit({"pkg/alone.py": "VALUE = 2\n", "other/leaf.py": None, "other/leaves.py": "x = 1\n"})
    assert changed_between(upstream.folder, before, after) == ["other/leaf.py", "other/leaves.py", "pkg/alone.py"]
    tree = CommitTree(upstream.folder, before)
    assert tree.read(["pkg/alone.py"]) == {"pkg/alone.py": b"VALUE = 1\n"}


def test_names_of_any_bytes_are_told_escaped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    upstream = Upstream(tmp_path / "repository")
    before = upstream.commit(dict(FILES))
    (upstream.folder / os.fsdecode(b"test_\xe9\x1b.py")).write_text("import pkg.alone\n")
    after = upstream.commit({"pkg/alone.py": "VALUE = 2\n"})
    dependents(root=upstream.folder, between=(before, after), json_file=tmp_path / "told.json")
    assert "test_\\udce9\\x1b.py" in capsys.readouterr().out
    assert any("\udce9" in name for name in json.loads((tmp_path / "told.json").read_text())["tests"])


def test_bad_use_is_said(tmp_path: Path) -> None:
    write_files(tmp_path, FILES)
    with pytest.raises(TraceproofError, match="--changed FILE"):
        dependents(root=tmp_path)
    with pytest.raises(TraceproofError, match=r"not in .*: pkg/gone\.py"):
        dependents(root=tmp_path, changed=["pkg/gone.py"])


LETTERS = {"a": ("1", "2"), "b": ("x", "y"), "c": ("p", "q", "r")}
TOY = Space(op_type="toy", axes=LETTERS, reachable=lambda given: (given.get("a"), given.get("b")) != ("2", "y"))
FLA_SUITE = """
import os
import pytest

os.write(1, b"a library's banner, below Python's stdout\\n")

@pytest.mark.parametrize("varlen", [False, True])
@pytest.mark.parametrize(("T", "H", "HV", "D", "expand_v"), [(64, 2, 2, 64, 1), (100, 2, 4, 64, 2)])
@pytest.mark.parametrize("dtype", ["torch.float16", "torch.bfloat16"])
def test_chunk(varlen, T, H, HV, D, expand_v, dtype):
    if varlen:
        pytest.skip("no device")

@pytest.mark.parametrize("initial_state", [False, True])
@pytest.mark.parametrize("T", [63])
def test_chunk_bwd(T, initial_state):
    assert T == 63

@pytest.mark.parametrize("norm", [True])
def test_states_in_the_code(norm):
    out, state = chunk(1, initial_state=zeros(1), output_final_state=True, safe_gate=False, qk_norm=norm)
    out.backward()
"""


def test_pairs_that_can_not_go_together_are_not_counted() -> None:
    records = [dict(zip("abc", letters, strict=True)) for letters in ("1xp", "1yq")]
    found = cover(TOY, records)
    assert found.one_way == (5, 7)
    assert found.pairs == (6, 4 + 6 + 6 - 1)
    assert {"a": "2"} in [gap.missing for gap in found.gaps]
    assert not any(gap.missing == {"a": "2", "b": "y"} for gap in found.pair_gaps)


def test_adding_the_smallest_cases_closes_every_gap() -> None:
    found = cover(TOY, [])
    closed = cover(TOY, [gap.smallest for gap in found.pair_gaps])
    assert closed.gaps == closed.pair_gaps == ()
    reachable = sum(
        smallest(TOY, {one: x, other: y}) is not None
        for one, other in combinations(LETTERS, 2)
        for x, y in product(LETTERS[one], LETTERS[other])
    )
    assert closed.pairs == (reachable, reachable)


@pytest.mark.slow
def test_a_library_suite_is_collected(tmp_path: Path) -> None:
    path = tmp_path / "test_delta.py"
    path.write_text(FLA_SUITE)
    found = of_suite(path, python=sys.executable)
    missing = [gap.missing for gap in found.gaps]
    assert found.cases == 11
    said = ({"layout": "variable"}, {"initial_state": "yes"}, {"final_state": "yes"}, {"qk_norm": "yes"})
    assert not any(gap in missing for gap in said)
    pairs = [gap.missing for gap in found.pair_gaps]
    for direction in ("forward", "backward"):  # a test that runs backward has compared the forward, too
        assert {"direction": direction, "final_state": "yes"} not in pairs
    assert {"safe_gate": "yes"} in missing
    path.write_text("")
    with pytest.raises(TraceproofError, match="no test was collected"):
        of_suite(path, python=sys.executable)


def test_parameters_of_a_linear_attention_test_say_its_axes() -> None:
    varlen = read("test_varlen_bwd", {"cu_seqlens": [0, 15, 100], "H": 2, "HV": 4, "D": 64, "use_qk_norm": 1})
    said = {"layout": "variable", "direction": "backward", "length": "part of a chunk", "value_heads": "grouped"}
    assert {name: varlen[name] for name in said} == said
    assert set(SPACE.axes) == set(varlen)
    for expand, dims in ((1, "equal"), (2, "different")):
        whole = read("test_kda", {"T": 128, "D": 64, "expand_v": expand})
        assert [whole["length"], whole["head_dims"]] == ["whole chunks", dims]
    gated = read("test_kda", {"safe_gate": True, "use_beta_sigmoid": True}, ("torch", "gradcheck"))
    assert [gated["safe_gate"], gated["beta_sigmoid"], gated["verifier"]] == ["yes", "in kernel", "gradcheck"]
    assert read("test_kda", {"cu_seqlens": "tensor([0, 15])", "T": "x"})["length"] == "whole chunks"
    assert read("test_kda", {}, ("naive_kda", "backward"))["direction"] == "backward"
    assert read("test_kda", {}, ("naive_kda", "assert_close"))["verifier"] == "reference"
    assert read("test_kda", {}, ("isfinite", "chunk_kda"))["verifier"] == "sanity"
    assert read("test_kda", {"verifier": "sanity"}, ("naive_kda",))["verifier"] == "sanity"


def test_an_op_type_without_cases_and_a_value_that_is_not_declared_are_said() -> None:
    text = as_text(cover(TOY, []), gaps=10)
    assert "toy: no case was run" in text
    assert "not exercised" not in text
    assert "toy: a=3 is not declared" in as_text(cover(TOY, [{"a": "3"}]), gaps=0)
