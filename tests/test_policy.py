"""The static policy: what it refuses, by rule and place, and what it must let through."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import pytest

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
    assert time.process_time() - started < 1.0
