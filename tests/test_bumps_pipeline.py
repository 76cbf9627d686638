"""A pin is bumped and verified through the rules; the ground truth is a tiny package under SGLang's name."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from repository import Repository, own_dataset
from source_remotes import Upstream
from test_bumps_bisect import BASE, REGRESSION

from traceproof.run.schema import read_rows

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


def computed(repository: Repository, op_type: str) -> dict[str, set[str | None]]:
    """By implementation, the environments that its rows were computed in."""
    rows = read_rows(repository.root / "results" / "verdicts" / f"{op_type}.jsonl")
    return {
        name: {row.digests.environment for row in rows if row.implementation == name}
        for name in ("reference", "sglang_native")
    }


def pin(repository: Repository, upstream: Upstream, commit: str) -> None:
    """Pin the stack at a commit."""
    ran = repository.run(
        "traceproof", "clone-repos", "sglang", "--url", f"sglang={upstream.url}", "--commit", f"sglang={commit}"
    )
    assert ran.code == 0, ran.out


def test_a_bump_runs_the_rows_of_its_environment_again_and_no_others(tmp_path: Path) -> None:
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
    pin(repository, upstream, first)
    ran = repository.verify()
    assert ran.code == 0, ran.out
    first_rows = {op_type: computed(repository, op_type) for op_type in ("rmsnorm", "rope")}

    pin(repository, upstream, upstream.commit({"python/sglang/srt/scale.py": REGRESSION}))
    ran = repository.verify()
    assert ran.code == 1, ran.out
    for op_type, before in first_rows.items():
        after = computed(repository, op_type)
        assert after["reference"] == before["reference"]
        assert not after["sglang_native"] & before["sglang_native"]

    ran = repository.run("traceproof", "diff", "previous", "latest")
    assert ran.code == 1, ran.out
    assert "rmsnorm_h96 small-0 sglang_native output: pass" in ran.out
    assert "rope" not in ran.out
