"""A tiny package under SGLang's name is the ground truth, so that no GPU is needed."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from source_remotes import Upstream

from traceproof.bumps.bisect import Bisection, commits_between
from traceproof.cli import main
from traceproof.errors import TraceproofError

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
    """A clone as it is laid out, with results of its own, whose stacks are this interpreter's."""
    folder.mkdir()
    for name in ("src", "scripts", "Snakefile", "envs"):
        (folder / name).symlink_to(ROOT / name)
    config = {
        "dataset": {"path": str(ROOT / "tests" / "dataset")},
        "stacks": {name: {"python": sys.executable} for name in stacks},
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
def test_the_planted_regression_is_found_by_running_it(
    tmp_path: Path, upstream: Upstream, monkeypatch: pytest.MonkeyPatch
) -> None:
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
