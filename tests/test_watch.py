"""examples/watch.sh over two bumps, one that breaks a kernel and one that mends it; runs are played, not run."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
from repository import ROOT, Ran, Repository

from traceproof.checkouts.packages import newest
from traceproof.errors import TraceproofError

# Stands in for traceproof: `verify` keeps the state that the test planned and ends as planned, the rest is real.
PROGRAM = """#!/bin/sh
if [ "$1" != verify ]; then exec {python} -m traceproof "$@"; fi
mkdir -p results/history
cp planned.json "results/history/$(cat planned.json | cksum | tr -d ' ').json"
exit "$(cat planned.code)"
"""
ROW = {"definition": "rmsnorm_h96", "op_type": "rmsnorm", "case": "small-0", "output": "output", "reason": None}


@pytest.fixture
def repository(tmp_path: Path) -> Repository:
    copy = Repository.copy(tmp_path)
    program = tmp_path / "bin" / "traceproof"
    program.parent.mkdir()
    program.write_text(PROGRAM.format(python=sys.executable))
    program.chmod(0o755)
    return copy


def watch(repository: Repository, *take: str, version: int = 0, verdict: str = "pass", code: int = 0) -> Ran:
    """A run as cron or CI starts it, in which `verify` gives one row, of one version of a package, and a code."""
    about = {"digest": f"{version}", "time": "", "stacks": {"sglang": {"sglang": f"{version}"}}}
    row = {**ROW, "implementation": "sglang_native", "verdict": verdict, "message": "", "whole": True}
    (repository.root / "planned.json").write_text(json.dumps(about | {"rows": [row]}))
    (repository.root / "planned.code").write_text(str(code))
    path = f"{repository.root / 'bin'}{os.pathsep}{os.environ['PATH']}"
    environment = repository.environment | {"PATH": path}
    return Ran.of(str(ROOT / "examples" / "watch.sh"), "watch", *take, cwd=repository.root, env=environment)


def test_what_a_release_broke_and_what_the_next_one_mended_is_said_once(repository: Repository) -> None:
    found = []
    for version, verdict in enumerate(("pass", "fail", "pass")):
        ran = watch(repository, "true", version=version, verdict=verdict, code=int(verdict == "fail"))
        difference = json.loads((repository.root / "watch" / "verdicts.json").read_text())
        page = (repository.root / "watch" / "verdicts.md").read_text()
        assert ran.code == difference["exit_code"], ran.out
        found.append((ran.code, bool(difference["failing"]), bool(difference["passing"])))
        assert ("rmsnorm_h96 small-0 sglang_native output: pass" in page) == (ran.code == 1), page
        assert ("No verdict differs." in page) == (version == 0), page
    assert found == [(0, False, False), (1, True, False), (0, False, True)]


@pytest.mark.parametrize(("take", "code"), [("false", 0), ("true", 2)])
def test_what_was_not_found_out_leaves_no_earlier_answer(repository: Repository, take: str, code: int) -> None:
    assert watch(repository, "true").code == 0
    ran = watch(repository, take, code=code)
    assert (ran.code, list((repository.root / "watch").glob("verdicts.*"))) == (2, [])


def test_the_newest_release_is_what_pips_indexes_offer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("tiny-0.9.tar.gz", "tiny-0.10.tar.gz", "tiny-1.0rc1.tar.gz"):
        (tmp_path / name).touch()
    for name, value in {"CONFIG_FILE": "/dev/null", "NO_INDEX": "1", "FIND_LINKS": str(tmp_path)}.items():
        monkeypatch.setenv(f"PIP_{name}", value)
    assert newest("tiny") == "0.10"
    with pytest.raises(TraceproofError, match="tell no newest version of another"):
        newest("another")
