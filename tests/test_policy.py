"""What a reference may not say by the policy, and what it does not see of this project where it runs."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import forked
import pytest
from definitions import rmsnorm, write, write_files
from pipeline import Rows, Run, verdicts
from test_hostile import RIGHT, reference
from worker_pools import NOTHING

import traceproof
from traceproof.run.plan import PlanSelection
from traceproof.run.workers import untrusted_pool
from traceproof.sandbox import Limits, Pool, Status, policy
from traceproof.sandbox.isolation import lacking
from traceproof.sandbox.policy import Refusal, check

OWN = sorted((Path(__file__).parent / "dataset" / "definitions").glob("*/*.json"))

REFUSED = [
    ("import os", "import"),
    ("import os.path as p", "import"),
    ("from subprocess import run", "import"),
    ("from . import neighbour", "import"),
    ("from math import *", "import"),
    ("import operator", "import"),
    ("import torch.multiprocessing", "call"),
    ("import torch.utils.cpp_extension", "call"),
    ("from torch import hub", "call"),
    ("from torch.hub import load", "call"),
    ("import torch\ntorch.load('x')", "call"),
    ("import torch as t\nt.save(1, 'x')", "call"),
    ("import torch\ntorch.ops.load_library('x')", "call"),
    ("import torch\ntorch.compile(run)", "call"),
    ("import torch\ntorch.backends.cuda.matmul.allow_tf32", "call"),
    ("import torch\ntorch.set_default_dtype(torch.float64)", "call"),
    ("import torch\nkeep = torch\nkeep.load('x')", "call"),
    ("import torch\nserial = torch.serialization\nserial.load('x')", "call"),
    ("import torch\ngetattr(torch, 'load')('x')", "call"),
    ("import numpy as np\nnp.fromfile('x')", "call"),
    ("import typing\ntyping.get_type_hints(f)", "call"),
    ("import torch\ntorch.os.system('true')", "attribute"),
    ("import dataclasses\ndataclasses.sys.exit()", "attribute"),
    ("import torch\ntorch._C", "attribute"),
    ("from torch import _C", "attribute"),
    ("x.tofile('y')", "attribute"),
    ("g.gi_frame.f_back", "attribute"),
    ("getattr(x, name)", "attribute"),
    ("getattr(x, '__cl' + 'ass__')", "attribute"),
    ("getattr(*x)", "attribute"),
    ("().__class__", "dunder"),
    ("getattr(x, '__subclasses__')", "dunder"),
    ("match x:\n    case object(__class__=c):\n        pass", "dunder"),
    ("f.__globals__['x']", "dunder"),
    ("__builtins__['open']", "name"),
    ("class A:\n    __annotations__ = {'x: int = f()#': int}", "name"),
    ("license._Printer__filenames", "name"),
    ("reach = getattr", "name"),
    ("map(getattr, x, y)", "name"),
    ("import functools\n@functools.singledispatch\ndef f(x: 'evaluated'): ...", "call"),
    ("import numpy as np\nnp.rec.fromfile('x')", "call"),
    ("import numpy as np\nnp.ma.core.np.fromfile", "attribute"),
    ("import torch.nn.functional as F\nF.torch.load", "attribute"),
    ("open('x')", "name"),
    ("read = open", "name"),
    ("eval('1')", "name"),
    ("exec('1')", "name"),
    ("compile('1', '', 'eval')", "name"),
    ("__import__('os')", "name"),
    ("globals()", "name"),
    ("vars(x)", "name"),
    ("breakpoint()", "name"),
    ("input()", "name"),
    ("setattr(x, 'y', 1)", "name"),
    ("delattr(x, 'y')", "name"),
    ("import torch\n[torch][0].load", "module"),
    ("import torch\nf(torch)", "module"),
    ("import torch\ntorch.rsqrt = torch.sqrt", "patch"),
    ("import torch\ntorch.Tensor.add += 1", "patch"),
    ("import torch\ndel torch.nn.functional.softmax", "patch"),
    ("import torch\nfor torch.pi in (1, 2):\n    pass", "patch"),
    ("import torch\nwith f() as torch.pi:\n    pass", "patch"),
    ("import torch.nn.functional as F\nF.softmax = None", "patch"),
    ("from torch import nn\nnn.Linear = None", "patch"),
    ("type(x).add = None", "patch"),
    ("def run(:", "syntax"),
    ("x = '\0'", "syntax"),
    ("(" * 500 + ")" * 500, "syntax"),
    ("# " + "x" * (1 << 20), "syntax"),
]
# Code whose reading would take time or memory by the square of its length.
LONG = {
    "attributes of a module": "import torch\nx = torch" + ".a" * 20_000,
    "attributes of anything": "x = y" + ".a" * 20_000,
    "calls": "x = f" + "()" * 20_000,
    "a sum": "x = " + "1+" * 20_000 + "1",
    "branches": "if x:\n pass\n" + "elif y:\n pass\n" * 2_000,
    "a path that grows": "import torch\na = torch\n" + "a = a.a\n" * 2_000,
}

ALLOWED = [
    "import torch\nimport math\n\n@torch.no_grad()\ndef run(x, eps=1e-6):\n    return torch.rsqrt(x + eps)",
    "import torch\nimport torch.nn.functional as F\n\ndef run(x):\n    return F.softmax(x, dim=-1)",
    "import torch\n\ndef run(x):\n    F = torch.nn.functional\n    return F.silu(x) * getattr(x, 'shape')[0]",
    "from __future__ import annotations\nfrom dataclasses import dataclass\n\n@dataclass\nclass A:\n    x: int",
    "class A:\n    def __init__(self, x):\n        self.x = x\n\n    def __len__(self):\n        return 2",
    "table = [0.0, 0.5]\nbest = max(range(2), key=table.__getitem__)",
    "import numpy as np\nx = np.arange(3).tolist()",
    "x = {}\nx['os'] = 'open'\ny = type(x).__name__",
    "def run(input, weight):\n    return input.float() * weight",
    "def run(x, *, vars=None, help=1):\n    exit = x + help\n    return exit if vars is None else vars",
    "def run(input):\n    def inner(y):\n        return input * y\n    return [input[i] for i in y] + [inner(1)]",
    "def run(x):\n    return [input for input in x] + [(lambda help: help + 1)(2)]",
    "def run(x):\n    for input in x:\n        exec = input\n    if (open := 3):\n        return open + exec",
    "def run(input):\n    class A:\n        def f(self):\n            return input\n    return A().f()",
    "from einops.layers.torch import Rearrange",  # not torch itself
]
# Names that look like locals and are builtins all the same.
BUILTINS = [
    "def run(x):\n    return input(x)",
    "def run(input=input):\n    return input",
    "def run(x: open('y')):\n    return x",
    "def run(open):\n    return 1\n\nopen('x')",
    "if 0:\n    open = 1\nopen('x')",
    "if 0:\n    open = 1\n\ndef run(x):\n    return open('x')",
    "def run(x):\n    global open\n    if 0:\n        open = 1\n    return open('x')",
    "class A:\n    if 0:\n        open = 1\n    y = open('x')",
    "def run(open):\n    class A:\n        if 0:\n            open = 1\n        y = open('x')\n    return A",
    "class A:\n    open = 1\n\n    def f(self):\n        return open('x')",
    "def run(x):\n    return [open for open in open('x')]",
    "def run(x):\n    [open for open in x]\n    return open('y')",
    "def run(x):\n    def inner(open):\n        return open\n    return open('x')",
    "def run(x):\n    y = lambda open: 1\n    return open('x')",
    "@open('x')\ndef run(open):\n    return open",
    "def run(__builtins__):\n    return __builtins__",
    "def run(x):\n    def f():\n        global open\n        return open('x')\n    open = 1\n    return f()",
]


@pytest.mark.parametrize(("source", "rule"), REFUSED)
def test_the_policy_refuses(source: str, rule: str) -> None:
    assert rule in {refusal.rule for refusal in check(source)}


@pytest.mark.parametrize(
    "source", [*ALLOWED, *(json.loads(path.read_text(encoding="utf-8"))["reference"] for path in OWN)]
)
def test_the_policy_lets_through(source: str) -> None:
    assert check(source) == []


@pytest.mark.parametrize("source", BUILTINS)
def test_a_builtin_is_told_from_a_local_of_its_name(source: str) -> None:
    assert {refusal.rule for refusal in check(source)} == {"name"}


def test_a_refusal_names_its_place() -> None:
    (refusal,) = check("import math\n\nx = open('y')\n")
    assert refusal == Refusal(3, 5, "name", "open reads or writes files")
    assert str(refusal) == "line 3, column 5: name: open reads or writes files"
    assert len(check("import torch\ntorch.os.path.join.a.b('x')")) == 1  # a path is refused once


@pytest.mark.parametrize("limit", [1_000, 50_000])
@pytest.mark.parametrize("source", LONG.values(), ids=LONG)
def test_what_is_nested_too_deeply_is_refused_at_once_whatever_pythons_limit_is(source: str, limit: int) -> None:
    before, started = sys.getrecursionlimit(), time.process_time()
    sys.setrecursionlimit(limit)
    try:
        (refusal,) = check(source)
    finally:
        sys.setrecursionlimit(before)
    assert refusal.rule == "syntax"
    assert "deeper than 200 levels" in refusal.what or "more than 32 parts" in refusal.what
    assert time.process_time() - started < 10.0  # by the square it would be minutes


LIMITS = Limits(seconds=300.0, memory_bytes=1 << 30)
SELECTION = PlanSelection(sizes=("small",), cases=("small-0",))
SOURCE = Path(traceproof.__file__).parent
# Each looks for something; what it finds must be nothing.
IMPORTS = "try:\n    {}\nexcept ImportError:\n    found = None"
LOOKS = {
    "imports_the_project": IMPORTS.format("import traceproof.ops.families.norm as found"),
    "imports_the_registry": IMPORTS.format("from traceproof.ops import registry as found"),
    "finds_the_oracle_in_memory": """
ours = ('traceproof.ops', 'traceproof.judge', 'traceproof.dataset')
found = [one for one in object.__subclasses__() if one.__module__.startswith(ours)]
found += [one for one in list(__import__('sys').modules) if one.startswith('traceproof')]""",
    "finds_the_oracle_by_its_text": """
import gc
names = {'oracle', 'tells_apart', 'baseline', 'comparisons'}
found = [one for one in gc.get_objects() if isinstance(one, type) and names <= set(vars(one))]""",
    "reads_files": """
import os
places = ('SOURCE', 'SOURCE/ops/families/norm.py', 'SOURCE/ops', 'DATASET/definitions', 'RESULTS/cases',
          'RESULTS/verdicts', 'RESULTS/cache.sqlite')
found = [path for path in places if os.path.exists(path)]""",
    "finds_its_neighbours": """
import os
try:
    found = [name for name in os.listdir(os.path.dirname(os.getcwd())) if name != os.path.basename(os.getcwd())]
except OSError:
    found = []""",
    "reads_the_environment": """
import os
found = [name for name in os.environ if 'TOKEN' in name or 'PYTHONPATH' in name]""",
    "reads_other_environments": """
import glob
found = []
for path in glob.glob('/proc/[0-9]*/environ'):
    try:
        found += [path] if b'TOKEN' in open(path, 'rb').read() else []
    except OSError:
        pass""",
}


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Rows]:
    root, out = tmp_path_factory.mktemp("dataset"), tmp_path_factory.mktemp("results")
    for name, look in LOOKS.items():
        text = look.replace("SOURCE", str(SOURCE)).replace("RESULTS", str(out)).replace("DATASET", str(root))
        write(root, rmsnorm(name, reference(f"{text}\nassert not found, found\n{RIGHT}")))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_TOKEN", "hf_secret")
        patch.setattr(policy, "check", lambda *_: [])
        return Run(root, out, selection=SELECTION, limits=LIMITS).verify()


@pytest.mark.parametrize("name", LOOKS)
def test_it_finds_nothing(name: str, rows: dict[str, Rows]) -> None:
    assert verdicts(rows[name]) == {("pass", None)}, rows[name][0]["message"]


def test_another_copy_that_the_interpreter_would_import_is_hidden_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_files(tmp_path, {"traceproof/__init__.py": ""})
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    with untrusted_pool() as pool:
        assert {SOURCE.parents[1] / "src", tmp_path / "traceproof"} <= {*pool.conceal}


def test_each_protection_needs_one_of_its_layers_of_isolation() -> None:
    assert lacking(dict.fromkeys(NOTHING, "holds")) == []
    assert "the network" in lacking(dict.fromkeys(NOTHING, "absent: left out on request"))
    gpu = dict.fromkeys(NOTHING, "holds") | {"landlock": "absent: left out on request"}
    assert lacking(gpu) == []


def test_strangers_code_does_not_run_where_it_can_not_be_isolated(tmp_path: Path) -> None:
    write(tmp_path / "dataset", rmsnorm("alpha"))
    with untrusted_pool() as bare, pytest.MonkeyPatch.context() as patch:
        bare.python, bare.without = forked.interpreter(), NOTHING
        patch.setattr("pipeline._interpreter", lambda: bare)
        run = Run(tmp_path / "dataset", tmp_path / "results", selection=SELECTION, limits=LIMITS)
        (row,) = run.verify()["alpha"]
        assert (row["verdict"], row["reason"]) == ("error", "weak_isolation")
        assert "--allow-weak-isolation" in row["message"]
        run.weak = True
        allowed = run.verify()["alpha"]
    assert verdicts(allowed) == {("pass", None)}
    assert {row["isolation"] for row in allowed} == {"this user's files, the network, other processes, privileges"}
    assert all("isolation was weak" in row["message"] for row in allowed)


def test_a_pool_says_of_each_outcome_what_was_lacking() -> None:
    pool = Pool(preload=(), without=tuple(NOTHING), weak=False)
    with pool, pool.session(setup="worker_misdeeds:setup", payload=None) as session:
        refused = session.ask({"do": "given"})
    assert refused.status is Status.ISOLATION
