"""Kernels as BackendBench and KernelBench have them, against PyTorch in float64; functions' files, isolated."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest
import torch

import traceproof
from traceproof import TraceproofError
from traceproof.solutions import judging, suites
from traceproof.solutions.judging import target_of
from traceproof.solutions.reading import read, without_tests

pytestmark = pytest.mark.usefixtures("one_thread")
SOFTMAX = """import torch


def _softmax_kernel_impl(x, dim, half_to_float, *args):
    y = x.float()
    y = torch.exp(y - y.amax(dim, keepdim=True))
    return (y / y.sum(dim, keepdim=True)).to(x.dtype)
"""
PROBLEM = """import torch
import torch.nn as nn


class Model(nn.Module):
    def __init__(self, features):
        super(Model, self).__init__()
        self.linear = nn.Linear(features, 48)

    def forward(self, x):
        return torch.softmax(self.linear(x), dim=1)


batch_size = 1 << 23
dim = 512


def get_inputs():
    return [torch.rand(batch_size, dim)]


def get_init_inputs():
    return [dim]
"""


@pytest.fixture(autouse=True)
def forks(monkeypatch: pytest.MonkeyPatch) -> None:
    from solution_judge import forked_environment  # this file is judged, too, as what a solution may import

    monkeypatch.setattr(judging, "Environment", forked_environment)


def written(file: Path, text: str) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text, encoding="utf-8")
    return file


def test_every_operator_has_a_definition_that_pytorch_answers() -> None:
    for op in suites.OPERATORS:
        for dtype in ("bfloat16", "float32"):
            definition = suites.operator_definition(f"aten::{op}::{dtype}")
            assert definition.op_type == "aten"
            inputs = [
                torch.ones(
                    definition.shape_of(spec, {"rows": 3, "batch": 3}) or (), dtype=getattr(torch, spec.dtype)
                )
                for spec in definition.inputs.values()
            ]
            space: dict[str, object] = {}
            exec(definition.reference, space)  # noqa: S102 - ours
            found = space["run"](*inputs)  # type: ignore[operator]
            [spec] = definition.outputs.values()
            assert found.dtype is getattr(torch, dtype)
            assert tuple(found.shape) == definition.shape_of(spec, {"rows": 3, "batch": 3}), op
    with pytest.raises(
        TraceproofError, match="there is no definition of aten::relux; close to it: relu, elu, gelu"
    ):
        traceproof.definition("aten::relux")


def test_files_of_backendbench_name_their_operator_and_unknown_ones_do_not_stop_the_others(tmp_path: Path) -> None:
    written(tmp_path / "_softmax" / "_softmax_implementation_v1.py", SOFTMAX)
    written(tmp_path / "frob" / "frob_implementation_v1.py", "def frob_kernel_impl(x):\n    return x\n")
    frob, softmax = sorted(read(tmp_path), key=lambda one: one.definition, reverse=True)
    assert (softmax.definition, frob.definition) == ("aten::_softmax", "aten::frob")
    assert not softmax.refusals
    with target_of(softmax.definition, None) as target:
        assert softmax.settled(target.definition).destinations is False
    with (
        pytest.raises(TraceproofError, match="there is no definition of aten::frob"),
        target_of("aten::frob", None),
    ):
        pass
    file = written(tmp_path / "relu" / "relu_implementation_v1.py", "def other(x):\n    return x\n")
    with pytest.raises(TraceproofError, match="it has no function relu_kernel_impl, as BackendBench calls it"):
        read(file)


@pytest.mark.slow
def test_an_operator_is_judged_against_pytorch_in_float64(tmp_path: Path) -> None:
    file = tmp_path / "_softmax" / "_softmax_implementation_v1.py"
    for text, right in ((SOFTMAX, True), (SOFTMAX.replace("y.sum(", "1e-3 + y.sum("), False)):
        written(file, text)
        report = traceproof.check(file, sizes=("small",), device="cpu")
        assert bool(report) == right, str(report)
        assert {row.against for row in report.rows} == {"shadow"}
        isolated = traceproof.check(file, sizes=("small",), device="cpu", isolated=True)
        assert bool(isolated) == right, str(isolated)
        assert isolated.certificate is not None


@pytest.mark.slow
def test_a_problem_is_a_definition_and_its_solutions_have_its_weights(tmp_path: Path) -> None:
    problem = written(tmp_path / "23_Softmax_of_linear.py", PROBLEM)
    definition = traceproof.definition(problem)
    assert [*definition.var_axes] == ["batch"]  # no memory is needed for its 16 GiB
    assert definition.const_axes == {"size_512": 512, "size_48": 48}
    assert list(definition.inputs) == ["x"]
    new = written(tmp_path / "new.py", PROBLEM.replace("Model", "ModelNew"))
    assert traceproof.check(new, problem, sizes=("small",), device="cpu")
    written(new, PROBLEM.replace("Model", "ModelNew").replace("dim=1)", "dim=1) * 1.001"))
    report = traceproof.check(new, problem, sizes=("small",), device="cpu")
    assert not report
    assert "again: traceproof.check" in str(report)
    with pytest.raises(TraceproofError, match="is no problem: it has no class Model"):
        traceproof.definition(written(tmp_path / "other.py", "x = 1\n"))
    with pytest.raises(TraceproofError, match="may not run"):
        traceproof.definition(written(tmp_path / "other.py", "import os\n" + PROBLEM))


def own_norm(hidden_states: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    y = hidden_states.float()
    return (y * torch.rsqrt(y.square().mean(-1, keepdim=True) + 1e-6) * weight.float()).to(hidden_states.dtype)


def test_what_has_no_file_of_its_own_is_not_isolated(tmp_path: Path) -> None:
    def within(hidden_states: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return own_norm(hidden_states, weight)

    for function in (within, torch.add):
        with pytest.raises(TraceproofError, match="has no file to run it from"):
            traceproof.check(function, "rmsnorm", hidden_size=96, isolated=True)
    with pytest.raises(TraceproofError, match="does not say which definition it implements"):
        traceproof.check(written(tmp_path / "mine.py", "def run(x, weight):\n    return x\n"))


@pytest.mark.slow
def test_a_function_beside_its_tests_is_judged_without_them(tmp_path: Path) -> None:
    options: dict[str, Any] = {"isolated": True, "device": "cpu", "sizes": ("small",)}
    report = traceproof.check(own_norm, "rmsnorm", hidden_size=96, **options)  # of this file
    assert report, str(report)
    file = written(tmp_path / "own.py", BESIDE_TESTS.replace("# ...", "OTHERS = open('x')"))
    with pytest.raises(TraceproofError, match=r"it has no function gone; .* there are: norm, data, test_norm"):
        read(file, "gone")
    report = traceproof.check(f"{file}::norm", "rmsnorm", hidden_size=96, **options)
    assert not report
    assert "line 26, column 10: name: open reads or writes files" in str(report)


BESIDE_TESTS = """from __future__ import annotations
import os, re
import pytest
import torch
import traceproof
from unittest import mock

CASES = [torch.float16, torch.bfloat16]
EPS = 1e-6
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="x")


def norm(hidden_states, weight):
    y = hidden_states.float()
    return (y * torch.rsqrt(y.square().mean(-1, keepdim=True) + EPS) * weight.float()).to(hidden_states.dtype)


class TestIt:
    'Tests.'

    @pytest.mark.parametrize("function", [norm])
    def test_a(self, function):
        os.system("x")


# ...
@pytest.fixture(scope="module")
def data(tmp_path: Path) -> list[int]:
    return open("x")


@pytest.mark.parametrize("dtype", CASES)
def test_norm(data, dtype):
    assert traceproof.check(norm, "rmsnorm", hidden_size=96)
"""


def left(text: str) -> list[str]:
    """The first line of each statement that stays."""
    text = without_tests(text, "norm")
    return [text.splitlines()[one.lineno - 1] for one in ast.parse(text).body]


def test_what_stays_beside_a_function_is_what_it_names_and_whatever_does_something() -> None:
    always = [
        "from __future__ import annotations",
        "import torch",
        "EPS = 1e-6",
        "def norm(hidden_states, weight):",
    ]
    assert left(BESIDE_TESTS) == always
    for text in (
        "STATE = norm.cache",  # an attribute may compute
        "torch.set_default_dtype(torch.float16)",
        "OTHERS = [norm(one, one) for one in ()]",
        "EPS = 1e-5",
        "import numpy",
        "__builtins__ = {}",
        "class Other(torch.nn.Module): pass",
        "def other(x=norm(1, 2)): pass",
        "def other(x: EPS[norm]): pass",
        "if EPS: pass",
    ):
        assert text in left(BESIDE_TESTS.replace("# ...", text)), text
    for text in (  # which is no module any more
        "pytest = torch",
        "match EPS:\n    case pytest: pass",
        "def other():\n    global pytest\n    pytest = EPS\nother()",
    ):
        assert "import pytest" in left(BESIDE_TESTS.replace("# ...", text)), text
