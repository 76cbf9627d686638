from __future__ import annotations

import random
import subprocess
from pathlib import Path

import pytest
from source_remotes import SOON, Upstream, git

from traceproof.checkouts.checkout import WantedCheckout, bring
from traceproof.checkouts.gitrun import Git
from traceproof.checkouts.pins import State
from traceproof.cli.sources import clone_repos
from traceproof.config import read_config
from traceproof.dataset.fetch import Dataset
from traceproof.dataset.fetch import fetch as fetch_dataset
from traceproof.errors import TraceproofError


@pytest.fixture
def upstream(tmp_path: Path) -> Upstream:
    return Upstream(tmp_path / "upstream")


def fill(upstream: Upstream, seed: int = 0) -> str:
    rng = random.Random(seed)  # noqa: S311 - content, no secret
    files: dict[str, str | bytes | None] = {f"package/file{i}.py": f"# {rng.random()}\n" * 50 for i in range(40)}
    return upstream.commit({**files, "docs/long.bin": rng.randbytes(300_000)})


def want(upstream: Upstream, commit: str, **options: tuple[str, ...]) -> WantedCheckout:
    return WantedCheckout(url=upstream.url, commit=commit, **options)  # type: ignore[arg-type]


def clone(target: Path, wanted: WantedCheckout) -> State:
    return bring(target, wanted, Git(target, SOON))


def same(target: Path, upstream: Upstream, commit: str) -> bool:
    """Whether the folder holds exactly the commit's files, compared by content and not by git's own records."""
    listed = upstream.git("ls-tree", "-r", "--name-only", commit).splitlines()
    found = sorted(str(p.relative_to(target)) for p in target.rglob("*") if p.is_file() and ".git" not in p.parts)
    if found != sorted(listed):
        return False
    hashes = upstream.git("ls-tree", "-r", "--format=%(objectname)", commit).splitlines()
    return git(target, "hash-object", "--no-filters", *listed).splitlines() == hashes


def test_a_clone_is_one_commit_without_history(tmp_path: Path, upstream: Upstream) -> None:
    upstream.commit({"a": "1"})
    commit = fill(upstream)
    upstream.commit({"a": "3"})
    target = tmp_path / "out"
    assert clone(target, want(upstream, commit)) is State.CLONED
    assert same(target, upstream, commit)
    assert git(target, "rev-list", "--count", "HEAD") == "1"
    assert [path.name for path in target.parent.iterdir() if "cloning" in path.name] == []


def test_only_the_wanted_folders_are_brought(tmp_path: Path, upstream: Upstream) -> None:
    commit = fill(upstream)
    target = tmp_path / "out"
    clone(target, want(upstream, commit, folders=("package",)))
    assert (target / "package" / "file0.py").is_file()
    assert not (target / "docs").exists()
    packed = sum(path.stat().st_size for path in (target / ".git").rglob("*.pack"))
    assert packed < 100_000  # docs/long.bin alone has 300 kB that nothing compresses


def test_submodules_are_brought_with_their_files(
    tmp_path: Path, upstream: Upstream, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GIT_CONFIG_COUNT", "1")
    monkeypatch.setenv("GIT_CONFIG_KEY_0", "protocol.file.allow")
    monkeypatch.setenv("GIT_CONFIG_VALUE_0", "always")
    library = Upstream(tmp_path / "library")
    library.commit({"include/x.h": "// x"})
    git(upstream.folder, "-c", "protocol.file.allow=always", "submodule", "--quiet", "add", library.url, "3rd/x")
    commit = upstream.commit({"a": "1"})
    target = tmp_path / "out"
    clone(target, want(upstream, commit, submodules=("3rd/x", "3rd/of-another-commit")))
    assert (target / "3rd" / "x" / "include" / "x.h").read_text() == "// x"


def test_an_existing_checkout_is_updated(tmp_path: Path, upstream: Upstream) -> None:
    first, second = fill(upstream, 1), fill(upstream, 2)
    target = tmp_path / "out"
    clone(target, want(upstream, first))
    (target / "mine.txt").write_text("untracked")
    assert clone(target, want(upstream, second)) is State.UPDATED
    assert (target / "mine.txt").read_text() == "untracked"
    (target / "mine.txt").unlink()
    assert same(target, upstream, second)
    assert clone(target, want(upstream, second)) is State.PRESENT


def test_local_changes_are_never_reset(tmp_path: Path, upstream: Upstream) -> None:
    first, second = fill(upstream, 1), fill(upstream, 2)
    target = tmp_path / "out"
    clone(target, want(upstream, first))
    edited = target / "package" / "file3.py"
    edited.write_text("mine")
    for commit in (first, second):
        with pytest.raises(TraceproofError, match=r"(?s)local changes; they are left alone.*package/file3\.py"):
            clone(target, want(upstream, commit))
    assert edited.read_text() == "mine"


def test_untracked_files_in_the_way_are_left_alone(tmp_path: Path, upstream: Upstream) -> None:
    first = upstream.commit({"a": "1"})
    second = upstream.commit({"b": "theirs"})
    target = tmp_path / "out"
    clone(target, want(upstream, first))
    (target / "b").write_text("mine")
    with pytest.raises(TraceproofError, match="files of its own"):
        clone(target, want(upstream, second))
    assert (target / "b").read_text() == "mine"
    (target / "b").unlink()
    assert clone(target, want(upstream, second)) is State.UPDATED


def test_a_commit_that_no_branch_holds_is_not_left_behind(tmp_path: Path, upstream: Upstream) -> None:
    first, second = fill(upstream, 1), fill(upstream, 2)
    target = tmp_path / "out"
    clone(target, want(upstream, first))
    (target / "a").write_text("mine")
    git(target, "add", "a")
    git(target, "commit", "--quiet", "-m", "mine")
    with pytest.raises(TraceproofError, match="no branch holds"):
        clone(target, want(upstream, second))
    git(target, "branch", "mine")
    assert clone(target, want(upstream, second)) is State.UPDATED


def bomb(upstream: Upstream) -> str:
    """A commit of a million files in six trees and one blob."""
    upstream.commit({"file": "x"})
    inner = f"100644 blob {upstream.git('rev-parse', 'HEAD:file')}"
    for _ in range(6):
        lines = "".join(f"{inner}\t{name}\n" for name in "abcdefghij")
        command = ["git", "mktree"]
        done = subprocess.run(
            command, cwd=upstream.folder, input=lines, check=True, text=True, capture_output=True
        )
        inner = f"040000 tree {done.stdout.strip()}"
    return upstream.git("commit-tree", "-m", "bomb", inner.split()[-1])


def test_a_commit_of_a_million_files_is_refused_before_one_is_written(tmp_path: Path) -> None:
    upstream = Upstream(tmp_path / "upstream")
    commit = bomb(upstream)
    upstream.git("update-ref", "refs/heads/main", commit)
    wanted = WantedCheckout(url=upstream.url, commit=commit)
    target = tmp_path / "sources" / "x"
    with pytest.raises(TraceproofError, match="has more than 500000 files") as caught:
        bring(target, wanted, Git(target, SOON))
    assert "lock" not in str(caught.value)
    assert not target.exists()
    assert [path.name for path in target.parent.iterdir() if "cloning" in path.name] == []
    dataset = Dataset.model_validate({"git": {"url": upstream.url, "commit": commit}})
    with pytest.raises(TraceproofError, match="has more than 500000 files"):
        fetch_dataset(dataset, root=tmp_path / "dataset")
    assert not list((tmp_path / "dataset").iterdir())


def test_an_existing_checkout_is_not_moved_to_such_a_commit(tmp_path: Path) -> None:
    upstream = Upstream(tmp_path / "upstream")
    good = upstream.commit({"a": "1"})
    target = tmp_path / "x"
    bring(target, WantedCheckout(url=upstream.url, commit=good), Git(target, SOON))
    commit = bomb(upstream)
    upstream.git("update-ref", "refs/heads/other", commit)
    with pytest.raises(TraceproofError, match="has more than 500000 files"):
        bring(target, WantedCheckout(url=upstream.url, commit=commit), Git(target, SOON))
    assert (target / "a").read_text() == "1"
    assert upstream.git("-C", str(target), "rev-parse", "HEAD") == good


@pytest.mark.parametrize("url", ["https://me:s3cret@example.org/x", "https://s3cret@example.org/x"])
def test_an_address_with_credentials_is_refused_and_not_shown(tmp_path: Path, url: str) -> None:
    with pytest.raises(TraceproofError, match="holds credentials") as caught:
        clone_repos(["fla"], target_dir=tmp_path / "s", lock=tmp_path / "sources.lock", url=[f"fla={url}"])
    assert "s3cret" not in str(caught.value)
    given = {"dataset": {"git": {"url": url, "commit": "1" * 40}}}
    with pytest.raises(TraceproofError, match="holds credentials") as caught:
        read_config(given, root=tmp_path)
    assert "s3cret" not in str(caught.value)
