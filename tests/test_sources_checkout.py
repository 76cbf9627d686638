from __future__ import annotations

import random
from pathlib import Path

import pytest
from source_remotes import SOON, Upstream, git

from traceproof.checkouts.checkout import WantedCheckout, bring
from traceproof.checkouts.gitrun import Git
from traceproof.checkouts.pins import State
from traceproof.cli.sources import clone_repos
from traceproof.config import read_config
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
    assert clone(target, want(upstream, second)) is State.UPDATED
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


@pytest.mark.parametrize("own", ["file", "commit", "branch"])
def test_what_is_somebody_s_own_is_left_alone(tmp_path: Path, upstream: Upstream, own: str) -> None:
    first, second = fill(upstream, 1), fill(upstream, 2)
    target = tmp_path / "out"
    clone(target, want(upstream, first))
    if own == "branch":
        git(target, "branch", "mine")
    else:
        (target / "mine").write_text("mine")
    if own == "commit":
        git(target, "add", "mine")
        git(target, "commit", "--quiet", "-m", "mine")
    before = git(target, "rev-parse", "HEAD")
    with pytest.raises(TraceproofError, match="holds work of somebody's own; it is left alone"):
        clone(target, want(upstream, second))
    assert git(target, "rev-parse", "HEAD") == before
    assert own == "branch" or (target / "mine").read_text() == "mine"


@pytest.mark.parametrize("url", ["https://me:s3cret@example.org/x", "https://s3cret@example.org/x"])
def test_an_address_with_credentials_is_refused_and_not_shown(tmp_path: Path, url: str) -> None:
    with pytest.raises(TraceproofError, match="holds credentials") as caught:
        clone_repos(["fla"], target_dir=tmp_path / "s", lock=tmp_path / "sources.lock", url=[f"fla={url}"])
    assert "s3cret" not in str(caught.value)
    given = {"dataset": {"git": {"url": url, "commit": "1" * 40}}}
    with pytest.raises(TraceproofError, match="holds credentials") as caught:
        read_config(given, root=tmp_path)
    assert "s3cret" not in str(caught.value)
