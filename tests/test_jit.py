"""Long builds start first; one that fails or is late costs itself; a lease ends with its holder."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import time
import types
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from traceproof.actors import built
from traceproof.ops.gdn.ground_truths.flashinfer import PREFILL_SM90
from traceproof.pipeline import gpu_lease, jit
from traceproof.pipeline.gpu_lease import Gpu, lease, workers
from traceproof.reasons import UnavailableError
from traceproof.stacks import STACKS, flashinfer
from traceproof.stacks.base import LIBRARIES, Module


def test_what_hangs_on_one_long_file_starts_first() -> None:
    order = sorted(
        map(Module, ("gen_decode", "gen_sampling", "gen_prefill")),
        key=lambda one: jit._urgency(STACKS["flashinfer"], one),
        reverse=True,
    )
    assert [module.generator for module in order] == ["gen_sampling", "gen_prefill", "gen_decode"]


@pytest.mark.parametrize(("generator", "nice"), [("gen_sampling", 0), ("gen_norm", jit.OTHERS_NICE)])
def test_the_others_give_way(generator: str, nice: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = tmp_path / "python"
    fake.write_text('#!/bin/sh\necho "$3"; exit 1\n')
    fake.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(fake))
    [(_, built)] = jit.build("flashinfer", [Module(generator, (), "_b$")], at_once=1, seconds=30.0)
    order = {
        "stack": "flashinfer",
        "generator": generator,
        "args": [],
        "unused": "_b$",
        "compiles": False,
        "nice": nice,
    }
    assert json.loads(built.message) == order


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


@pytest.mark.parametrize(("program", "seconds", "status"), [("false", 30.0, "failed"), ("sleep", 0.2, "timeout")])
def test_a_bad_build_is_a_record(
    program: str, seconds: float, status: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = tmp_path / "python"
    fake.write_text("#!/bin/sh\necho said; exit 1\n" if program == "false" else "#!/bin/sh\nexec sleep 60\n")
    fake.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(fake))
    [(module, built)] = jit.build("flashinfer", [Module("gen_norm")], at_once=2, seconds=seconds)
    assert (module.label, built.status) == ("norm", status)
    assert ("said" in built.message) == (status == "failed")


def test_a_failed_module_costs_the_definitions_that_need_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = tmp_path / "norm.json"
    record.write_text(json.dumps({"norm": {"status": "timeout", "seconds": 9.0, "message": "late"}}))
    monkeypatch.setenv(built.RECORDS, str(record))
    assert "norm: timeout after 9 s" in str(built.failure([Module("gen_norm")]))
    assert built.failure([Module("gen_rope")]) is None


def test_workers_compile_with_the_builders_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "/opt/gcc")
    monkeypatch.delenv("CXX", raising=False)
    variables = jit.environment(tmp_path, {"digest": "d" * 32})
    assert variables["CC"] == "/opt/gcc"
    assert "CXX" not in variables


def other_process(
    found: list[Gpu], folder: Path, memory_mib: int = 0, passed: float = 0.0
) -> subprocess.Popen[str]:
    """A process that takes a lease, says of what, and holds it until its stdin is closed."""
    code = (
        "import sys\nfrom pathlib import Path\nfrom traceproof.pipeline import gpu_lease\n"
        "from traceproof.pipeline.gpu_lease import Gpu, lease\n"
        f"gpu_lease.PASSED_SECONDS = {passed}\n"
        f"with lease({found!r}, memory_mib={memory_mib}, folder=Path({str(folder)!r})) as place:\n"
        "    print(place, flush=True)\n    sys.stdin.read()\n"
    )
    variables = {name: value for name, value in os.environ.items() if name != gpu_lease.VARIABLE}
    return subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=variables | {"PYTHONPATH": "src"},
    )


def place_of(process: subprocess.Popen[str]) -> str:
    """What the process was given; waits for it."""
    assert process.stdout is not None
    return process.stdout.readline().strip()


def test_leases_spread_over_gpus_and_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(gpu_lease.VARIABLE, raising=False)
    found = [Gpu("0", 40_000), Gpu("1", 40_000)]
    with other_process(found, tmp_path) as other:
        assert place_of(other) == "0"
        with lease(found, folder=tmp_path) as mine:
            assert mine == "1"
            assert os.environ[gpu_lease.VARIABLE] == "1"
        other.communicate()
    assert gpu_lease.VARIABLE not in os.environ
    with lease(found, folder=tmp_path) as mine:
        assert mine == "0"


def test_a_large_job_waits_for_room_and_is_not_passed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(gpu_lease.VARIABLE, raising=False)
    found = [Gpu("0", 3 * gpu_lease.PLACE_MIB)]
    with lease(found, folder=tmp_path):
        large = other_process(found, tmp_path, memory_mib=99 * gpu_lease.PLACE_MIB)
        turn = tmp_path / "turn.lock"
        while subprocess.run(["flock", "-n", turn, "true"], check=False).returncode == 0:  # until it waits
            time.sleep(0.02)
        small = other_process(found, tmp_path)
        with pytest.raises(subprocess.TimeoutExpired):
            small.wait(0.3)
    with large, small:
        assert place_of(large) == "0"
        large.communicate()
        assert place_of(small) == "0"
        small.communicate()


def test_a_large_job_that_waits_lets_small_ones_pass_at_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(gpu_lease.VARIABLE, raising=False)
    found = [Gpu("0", 4 * gpu_lease.PLACE_MIB)]
    with lease(found, folder=tmp_path):
        large = other_process(found, tmp_path, memory_mib=99 * gpu_lease.PLACE_MIB, passed=60.0)
        with pytest.raises(subprocess.TimeoutExpired):
            large.wait(0.5)
        with other_process(found, tmp_path) as small:
            assert place_of(small) == "0"
            small.communicate()
    with large:
        assert place_of(large) == "0"
        large.communicate()


def test_an_assignment_is_respected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(gpu_lease.VARIABLE, "3")
    with lease([Gpu("0", 40_000)], folder=tmp_path) as place:
        assert place is None
        assert os.environ[gpu_lease.VARIABLE] == "3"


def test_a_single_assigned_gpu_is_waited_for_by_its_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = [Gpu("0", 40_000, "GPU-aa"), Gpu("1", 4 * gpu_lease.PLACE_MIB, "GPU-bb")]
    with other_process(found[1:], tmp_path, memory_mib=2 * gpu_lease.PLACE_MIB) as other:
        assert place_of(other) == "1"
        for name in ("1", "GPU-bb"):
            monkeypatch.setenv(gpu_lease.VARIABLE, name)
            with lease(found, folder=tmp_path) as place:
                assert place == "1"
                assert os.environ[gpu_lease.VARIABLE] == name
        with other_process(found[1:], tmp_path, memory_mib=2 * gpu_lease.PLACE_MIB) as large:
            with pytest.raises(subprocess.TimeoutExpired):
                large.wait(0.3)
            other.communicate()
            assert place_of(large) == "1"
            large.communicate()


def test_one_number_for_two_gpus_of_a_batch_system_is_no_conflict(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = gpu_lease.PLACE_MIB
    with other_process([Gpu("0", whole, "GPU-aa")], tmp_path) as other:
        assert place_of(other) == "0"
        monkeypatch.setenv(gpu_lease.VARIABLE, "0")
        with lease([Gpu("0", whole, "GPU-bb")], folder=tmp_path) as place:
            assert place == "0"
        other.communicate()


def test_of_several_assigned_gpus_one_is_leased(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(gpu_lease.VARIABLE, "1,2")
    with lease([Gpu("0", 90_000), Gpu("1", 40_000), Gpu("2", 60_000)], folder=tmp_path) as place:
        assert place == os.environ[gpu_lease.VARIABLE] == "2"
    assert os.environ[gpu_lease.VARIABLE] == "1,2"


def test_processes_with_a_gpu_open_follow_the_cores_and_the_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(16)))
    large, small = Gpu("0", 143_360), Gpu("0", 24_576)
    assert [workers(found) for found in ([large], [large, large], [small], [])] == [4, 4, 1, 1]
