"""Long builds start first; one that fails or is late costs itself."""

from __future__ import annotations

import itertools
import json
import sys
import threading
import types
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from traceproof.environments import jit
from traceproof.ops.families.gdn import PREFILL_SM90
from traceproof.reasons import UnavailableError
from traceproof.stacks import LIBRARIES, STACKS, Module, flashinfer


def test_what_hangs_on_one_long_file_starts_first() -> None:
    order = sorted(
        map(Module, ("gen_decode", "gen_sampling", "gen_prefill")),
        key=lambda one: jit.urgency(STACKS["flashinfer"], one),
        reverse=True,
    )
    assert [module.generator for module in order] == ["gen_sampling", "gen_prefill", "gen_decode"]


def built(folder: Path, module: Module, script: str, seconds: float = 300.0) -> str | None:
    """What comes of a module whose builder is a script."""
    fake = folder / "python"
    fake.write_text(f"#!/bin/sh\n{script}\n")
    fake.chmod(0o755)
    where: dict[str, Any] = {"python": str(fake), "variables": {}, "marks": folder / "built"}
    return jit.build("flashinfer", module, **where, seconds=seconds, stopped=threading.Event())


@pytest.mark.parametrize(("generator", "nice"), [("gen_sampling", 0), ("gen_norm", jit.OTHERS_NICE)])
def test_the_others_give_way(generator: str, nice: int, tmp_path: Path) -> None:
    problem = built(tmp_path, Module(generator, (), "_b$"), 'echo "$3"; exit 1')
    assert problem is not None
    order = {"stack": "flashinfer", "generator": generator, "args": [], "compiles": False, "nice": nice}
    assert json.loads(problem.partition("\n")[2]) == order | {"unused": "_b$"}


@dataclass
class Described:
    """A package's description of a module, as far as the builder reads it."""

    sources: list[Path]
    extra_ldflags: list[str] | None = None


def test_sources_that_nothing_calls_are_left_out() -> None:
    whole = Described([Path(f"mask_{mask}.cu") for mask in range(3)])
    part = jit._without(whole, r"_[02]$")
    assert part == Described([Path("mask_1.cu")], ["-Wl,-z,lazy"])
    assert jit._without(whole, None) is jit._without(whole, "elsewhere") is whole


def test_the_delta_rule_is_built_for_the_calls_that_are_made() -> None:
    options = list(itertools.product("01", repeat=5))
    names = [f"gdn_prefill_kernel_bf16_g{g}b{b}a{a}i{i}c{c}" for g, b, a, i, c in options]
    sources = [Path(f"{name}.cu") for name in [*names, "gdn_prefill_launcher", "prefill_kernel_delta_rule_sm90"]]
    left = jit._without(Described(sources), PREFILL_SM90.unused).sources
    kept = {"gdn_prefill_kernel_bf16_g0b1a1i1c0", "gdn_prefill_kernel_bf16_g1b1a1i1c0"}
    assert {source.stem for source in left} == kept | {"gdn_prefill_launcher", "prefill_kernel_delta_rule_sm90"}


def test_workers_load_what_was_built_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = tmp_path / "build.so"
    library.write_bytes(b"built")
    libraries = Path(jit.environment(tmp_path, {"digest": "d" * 32})[LIBRARIES])
    jit._hand_over("norm", library, libraries)
    assert [path.name for path in libraries.rglob("*") if path.is_file()] == ["norm.so"]
    environment = types.ModuleType("flashinfer.jit.env")
    for name in ("flashinfer", "flashinfer.jit"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, "flashinfer.jit.env", environment)
    monkeypatch.setenv("FLASHINFER_USE_CUDA_NORM", "1")
    monkeypatch.setenv(LIBRARIES, str(libraries))
    flashinfer.prepare()
    assert (environment.FLASHINFER_AOT_DIR / "norm" / "norm.so").read_bytes() == b"built"


def test_a_kernel_that_no_network_gives_is_absent_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    loader: Any = types.ModuleType(flashinfer.LOADER)
    loader.FLASHINFER_CUBINS_REPOSITORY = "https://kernels.invalid/artifacts"
    for name in ("flashinfer", "flashinfer.jit"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, flashinfer.LOADER, loader)
    monkeypatch.setenv("FLASHINFER_USE_CUDA_NORM", "1")
    flashinfer.prepare()
    with pytest.raises(UnavailableError, match=r"from kernels\.invalid, which is not reached"):
        loader.time.sleep(60.0)
    loader.FLASHINFER_CUBINS_REPOSITORY = "https://localhost/artifacts"
    loader.time.sleep(0.0)


def test_memory_bounds_what_is_built_at_once() -> None:
    assert jit.side_by_side(4 * jit.BUILD_BYTES, 16) == 4
    assert jit.side_by_side(100 * jit.BUILD_BYTES, 16) == 16
    assert jit.side_by_side(0, 16) == 1


@pytest.mark.parametrize(
    ("script", "seconds", "how"), [("echo said; exit 1", 300.0, "failed"), ("exec sleep 60", 0.2, "timeout")]
)
def test_a_bad_build_says_how_it_ended(script: str, seconds: float, how: str, tmp_path: Path) -> None:
    problem = built(tmp_path, Module("gen_norm"), script, seconds)
    assert problem is not None
    assert problem.startswith(f"kernel module norm: {how} after ")
    assert ("said" in problem) == (how == "failed")


def test_what_is_built_is_not_built_again(tmp_path: Path) -> None:
    count = tmp_path / "count"
    for _ in range(2):
        assert built(tmp_path, Module("gen_norm"), f"echo >> {count}") is None
    assert count.read_text() == "\n"


def test_workers_compile_with_the_builders_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "/opt/gcc")
    monkeypatch.delenv("CXX", raising=False)
    variables = jit.environment(tmp_path, {"digest": "d" * 32})
    assert variables["CC"] == "/opt/gcc"
    assert "CXX" not in variables
