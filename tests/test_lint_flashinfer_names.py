"""Whether a dotted name exists is read off a package's files; nothing is imported."""

from __future__ import annotations

from pathlib import Path

import pytest

from traceproof.errors import TraceproofError
from traceproof.lint.flashinfer_names import Package

FILES = {
    "__init__.py": """
raise RuntimeError("this package must not be imported")
from .decode import Wrapper as DecodeWrapper
from . import norm
from .star import *
from .missing_module import gone
from . import circle_a
""",
    "norm.py": """
from .core.rms import rmsnorm
import math
from os import path
limit: int = 3
a, (b, c) = 1, (2, 3)
""",
    "core/__init__.py": "",
    "core/rms.py": """
try:
    from fast import rmsnorm
except ImportError:
    def rmsnorm(x): ...
if math:
    def slow(x): ...
else:
    def slow(x): ...
with lock:
    guarded = 1
""",
    "decode.py": """
class Base:
    def plan(self): ...
class Wrapper:
    size = 1
    def run(self): ...
class Heir(Base): ...
async def wait(): ...
from flashinfer.norm import rmsnorm as absolute
from ..outside import thing
""",
    "star.py": "def shining(): ...\n",
    "circle_a.py": "from .circle_b import lost\n",
    "circle_b.py": "from .circle_a import lost\n",
}


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Package:
    root = tmp_path_factory.mktemp("site")
    for name, text in FILES.items():
        path = root / "flashinfer" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return Package(root)


@pytest.mark.parametrize(
    "name",
    [
        "flashinfer.norm",
        "flashinfer.norm.rmsnorm",
        "flashinfer.norm.math",
        "flashinfer.norm.path.join",
        "flashinfer.norm.limit",
        "flashinfer.norm.c",
        "flashinfer.core.rms.rmsnorm",
        "flashinfer.core.rms.slow",
        "flashinfer.core.rms.guarded",
        "flashinfer.decode.Wrapper",
        "flashinfer.decode.Wrapper.run",
        "flashinfer.decode.Wrapper.size",
        "flashinfer.decode.Heir.plan",
        "flashinfer.decode.wait",
        "flashinfer.decode.absolute",
        "flashinfer.DecodeWrapper.run",
        "flashinfer.shining",
    ],
)
def test_a_name_that_exists_is_found(package: Package, name: str) -> None:
    assert package.problem(name) == ""


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("flashinfer.norm.layernorm", "flashinfer.norm has no layernorm"),
        ("flashinfer.dark", "flashinfer has no dark"),
        ("flashinfer.decode.Wrapper.plan", "Wrapper has no plan"),
        ("flashinfer.gone", "flashinfer has no module missing_module"),
        ("flashinfer.circle_a.lost", "go in a circle"),
        ("torch.nn", "not a dotted name in flashinfer"),
        ("flashinfer", "not a dotted name in flashinfer"),
        ("flashinfer..norm", "not a dotted name in flashinfer"),
        ("flashinfer.norm()", "not a dotted name in flashinfer"),
    ],
)
def test_a_name_that_does_not_exist_is_told_why(package: Package, name: str, says: str) -> None:
    assert says in package.problem(name)


def test_the_packages_own_folder_will_do(package: Package) -> None:
    assert Package(package.root / "flashinfer").problem("flashinfer.norm.rmsnorm") == ""


def test_a_folder_without_the_package_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TraceproofError, match="holds no flashinfer"):
        Package(tmp_path)


def test_a_file_that_is_not_python_is_told(tmp_path: Path) -> None:
    (tmp_path / "flashinfer").mkdir()
    (tmp_path / "flashinfer/__init__.py").write_text("def (:")
    with pytest.raises(TraceproofError, match="can not be read as Python"):
        Package(tmp_path).problem("flashinfer.norm")
