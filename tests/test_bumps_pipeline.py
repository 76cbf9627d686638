"""A pin is bumped and verified through the rules; the ground truth is a tiny package under SGLang's name."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from repository import Ran, Repository, own_dataset
from source_remotes import Upstream
from test_bumps_bisect import BASE, REGRESSION

from traceproof.pipeline.sources import DEPENDENCIES

pytestmark = pytest.mark.slow

ROTARY = """
import torch


def apply_rotary_emb(x, cos, sin, is_neox_style):
    cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)
    if is_neox_style:
        one, two = x.chunk(2, dim=-1)
        return torch.cat((one * cos - two * sin, two * cos + one * sin), dim=-1)
    one, two = x[..., ::2], x[..., 1::2]
    return torch.stack((one * cos - two * sin, two * cos + one * sin), dim=-1).flatten(-2)
"""
ROPE, NORM = "rope/rope_with_cos_sin_cache_neox_style_d64_rd32", "rmsnorm/rmsnorm_h96"


def keys(repository: Repository, op_type: str) -> set[str]:
    """Where the ground truth's outputs lie in the store."""
    manifest = json.loads((repository.root / "results" / "actors" / op_type / "sglang_native.json").read_text())
    return {record["key"] for cases in manifest["cases"].values() for record in cases.values()}


def outcomes(ran: Ran, job: str) -> str:
    """What the last line of an actor's job says of its cases."""
    return [line for line in ran.out.splitlines() if line.split()[:2] == job.split()][-1]


def pin(repository: Repository, upstream: Upstream, commit: str) -> None:
    """Pin the stack at a commit."""
    ran = repository.run(
        "traceproof", "clone-repos", "sglang", "--url", f"sglang={upstream.url}", "--commit", f"sglang={commit}"
    )
    assert ran.code == 0, ran.out


def test_a_bump_runs_what_it_touches_again_and_nothing_else(tmp_path: Path) -> None:
    upstream = Upstream(tmp_path / "upstream")
    rotary: dict[str, str | bytes | None] = {
        "python/sglang/srt/layers/rotary_embedding/__init__.py": "",
        "python/sglang/srt/layers/rotary_embedding/utils.py": ROTARY,
    }
    first = upstream.commit(BASE | rotary)
    here = {"python": sys.executable}
    (tmp_path / "repository").mkdir()
    repository = Repository.copy(
        tmp_path / "repository",
        dataset={"path": str(own_dataset(tmp_path / "dataset", ROPE, NORM))},
        truths=["sglang_native"],
        stacks={"torch": here, "flashinfer": here, "fla": here, "sglang": here | {"source": "locked"}},
    )
    stacks = repository.root / "results" / "stacks" / "sglang"
    pin(repository, upstream, first)
    ran = repository.verify()
    assert ran.code == 0, ran.out
    assert " ok " in outcomes(ran, "sglang_native rope")
    norms, ropes = keys(repository, "rmsnorm"), keys(repository, "rope")

    pin(repository, upstream, upstream.commit({"python/sglang/srt/scale.py": REGRESSION}))
    ran = repository.verify()
    assert ran.code == 1, ran.out
    assert not norms & keys(repository, "rmsnorm")
    assert keys(repository, "rope") == ropes
    assert " kept " in outcomes(ran, "sglang_native rope")
    assert " ok " not in outcomes(ran, "sglang_native rope")
    assert " kept " not in outcomes(ran, "sglang_native rmsnorm")
    assert not [job for job in ran.jobs if job.endswith((" reference", " oracle")) or job.startswith("cases")]

    ran = repository.run("traceproof", "diff", "previous", "latest")
    assert ran.code == 1, ran.out
    assert "rmsnorm_h96 small-0 sglang_native output: pass" in ran.out
    assert "rope" not in ran.out

    records = {path.name: path.read_bytes() for path in stacks.glob("*.json") if path.name != DEPENDENCIES}
    pin(repository, upstream, upstream.commit({"README.md": "other words"}))
    ran = repository.run("snakemake", "--cores", "1", f"results/stacks/sglang/{DEPENDENCIES}")
    assert "dependencies sglang" in ran.jobs, ran.out
    assert {name: (stacks / name).read_bytes() for name in records} == records

    forced = repository.dry("--config", "force=true").jobs
    assert {"actor rope sglang_native", "actor rope reference", "actor rmsnorm sglang_native"} <= set(forced)
