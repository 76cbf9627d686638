"""A tiny package under FlashInfer's name: what a ground truth depends on in it, and what it does not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from traceproof.bumps.keys import keyed, write_records
from traceproof.bumps.source import importable
from traceproof.bumps.touches import Touch, changed_parts, stack_of, touches
from traceproof.checkouts.lock import write_lock
from traceproof.checkouts.pin import Pin
from traceproof.checkouts.tree import FolderTree
from traceproof.errors import TraceproofError
from traceproof.pipeline.sources import LOCKED, Sources, pins_of, scan, state

BASE = {
    "flashinfer/__init__.py": "from .norm import rmsnorm as rmsnorm\nfrom . import rope\nfrom . import unused\n",
    "flashinfer/norm/__init__.py": (
        "from ..jit import gen_norm_module\nfrom ..utils import helper, other\n\n"
        "def rmsnorm(input, weight, eps=1e-6):\n    return helper(gen_norm_module().build_and_load())\n\n"
        "def layernorm(input):\n    return other(input)\n"
    ),
    "flashinfer/utils.py": "LIMIT = 3\n\ndef helper(x):\n    return x, LIMIT\n\ndef other(x):\n    return x\n",
    "flashinfer/jit.py": (
        "import importlib\n\n"
        "def gen_norm_module():\n    arch('sm90').TABLE\n    return ['csrc/norm.cu']\n\n"
        "def gen_rope_module():\n    return ['csrc/rope.cu']\n\n"
        "def arch(name):\n    place = f'flashinfer.archs.{name}.table'\n"
        "    return importlib.import_module(place)\n"
    ),
    "flashinfer/archs/__init__.py": "",
    "flashinfer/archs/sm90/__init__.py": "",
    "flashinfer/archs/sm90/table.py": "TABLE = 90\n",
    "flashinfer/rope.py": (
        "from .jit import gen_rope_module\n\n"
        "def apply_rope_with_cos_sin_cache_inplace(q):\n    return gen_rope_module()\n"
    ),
    "flashinfer/unused.py": "def nothing():\n    return 1\n",
    "flashinfer/data/csrc/norm.cu": '#include <flashinfer/norm.cuh>\n#include "cuda/atomic"\n',
    "flashinfer/data/csrc/rope.cu": '#include "pos_enc.cuh"\n',
    "flashinfer/data/csrc/pos_enc.cuh": "// rope\n",
    "flashinfer/data/csrc/idle.cu": "// nobody\n",
    "flashinfer/data/include/flashinfer/norm.cuh": '#pragma once\n#include "deep/{{ kind }}_impl.cuh"\n',
    "flashinfer/data/include/flashinfer/deep/fast_impl.cuh": "// fast\n",
    "flashinfer/data/cccl/include/cuda/atomic": "// a header without a suffix\n",
    "README.md": "words\n",
}
NORM, ROPE = "rmsnorm", "rope"


def write(root: Path, files: dict[str, str]) -> Path:
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    return root


def touched(root: Path) -> dict[str, Touch]:
    return touches("flashinfer", FolderTree(root))


def edited(tmp_path: Path, name: str, old: str, new: str) -> tuple[dict[str, Touch], dict[str, Touch]]:
    """Before and after an edit."""
    assert old in BASE[name]
    return (
        touched(write(tmp_path / "a", BASE)),
        touched(write(tmp_path / "b", {**BASE, name: BASE[name].replace(old, new)})),
    )


@pytest.mark.parametrize(
    ("name", "old", "new", "op_types"),
    [
        pytest.param("flashinfer/utils.py", "x, LIMIT", "LIMIT, x", {NORM}, id="a helper"),
        pytest.param("flashinfer/utils.py", "LIMIT = 3", "LIMIT = 4", {NORM}, id="a constant that it reads"),
        pytest.param("flashinfer/utils.py", "    return x\n", "    return x + 1\n", set(), id="another function"),
        pytest.param(
            "flashinfer/norm/__init__.py", "other(input)", "other(1)", set(), id="a kernel of no adapter"
        ),
        pytest.param("flashinfer/data/csrc/norm.cu", "#include", "//\n#include", {NORM}, id="a CUDA source"),
        pytest.param(
            "flashinfer/data/include/flashinfer/deep/fast_impl.cuh", "fast", "x", {NORM}, id="a template's header"
        ),
        pytest.param("flashinfer/data/cccl/include/cuda/atomic", "a", "b", {NORM}, id="a header without a suffix"),
        pytest.param("flashinfer/data/csrc/pos_enc.cuh", "rope", "x", {ROPE}, id="a header of the other family"),
        pytest.param("flashinfer/data/csrc/idle.cu", "nobody", "x", set(), id="a source that nobody names"),
        pytest.param("flashinfer/archs/sm90/table.py", "90", "91", {NORM}, id="a module named a line before"),
        pytest.param("flashinfer/unused.py", "1", "2", set(), id="a module that is imported only"),
        pytest.param("flashinfer/jit.py", "import importlib", "# why\nimport importlib", set(), id="a comment"),
        pytest.param("README.md", "words", "others", set(), id="prose"),
    ],
)
def test_an_edit_touches_what_can_run_it(
    tmp_path: Path, name: str, old: str, new: str, op_types: set[str]
) -> None:
    before, after = edited(tmp_path, name, old, new)
    both = {NORM, ROPE}
    assert {one for one in both if before[one].digest != after[one].digest} == op_types
    assert all(changed_parts(before[one], after[one]) for one in op_types)


def test_a_chain_leads_to_the_adapter(tmp_path: Path) -> None:
    chain = touched(write(tmp_path, BASE))[NORM].why("flashinfer/data/include/flashinfer/norm.cuh")
    assert chain[0].endswith("included by flashinfer/data/csrc/norm.cu")
    assert "'csrc/norm.cu' in flashinfer/jit.py gen_norm_module" in chain[1]


def test_a_stack_is_known_by_its_package(tmp_path: Path) -> None:
    assert stack_of(FolderTree(write(tmp_path / "a", {"python/sglang/__init__.py": ""}))) == "sglang"
    assert stack_of(FolderTree(write(tmp_path / "b", {"numpy/__init__.py": ""}))) is None


RECORD = {
    "stack": "flashinfer",
    "digest": "d",
    "versions": {"flashinfer-python": "1", "torch": "2"},
    "device": "cpu",
    "cuda_home": "",
}


def test_a_version_alone_changes_no_key() -> None:
    other = {**RECORD, "versions": {"flashinfer-python": "2", "torch": "2"}, "digest": "e"}
    assert keyed(RECORD, "code")["digest"] == keyed(other, "code")["digest"]
    assert keyed(RECORD, "code")["digest"] != keyed(RECORD, "other code")["digest"]
    torch = {**RECORD, "versions": {"flashinfer-python": "1", "torch": "3"}}
    assert keyed(RECORD, "code")["digest"] != keyed(torch, "code")["digest"]


def caches(folder: Path) -> list[str]:
    """The names of the folders that kernels are compiled in."""
    return [json.loads((folder / f"{name}.json").read_text())["cache"] for name in (NORM, ROPE)]


def test_only_records_with_a_new_digest_are_written(tmp_path: Path) -> None:
    assert write_records(tmp_path, RECORD, {NORM: "1", ROPE: "1"}, [NORM, ROPE], None) == [NORM, ROPE]
    before = (tmp_path / "rope.json").read_bytes()
    bumped = {**RECORD, "digest": "e", "versions": {"flashinfer-python": "2", "torch": "2"}}
    assert write_records(tmp_path, bumped, {NORM: "2", ROPE: "1"}, [NORM, ROPE], None) == [NORM]
    assert (tmp_path / "rope.json").read_bytes() == before
    assert len(set(caches(tmp_path))) == 2  # what is compiled of the old code stays where it is


def test_a_release_compiles_in_a_folder_of_its_own(tmp_path: Path) -> None:
    write_records(tmp_path, RECORD, {NORM: "1", ROPE: "1"}, [NORM, ROPE], "one")
    assert write_records(tmp_path, RECORD, {NORM: "2", ROPE: "1"}, [NORM, ROPE], "two") == [NORM]
    assert caches(tmp_path) == ["two", "two"]


def test_a_checkout_is_imported_with_its_kernels(tmp_path: Path) -> None:
    checkout = write(
        tmp_path / "checkout", {"flashinfer/__init__.py": "x = 1\n", "csrc/norm.cu": "//\n", "include/a.h": "//\n"}
    )
    linked = importable(checkout, "flashinfer", tmp_path / "linked")
    assert (linked / "flashinfer" / "__init__.py").read_text() == "x = 1\n"
    assert (linked / "flashinfer" / "data" / "csrc" / "norm.cu").is_file()
    assert (linked / "traceproof" / "errors.py").is_file()
    assert "Version: 0+edited" in (linked / "flashinfer_python-0+edited.dist-info" / "METADATA").read_text()
    with pytest.raises(TraceproofError, match="holds no package fla"):
        importable(checkout, "fla", tmp_path / "other")


def test_a_locked_source_needs_a_pin(tmp_path: Path) -> None:
    taken = {"fla": LOCKED, "sglang": None}
    with pytest.raises(TraceproofError, match="no pin of fla"):
        pins_of(taken, root=tmp_path)
    write_lock(tmp_path / "sources.lock", {"fla": Pin(url="x", commit="1" * 40, ref="refs/heads/main")})
    assert pins_of(taken, root=tmp_path) == {"fla": {"url": "x", "commit": "1" * 40}}


def test_an_edit_of_what_was_cloned_is_seen(tmp_path: Path) -> None:
    folder = write(tmp_path / "sources" / "fla", {"fla/__init__.py": "1"})
    cloned = tmp_path / "sources.json"
    cloned.write_text(json.dumps({"scans": {"fla": scan(folder)}}))
    assert state("fla", LOCKED, root=tmp_path, cloned=cloned) == "as cloned"
    write(folder, {"fla/__init__.py": "12"})
    assert state("fla", LOCKED, root=tmp_path, cloned=cloned) == scan(folder) != "as cloned"


def test_a_record_goes_by_op_type_where_a_package_is_followed(tmp_path: Path) -> None:
    sources = Sources(tmp_path, "results", {"fla": "/mine"})
    assert sources.record("fla", "gdn") == "results/stacks/fla/gdn.json"
    assert sources.record("fla", "moe") == "results/stacks/fla/other.json"
    assert sources.record("torch", "moe") == "results/stacks/torch.json"
    assert sources.path("fla") == "results/linked/fla:src"
    assert sources.path("sglang") == "src"
