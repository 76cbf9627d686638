"""Long builds start first; one that fails or is late costs itself; a lease ends with its holder."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from traceproof import gpu_lease, jit
from traceproof.gpu_lease import Gpu, lease
from traceproof.jit import Module


def test_long_builds_start_first_and_wide_ones_last() -> None:
    order = sorted(map(Module, ("gen_gdn_prefill", "gen_decode", "gen_prefill")), key=jit._urgency, reverse=True)
    assert [module.generator for module in order] == ["gen_prefill", "gen_decode", "gen_gdn_prefill"]


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
    monkeypatch.setenv(jit.RECORDS, str(record))
    assert "norm: timeout after 9 s" in str(jit.failure([Module("gen_norm")]))
    assert jit.failure([Module("gen_rope")]) is None


def test_workers_compile_with_the_builders_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "/opt/gcc")
    monkeypatch.delenv("CXX", raising=False)
    variables = jit.environment(tmp_path, {"digest": "d" * 32})
    assert variables["CC"] == "/opt/gcc"
    assert "CXX" not in variables


def test_leases_spread_over_gpus_and_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(gpu_lease.VARIABLE, raising=False)
    found = [Gpu("0", 40_000), Gpu("1", 40_000)]
    taken = []
    with lease(found, folder=tmp_path) as first:
        taken.append(first)
        del os.environ[gpu_lease.VARIABLE]  # as another process would see it
        with lease(found, folder=tmp_path) as second:
            taken.append(second)
        os.environ[gpu_lease.VARIABLE] = str(first)
    assert taken == ["0", "1"]
    assert gpu_lease.VARIABLE not in os.environ


def test_an_assignment_is_respected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(gpu_lease.VARIABLE, "3")
    with lease([Gpu("0", 40_000)], folder=tmp_path) as place:
        assert place is None
        assert os.environ[gpu_lease.VARIABLE] == "3"
