"""examples/watch.sh over two bumps, one that breaks a kernel and one that mends it, of a tiny package."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from repository import ROOT, Ran, Repository, own_dataset
from source_remotes import Upstream
from test_bumps_bisect import BASE, REGRESSION

from traceproof.checkouts.packages import newest
from traceproof.errors import TraceproofError

SCALE = str(BASE["python/sglang/srt/scale.py"])


def watch(repository: Repository, *take: str) -> Ran:
    """A run as cron or CI starts it."""
    path = f"{repository.root / 'bin'}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        [str(ROOT / "examples" / "watch.sh"), "watch", *take],
        cwd=repository.root,
        env=repository.environment | {"PATH": path},
        check=False,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    return Ran(done.returncode, done.stdout)


@pytest.mark.slow
def test_what_a_release_broke_and_what_the_next_one_mended_is_said_once(tmp_path: Path) -> None:
    upstream, here = Upstream(tmp_path / "upstream"), {"python": sys.executable}
    upstream.commit(BASE)
    for folder in ("repository", "repository/bin"):
        (tmp_path / folder).mkdir()
    repository = Repository.copy(
        tmp_path / "repository",
        dataset={"path": str(own_dataset(tmp_path / "dataset", "rmsnorm/rmsnorm_h96"))},
        truths=["sglang_native"],
        stacks={"torch": here, "flashinfer": here, "fla": here, "sglang": here | {"source": "locked"}},
    )
    program = repository.root / "bin" / "traceproof"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m traceproof "$@"\n')
    program.chmod(0o755)
    take, found, told = ("traceproof", "clone-repos", "sglang", "--branch", "sglang=main"), [], ""
    for scale in (None, REGRESSION, SCALE):
        if scale is not None:
            upstream.commit({"python/sglang/srt/scale.py": scale})
        ran = watch(repository, *take, "--url", f"sglang={upstream.url}")
        assert ran.code in {0, 1}, ran.out
        difference = json.loads((repository.root / "watch" / "verdicts.json").read_text())
        page = (repository.root / "watch" / "verdicts.md").read_text()
        assert ran.code == difference["exit_code"], ran.out
        found.append((ran.code, bool(difference["failing"]), bool(difference["passing"])))
        told += f"{ran.out}\n{page}\n"
        assert ("rmsnorm_h96 small-0 sglang_native output: pass" in page) == (ran.code == 1), page
    assert found == [(0, False, False), (1, True, False), (0, False, True)], told
    ran = watch(repository, "false")
    assert (ran.code, list((repository.root / "watch").glob("verdicts.*"))) == (2, [])


def test_the_newest_release_is_what_pips_indexes_offer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("tiny-0.9.tar.gz", "tiny-0.10.tar.gz", "tiny-1.0rc1.tar.gz"):
        (tmp_path / name).touch()
    for name, value in {"CONFIG_FILE": "/dev/null", "NO_INDEX": "1", "FIND_LINKS": str(tmp_path)}.items():
        monkeypatch.setenv(f"PIP_{name}", value)
    assert newest("tiny") == "0.10"
    with pytest.raises(TraceproofError, match="tell no newest version of another"):
        newest("another")
