from __future__ import annotations

from pathlib import Path

import pytest
from definitions import write_files
from source_remotes import Upstream

from traceproof.checkouts.tree import CommitTree, FolderTree, changed_between
from traceproof.cli.sources import dependents
from traceproof.dependents import Graph, Reached
from traceproof.errors import TraceproofError

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


ALL = {"free/test_nothing.py", *(name for name in FILES if name.startswith("tests/test_"))}
UNDER_PKG = ALL - {"free/test_nothing.py"}


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
        pytest.param("pyproject.toml", ALL, id="settings"),
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
    assert tests == {*ALL, "tests/test_broken.py"}
    assert found.everything is not None
    assert "can not be parsed" in found.everything
    assert "tests/test_broken.py" in reached(root, "pkg/alone.py")[0]


def test_an_import_by_an_unknown_name_may_mean_any_module(tmp_path: Path) -> None:
    root = write_files(
        tmp_path,
        {**FILES, "free/test_nothing.py": "import importlib, sys\nimportlib.import_module(sys.argv[1])\n"},
    )
    assert "free/test_nothing.py" in reached(root, "pkg/alone.py")[0]


def test_a_file_that_nobody_is_seen_to_read_reaches_everything(tmp_path: Path) -> None:
    assert reached(write_files(tmp_path, {**FILES, "data/x.bin": "0"}), "data/x.bin")[0] == ALL


def test_two_commits_are_compared_without_a_checkout(tmp_path: Path) -> None:
    upstream = Upstream(tmp_path / "repository")
    before = upstream.commit(dict(FILES))
    after = upstream.commit({"pkg/alone.py": "VALUE = 2\n", "other/leaf.py": None, "other/leaves.py": "x = 1\n"})
    assert changed_between(upstream.folder, before, after) == ["other/leaf.py", "other/leaves.py", "pkg/alone.py"]
    tree = CommitTree(upstream.folder, before)
    assert tree.read(["pkg/alone.py"]) == {"pkg/alone.py": b"VALUE = 1\n"}


def test_bad_use_is_said(tmp_path: Path) -> None:
    write_files(tmp_path, FILES)
    with pytest.raises(TraceproofError, match="--changed FILE"):
        dependents(root=tmp_path)
    with pytest.raises(TraceproofError, match=r"not in .*: pkg/gone\.py"):
        dependents(root=tmp_path, changed=["pkg/gone.py"])
