"""Kept verdicts, their difference, and the commit that made it; a tiny package stands under SGLang's name."""

from __future__ import annotations

import json
import os
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import forked
import pytest
from packaging.version import Version
from pipeline import row as row_of
from repository import PROGRAMS, Ran, Repository
from ruamel.yaml import YAML
from source_remotes import Upstream

import replay_history
from replay_history import Bug, Found, NoReleaseError, Releases, Why, bugs, judged, parsed
from traceproof.bumps import Bisection, Diff, Kept, Scope, commits_between, diff, find, keep
from traceproof.checkouts.packages import newest
from traceproof.checkouts.pins import Pin
from traceproof.cli import main, run
from traceproof.cli.results import difference
from traceproof.digests import digest_file
from traceproof.errors import TraceproofError
from traceproof.reasons import Skip
from traceproof.run.schema import VerdictRow

PINS = {"fla": Pin(url="https://example.org/x", commit="1" * 40)}
STACKS = [{"stack": "fla", "digest": "d", "versions": {"fla-core": "0.5.0"}}]


def row(verdict: str = "pass", *, margin: float | None = 0.5, **changes: object) -> dict[str, Any]:
    """A verdict row."""
    reason = None if verdict == "pass" else "x"
    gate = {"kind": "close", "margin": margin}
    base = row_of(definition="a", op_type="gdn", implementation="fla", output="o", verdict=verdict)
    return {**base, "reason": reason, "gate": gate, **changes}


def state(digest: str, rows: Sequence[Mapping[str, Any]], version: str = "0.5.0") -> Kept:
    return Kept(digest, tuple(rows), {"stacks": {"fla": {"fla-core": version}}})


def compared(before: Sequence[Mapping[str, Any]], after: Sequence[Mapping[str, Any]]) -> Diff:
    return diff(state("1", before), state("2", after))


SKIP: dict[str, Any] = {"output": "*", "reason": "api_absent", "message": "module has no x"}


@pytest.mark.parametrize(
    ("before", "after", "kind", "worse"),
    [
        pytest.param([row()], [row("fail")], "failing", True, id="a pass fails"),
        pytest.param([row(output="p")], [row("error"), row(output="p")], "failing", True, id="a new row fails"),
        pytest.param([row("fail")], [row()], "passing", False, id="a failure passes"),
        pytest.param([row()], [row("skip", **SKIP)], "skipped", True, id="a pass is skipped"),
        pytest.param([row()], [row(margin=0.9)], None, False, id="a margin within noise"),
        pytest.param([row(margin=0.2)], [row(margin=0.9)], "moved", False, id="a margin that moved"),
        pytest.param([row(margin=0.001)], [row(margin=0.04)], None, False, id="margins of the last bits"),
        pytest.param([row(), row(output="p")], [row()], "vanished_rows", True, id="an output is gone"),
        pytest.param([row("fail")], [row("fail")], None, False, id="what failed fails"),
        pytest.param([row(definition="b")], [row()], None, False, id="another selection"),
        pytest.param([row(definition="b")], [row("fail")], None, False, id="a definition that was not run before"),
        pytest.param([row(case="small-1")], [row("fail")], None, False, id="a case that was not run before"),
        pytest.param([row(implementation="reference")], [row("fail")], None, False, id="a new implementation"),
    ],
)
def test_kind(before: list[dict[str, Any]], after: list[dict[str, Any]], kind: str | None, *, worse: bool) -> None:
    found = compared(before, after)
    kinds = ("failing", "passing", "skipped", "moved", "vanished_rows")
    assert {name for name in kinds if getattr(found, name)} == ({kind} if kind else set())
    assert found.worse is worse


def test_apis_that_go_and_come_are_named() -> None:
    gone = compared([row()], [row("skip", **SKIP)])
    assert gone.vanished_apis == ["fla: module has no x"]
    assert compared([row("skip", **SKIP)], [row()]).new_apis == ["fla: module has no x"]


def test_a_verdict_that_changed_with_its_package_names_both_versions() -> None:
    was, now = row("fail", margin=None), row(margin=None)
    fixed = diff(state("1", [was], "0.5.0"), state("2", [now], "0.6.0"))
    broken = diff(state("1", [now], "0.5.0"), state("2", [was], "0.6.0"))
    assert fixed.as_json()["passing"][0]["between"] == "fixed between fla-core 0.5.0 and 0.6.0"
    assert broken.as_json()["failing"][0]["between"] == "broken between fla-core 0.5.0 and 0.6.0"
    lines = difference(fixed, limit=1)
    assert "  fla: fla-core 0.5.0 -> 0.6.0" in lines
    assert "  a small-0 fla o: fail (x) -> pass; fixed between fla-core 0.5.0 and 0.6.0" in lines


def test_no_version_is_named_where_none_changed_or_the_row_was_not_there() -> None:
    assert not compared([row("fail")], [row()]).as_json()["passing"][0]["between"]
    appeared = diff(state("1", [row(output="p")], "0.5.0"), state("2", [row("fail")], "0.6.0"))
    assert not appeared.as_json()["failing"][0]["between"]
    of_torch = diff(
        state("1", [row(implementation="reference")]),
        state("2", [row("fail", implementation="reference")], "0.6.0"),
    )
    assert not of_torch.as_json()["failing"][0]["between"]


def verdicts(folder: Path, *rows: Mapping[str, Any]) -> dict[Path, str]:
    path = folder / "gdn.jsonl"
    path.write_text("".join(json.dumps(one) + "\n" for one in rows))
    return {path: digest_file(path)}


def test_runs_of_other_op_types_in_one_state_are_one_state(tmp_path: Path) -> None:
    """A run has the environments of its own op_types alone; without a bump there is nothing to compare."""
    history = tmp_path / "history"
    torch = {"stack": "torch", "digest": "t", "versions": {"torch": "2.13.0"}}
    sglang = {"stack": "sglang", "digest": "s", "versions": {"sglang": "0.5.23"}}
    first = keep(history, verdicts(tmp_path, row()), [torch, *STACKS], PINS)
    assert keep(history, verdicts(tmp_path, row("fail", definition="b")), [torch, sglang], PINS) == first
    assert keep(history, verdicts(tmp_path, row(definition="c")), [torch], PINS) == first
    state = find(history, "latest")
    assert [one["definition"] for one in state.rows] == ["a", "b", "c"]
    assert set(state.about["stacks"]) == {"fla", "sglang", "torch"}
    with pytest.raises(TraceproofError, match=f"nothing to compare: one state is kept, {first}"):
        find(history, "previous")
    bumped = keep(history, verdicts(tmp_path, row("fail")), [torch, {**STACKS[0], "digest": "e"}], PINS)
    pinned = keep(
        history,
        verdicts(tmp_path, row()),
        [torch],
        {**PINS, "fla": PINS["fla"].model_copy(update={"commit": "2" * 40})},
    )
    assert len({first, bumped, pinned}) == 3
    assert len(diff(find(history, first), find(history, bumped)).failing) == 1
    again = keep(history, verdicts(tmp_path, row()), [torch, *STACKS], PINS)
    assert again == first  # the bump was taken back


def test_without_a_bump_nothing_is_newly_failing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = run.configured()[1].model_copy(update={"results": Path("results")})
    monkeypatch.setattr(run, "configured", lambda: (tmp_path, config))
    history = tmp_path / "results" / "history"
    flashinfer = {"stack": "flashinfer", "digest": "f", "versions": {"flashinfer-python": "0.7.2"}}
    keep(history, verdicts(tmp_path, row()), STACKS, PINS, FULL)
    keep(history, verdicts(tmp_path, row(), row("fail", definition="b")), [*STACKS, flashinfer], PINS, FULL)
    with pytest.raises(SystemExit) as caught:
        main(["diff"])
    said = capsys.readouterr()
    assert caught.value.code == 0
    assert "0 newly failing" in said.out
    assert "one state is kept" in said.err


FULL = Scope(dataset="ours")
CASE = Scope(dataset="ours", whole=False)
OTHER = Scope(dataset="other")


def test_a_kept_state_that_is_damaged_ends_no_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    digest = keep(tmp_path / "history", verdicts(tmp_path, row()), STACKS, PINS)
    (tmp_path / "history" / f"{digest}.json").write_text("", encoding="utf-8")
    assert keep(tmp_path / "history", verdicts(tmp_path, row("fail")), STACKS, PINS) == digest
    said = capsys.readouterr().err
    assert f"what was kept of earlier runs in {tmp_path / 'history' / f'{digest}.json'} is lost: " in said
    assert [kept["verdict"] for kept in find(tmp_path / "history", digest).rows] == ["fail"]


def kept(folder: Path, runs: Sequence[tuple[Scope, Sequence[Mapping[str, Any]]]], digest: str = "d") -> Kept:
    """A state after some runs."""
    stacks = [{**STACKS[0], "digest": digest}]
    name = [keep(folder / "history", verdicts(folder, *rows), stacks, PINS, scope) for scope, rows in runs][-1]
    return find(folder / "history", name)


def test_cases_that_were_not_run_again_are_not_gone(tmp_path: Path) -> None:
    cases = [row(case=case, size="small", seed=0) for case in ("small-0", "small-1")]
    before = kept(tmp_path, [(FULL, cases)])
    after = kept(tmp_path, [(CASE, cases[:1])], digest="e")
    assert not diff(before, after).worse
    gone = kept(tmp_path, [(FULL, cases[:1])], digest="f")
    assert [was["case"] for was, _ in diff(before, gone).vanished_rows] == ["small-1"]


def test_a_part_of_the_cases_replaces_itself_alone(tmp_path: Path) -> None:
    cases = [row(case=case, size="small", seed=0) for case in ("small-0", "small-1")]
    sizes = [row(case="medium-0", size="medium", seed=0)]
    failing = [row("fail", case="small-0", size="small", seed=0)]
    state = kept(tmp_path, [(FULL, [*cases, *sizes]), (CASE, failing)])
    assert sorted((one["case"], one["verdict"]) for one in state.rows) == [
        ("medium-0", "pass"),
        ("small-0", "fail"),
        ("small-1", "pass"),
    ]
    smaller = kept(tmp_path, [(FULL, cases[:1])])
    assert sorted(one["case"] for one in smaller.rows) == ["medium-0", "small-0"]
    other_seed = kept(tmp_path, [(FULL, [row(case="small-0", size="small", seed=7)])])
    assert sorted(one["case"] for one in other_seed.rows) == ["medium-0", "small-0", "small-0"]


def test_a_file_that_the_last_run_kept_is_left_and_one_that_another_run_covered_is_not(tmp_path: Path) -> None:
    mine = {name: tmp_path / f"{name}.jsonl" for name in "ab"}
    for name, path in mine.items():
        path.write_text(json.dumps(row(definition=name, size="small")) + "\n")

    def run(*paths: Path) -> dict[str, str]:
        keep(tmp_path / "history", {path: digest_file(path) for path in paths}, STACKS, PINS)
        return {one["definition"]: one["verdict"] for one in find(tmp_path / "history", "latest").rows}

    assert run(*mine.values()) == {"a": "pass", "b": "pass"}
    mine["b"].write_text(json.dumps(row("fail", definition="b", size="small")) + "\n")
    assert run(*mine.values()) == {"a": "pass", "b": "fail"}
    other = tmp_path / "other.jsonl"
    other.write_text(json.dumps(row("fail", definition="a", size="small")) + "\n")
    assert run(other) == {"a": "fail", "b": "fail"}
    assert run(*mine.values()) == {"a": "pass", "b": "fail"}


def test_a_namesake_of_another_dataset_is_another_definition(tmp_path: Path) -> None:
    ours = row(size="small", seed=0, digests={"definition": "1"})
    namesake = row("fail", size="small", seed=0, digests={"definition": "2"})
    before = kept(tmp_path, [(FULL, [ours])])
    beside = kept(tmp_path, [(FULL, [ours]), (OTHER, [namesake])], digest="e")
    assert {one["verdict"] for one in beside.rows} == {"pass", "fail"}
    assert not diff(before, beside).worse
    assert not diff(before, kept(tmp_path, [(OTHER, [namesake])], digest="f")).worse


def test_the_same_text_is_the_same_definition_in_any_dataset_and_an_edited_one_in_its_own(tmp_path: Path) -> None:
    ours = row(size="small", seed=0, digests={"definition": "1"})
    before = kept(tmp_path, [(FULL, [ours])])
    moved = kept(tmp_path, [(OTHER, [{**ours, "verdict": "fail"}])], digest="e")
    assert len(diff(before, moved).failing) == 1
    edited = kept(
        tmp_path, [(FULL, [ours]), (FULL, [row("fail", size="small", seed=0, digests={"definition": "2"})])]
    )
    assert [one["verdict"] for one in edited.rows] == ["fail"]
    assert len(diff(before, edited).failing) == 1


ROOT = Path(__file__).resolve().parents[1]
NORM = """
import torch

from sglang.srt.scale import scaled


class RMSNorm:
    def __init__(self, size, eps):
        self.eps = eps

    def forward_native(self, x, residual=None):
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return scaled(wide, self.weight.float()).to(x.dtype)
"""
SCALE = "def scaled(x, weight):\n    return x * weight\n"
BASE: dict[str, str | bytes | None] = {
    "python/sglang/__init__.py": "__version__ = '1.0'\n",
    "python/sglang/srt/__init__.py": "",
    "python/sglang/srt/layers/__init__.py": "",
    "python/sglang/srt/layers/layernorm.py": NORM,
    "python/sglang/srt/scale.py": SCALE,
    "python/sglang/srt/router.py": "def route():\n    return 1\n",
    "python/sglang/srt/runtime_context.py": "def publish_role():\n    return 'there already'\n",
    "python/sglang-1.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: sglang\nVersion: 1.0\n",
    "README.md": "one",
}
REGRESSION = "def scaled(x, weight):\n    return x * weight * 1.02\n"


@pytest.fixture
def upstream(tmp_path: Path) -> Upstream:
    upstream = Upstream(tmp_path / "sglang")
    upstream.commit(BASE, "start")
    upstream.git("tag", "good")
    return upstream


def clone_of_traceproof(folder: Path, *stacks: str) -> Path:
    """A clone as it is laid out, with results of its own, whose stacks are this interpreter's, forked."""
    folder.mkdir()
    for name in ("src", "scripts", "Snakefile", "envs"):
        (folder / name).symlink_to(ROOT / name)
    config = {
        "dataset": {"path": str(ROOT / "tests" / "dataset")},
        "stacks": {name: {"python": forked.interpreter()} for name in stacks},
        "test_sizes": ["small"],
    }
    (folder / "config.yaml").write_text(json.dumps(config))
    return folder


def history(upstream: Upstream) -> str:
    """Nine commits after `good`; the one that breaks the norm."""
    upstream.commit({"README.md": "two"}, "Say more")
    upstream.commit({"python/sglang/srt/router.py": "def route():\n    return 2\n"}, "Route otherwise")
    upstream.commit({"python/sglang/srt/scale.py": "# scales\n" + SCALE}, "Comment")
    upstream.commit({"python/sglang/srt/scale.py": SCALE.replace("x * weight", "weight * x")}, "Swap factors")
    upstream.commit({"python/sglang/__init__.py": "__version__ = '1.1'\n"}, "Release")
    broken = upstream.commit({"python/sglang/srt/scale.py": REGRESSION}, "Scale faster")
    upstream.commit({"python/sglang/srt/extra.py": "x = 1\n"}, "Add a module")
    upstream.commit({"python/sglang/srt/scale.py": REGRESSION.replace("x * weight", "weight * x")}, "Swap back")
    upstream.commit({"README.md": "three"}, "Say even more")
    return broken


@pytest.mark.slow
def test_a_planted_regression_shows(tmp_path: Path, upstream: Upstream, monkeypatch: pytest.MonkeyPatch) -> None:
    upstream.commit({"README.md": "two"}, "Say more")
    broken = upstream.commit({"python/sglang/srt/scale.py": REGRESSION}, "Scale faster")
    monkeypatch.chdir(clone_of_traceproof(tmp_path / "repository", "torch", "sglang", "flashinfer", "fla"))
    answer = tmp_path / "answer.json"
    arguments = ["--definition", "rmsnorm_h96", "--good", "good", "--bad", "main"]
    with pytest.raises(SystemExit) as ended:
        main(["bisect", *arguments, "--repository", str(upstream.folder), "--json", str(answer)])
    assert ended.value.code == 0
    found = json.loads(answer.read_text())
    assert found["commit"] == broken
    assert (found["before"], found["after"]) == ("pass", "fail")
    assert (found["commits"], found["touching"], found["tried"]) == (2, 1, 2)
    assert found["parts"] == ["python/sglang/srt/scale.py"]
    assert "checkout" not in upstream.git("worktree", "list")


@pytest.mark.parametrize(("folder", "said"), [("python", "it is a folder of the repository"), ("none", "no such")])
def test_a_folder_inside_a_repository_is_not_taken_for_it(
    folder: str, said: str, upstream: Upstream, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    arguments = ["--definition", "rmsnorm_h96", "--dataset", str(ROOT / "tests" / "dataset"), "--good", "good"]
    with pytest.raises(SystemExit) as ended:
        main(["bisect", *arguments, "--bad", "main", "--repository", str(upstream.folder / folder)])
    assert ended.value.code == 2
    told = capsys.readouterr().err
    assert said in told
    assert "git clone URL FOLDER" in told


def search(upstream: Upstream, verdicts: dict[str, str], said: list[str] | None = None) -> Any:  # noqa: ANN401
    """Bisect with verdicts by what `scaled` says."""

    def judge(commit: str) -> dict[str, Any]:
        text = upstream.git("show", f"{commit}:python/sglang/srt/scale.py")
        return {"verdict": next(verdict for part, verdict in verdicts.items() if part in text)}

    log: list[str] = [] if said is None else said
    return Bisection(upstream.folder, "sglang", "rmsnorm", judge, log.append).search("good", "main")


def test_commits_that_leave_the_package_as_it_is_are_not_run(upstream: Upstream) -> None:
    broken = history(upstream)
    said: list[str] = []
    found = search(upstream, {"1.02": "fail", "": "pass"}, said)
    assert found.commit == broken
    assert said[0] == "9 commits, 7 of them touch the package of sglang"
    assert found.tried == 5


def test_a_commit_that_can_not_be_judged_is_named(upstream: Upstream) -> None:
    upstream.commit({"python/sglang/srt/scale.py": "boom = 1\n"}, "Break everything")
    doubtful = upstream.git("rev-parse", "HEAD")
    broken = upstream.commit({"python/sglang/srt/scale.py": REGRESSION}, "Scale faster")
    found = search(upstream, {"1.02": "fail", "boom": "error", "": "pass"})
    assert (found.commit, found.doubtful) == (broken, (doubtful,))


def test_ends_that_do_not_differ_are_refused(upstream: Upstream) -> None:
    upstream.commit({"README.md": "two"})
    with pytest.raises(TraceproofError, match="no commit between good and main touches"):
        search(upstream, {"": "pass"})
    upstream.commit({"python/sglang/srt/scale.py": REGRESSION})
    with pytest.raises(TraceproofError, match="the verdict is 'pass' at both ends"):
        search(upstream, {"": "pass"})


def test_the_good_end_has_to_come_first(upstream: Upstream) -> None:
    history(upstream)
    with pytest.raises(TraceproofError, match="does not come before"):
        commits_between(upstream.folder, "main", "good")
    with pytest.raises(TraceproofError, match="it has no such commit"):
        commits_between(upstream.folder, "god", "main")


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
    program.write_text(PROGRAM.format(python=forked.interpreter(PROGRAMS)))
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


FILE = """
title: The norm is too large
kind: scale
op_type: rmsnorm
package: sglang
last_bad: "1.1"
first_good: "1.2"
hardware: cpu
shows: wrong
cases: regular
needs: any row
definitions: [rmsnorm_*]
evidence: {sglang/srt/layers/layernorm.py: a factor is gone}
"""


def bug(**changes: Any) -> Bug:  # noqa: ANN401 - fields
    return parsed("planted", YAML(typ="safe").load(FILE)).model_copy(update=changes)


def test_every_bug_of_the_catalogue_can_be_read() -> None:
    assert len(bugs()) >= 33
    assert {one.kind for one in bugs().values()} >= {"address", "mask", "layout", "race"}


def verdict_row(case: str, verdict: str, **more: Any) -> VerdictRow:  # noqa: ANN401 - fields
    values = {"definition": "d", "op_type": "rmsnorm", "case": case, "implementation": "x", "output": "output"}
    return VerdictRow.model_validate({**values, "verdict": verdict, **more})


CRASH = verdict_row("a", "error", reason="crash", output="*")
REFUSED = verdict_row("a", "error", reason="exception", message="unexpected keyword")
SKIPPED = verdict_row("a", "skip", reason="no_cuda", message="needs a CUDA device")
PASS, FAIL = verdict_row("a", "pass"), verdict_row("a", "fail")
BOTH = [PASS, verdict_row("b", "pass")]


@pytest.mark.parametrize(
    ("what", "before", "after", "found", "reason"),
    [
        pytest.param({}, [FAIL, BOTH[1]], BOTH, Found.CAUGHT, None, id="fails with the bug alone"),
        pytest.param({}, [PASS], [PASS], Found.MISSED, None, id="passes on both"),
        pytest.param({}, [REFUSED], [PASS], Found.NOT_HERE, Why.NOT_RUN, id="the old release refuses the call"),
        pytest.param({"shows": "error"}, [CRASH], [PASS], Found.CAUGHT, None, id="a bug that crashes"),
        pytest.param({"kind": "address"}, [CRASH, BOTH[1]], BOTH, Found.CAUGHT, None, id="an address"),
        pytest.param({}, [CRASH, BOTH[1]], BOTH, Found.MISSED, None, id="a crash of another bug"),
        pytest.param({"shown_by": ("b",)}, [FAIL, BOTH[1]], BOTH, Found.MISSED, None, id="in another case"),
        pytest.param({}, [SKIPPED], [SKIPPED], Found.NOT_HERE, Skip.NO_CUDA, id="skipped"),
    ],
)
def test_a_bug_is_caught_where_a_case_that_shows_it_fails_with_it_and_passes_without_it(
    what: dict[str, Any], before: list[VerdictRow], after: list[VerdictRow], found: Found, reason: object
) -> None:
    outcome = judged(bug(**what), before, after)
    assert (outcome.found, outcome.reason) == (found, reason)
    assert outcome.finding is (found is Found.MISSED)


def test_a_release_without_the_bug_that_fails_is_an_alarm() -> None:
    found = judged(bug(), [FAIL], [FAIL, verdict_row("b", "pass")])
    assert (found.found, found.alarms, found.finding) == (Found.MISSED, ("d a x output",), True)


def wheel(folder: Path, version: str, *, factor: str) -> None:
    """A released package of which only the norm is there."""
    folder.mkdir(exist_ok=True)
    with zipfile.ZipFile(folder / f"sglang-{version}-py3-none-any.whl", "w") as archive:
        for name, text in BASE.items():
            path = name.removeprefix("python/").replace("1.0", version)
            archive.writestr(
                path, str(text).replace("1.0", version).replace("x * weight", f"x * weight * {factor}")
            )
        archive.writestr(f"sglang-{version}.dist-info/WHEEL", "Wheel-Version: 1.0\n")


def test_the_releases_nearest_the_fix_are_taken_from_a_folder(tmp_path: Path) -> None:
    for version in ("0.9", "1.0", "1.1", "1.2", "1.3"):
        wheel(tmp_path / "wheels", version, factor="1")
    releases = Releases(tmp_path / "releases", tmp_path / "wheels")
    assert releases.pair(bug(since="1.0"), None) == ("1.1", "1.2")
    assert releases.pair(bug(since="0.9", last_bad="1.0", first_good="1.3"), None) == ("1.0", "1.3")
    assert releases.pair(bug(last_bad="1.3", first_good="1.4"), "1.5") == ("1.3", None)
    with pytest.raises(NoReleaseError, match=r"from 1\.4 on, nor is one installed"):
        releases.pair(bug(last_bad="1.3", first_good="1.4"), "1.3")
    with pytest.raises(NoReleaseError, match="pip download"):
        releases.pair(bug(last_bad="0.8", first_good="0.9"), None)


@pytest.fixture
def ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A clone of traceproof with results of its own, with one bug in its catalogue."""
    folder = clone_of_traceproof(tmp_path / "repository", "torch", "sglang")
    monkeypatch.chdir(folder)
    monkeypatch.setattr(replay_history, "bugs", lambda: {"planted": bug()})
    return folder


def replay(folder: Path, *arguments: str) -> tuple[int, dict[str, Any]]:
    answer = folder / "answer.json"
    return replay_history.main(["--json", str(answer), *arguments]), json.loads(answer.read_text())


@pytest.mark.slow
def test_a_planted_bug_is_caught_between_its_releases_and_one_that_no_case_shows_is_a_miss_and_a_finding(
    ours: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    planted = {"planted": bug(), "unseen": bug(id="unseen", shown_by=("edge-empty",))}
    monkeypatch.setattr(replay_history, "bugs", lambda: planted)
    wheels = ours / "wheels"
    for version in ("1.1", "1.2"):
        wheel(wheels, version, factor="1.02" if Version(version) < Version("1.2") else "1")
    code, found = replay(ours, "--packages", str(wheels))
    outcome, unseen = found["outcomes"]
    assert (outcome["found"], outcome["bad"], outcome["good"], outcome["alarms"]) == ("caught", "1.1", "1.2", [])
    assert outcome["flips"]
    assert (unseen["found"], unseen["flips"], code) == ("missed", [], 1)
    replays = ours / "results" / "replays"
    ended = json.loads((replays / "outcomes" / f"{outcome['bug']}.json").read_text())
    assert ended["flips"] == outcome["flips"]
    kept = json.loads((replays / "replay.json").read_text())
    assert kept["outcomes"][0]["flips"] == outcome["flips"]
