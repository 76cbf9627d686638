"""Against a plain git remote: a branch of the bundle's own, brought up to date, and nothing else touched."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
from hub_repository import Repository
from publish_support import of_alpha, path_of, with_piece

from traceproof.errors import TraceproofError
from traceproof.publish.prepare import Prepared
from traceproof.publish.push import Remote

BRANCH = "traceproof/definition-alpha"


@pytest.fixture(autouse=True)
def person(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who commits, on a machine whose git was told nothing."""
    for what in ("AUTHOR", "COMMITTER"):
        monkeypatch.setenv(f"GIT_{what}_NAME", "somebody")
        monkeypatch.setenv(f"GIT_{what}_EMAIL", "somebody@example.org")


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Prepared:
    return of_alpha(tmp_path_factory.mktemp("publish"), "alpha")


@pytest.fixture
def remote(tmp_path: Path, prepared: Prepared) -> Repository:
    found = Repository(tmp_path / "remote")
    found.seed(prepared.source.dataset)
    return found


def push(remote: Repository, prepared: Prepared) -> bool:
    target = Remote(f"file://{remote.git_dir}")
    return target.push(prepared.bundle, prepared.describe, allow_changes=False).committed


def test_the_bundle_is_a_branch_byte_for_byte(remote: Repository, prepared: Prepared) -> None:
    main = remote.head("main")
    assert push(remote, prepared)
    for piece in prepared.bundle.pieces:
        assert remote.git("cat-file", "blob", f"{BRANCH}:{piece.path}") == piece.data
    assert remote.head("main") == main
    assert remote.git("rev-list", f"main..{BRANCH}").count(b"\n") == 1


def test_a_second_push_commits_nothing(remote: Repository, prepared: Prepared) -> None:
    assert push(remote, prepared)
    tip = remote.head(BRANCH)
    assert not push(remote, prepared)
    assert remote.head(BRANCH) == tip


def test_a_changed_bundle_and_a_moved_base_go_on_top(remote: Repository, prepared: Prepared) -> None:
    push(remote, prepared)
    first = remote.head(BRANCH)
    remote.commit_files("refs/heads/main", {"definitions/moved.txt": b"moved\n"}, "Move")
    more = with_piece(prepared, "tests/references/test_rmsnorm.py", b"assert 1 == 1\n")
    assert push(remote, more)
    parents = remote.git("rev-list", "--parents", "--max-count=1", BRANCH).decode().split()[1:]
    assert parents == [first, remote.head("main")]
    assert remote.git("cat-file", "blob", f"{BRANCH}:definitions/moved.txt") == b"moved\n"


def test_the_default_branch_is_never_pushed_to(remote: Repository, prepared: Prepared) -> None:
    remote.git("branch", BRANCH, "main")
    remote.git("symbolic-ref", "HEAD", f"refs/heads/{BRANCH}")
    before = remote.head(BRANCH)
    with pytest.raises(TraceproofError, match="never pushed to"):
        push(remote, prepared)
    assert remote.head(BRANCH) == before


def test_a_remote_that_is_absent_or_keeps_files_in_lfs_says_so(remote: Repository, prepared: Prepared) -> None:
    with pytest.raises(TraceproofError, match=r"file:///absent clone .*: there is no repository"):
        Remote("file:///absent").push(prepared.bundle, prepared.describe, allow_changes=False)
    remote.commit_files("refs/heads/main", {".gitattributes": b"*.safetensors filter=lfs\n"}, "Use LFS")
    with pytest.raises(TraceproofError, match="files in LFS") as caught:
        push(remote, prepared)
    assert path_of(prepared, "blob/") in str(caught.value)


def test_a_remote_that_refuses_says_why(remote: Repository, prepared: Prepared) -> None:
    hook = remote.git_dir / "hooks" / "pre-receive"
    hook.parent.mkdir(exist_ok=True)
    hook.write_text("#!/bin/sh\necho no room >&2\nexit 1\n")
    hook.chmod(0o755)
    with pytest.raises(TraceproofError, match="no room"):
        push(remote, prepared)
    heads = subprocess.run(["git", "--git-dir", str(remote.git_dir), "branch"], capture_output=True, check=True)
    assert heads.stdout.split() == [b"*", b"main"]


def test_only_the_command_can_push() -> None:
    """No rule, script or stage names the pusher, so `verify_all` and `snakemake publish` have no way to it."""
    root = Path(__file__).resolve().parent.parent
    places = [root / "Snakefile", *root.glob("rules/*.smk"), *root.glob("scripts/*.py"), *root.glob("src/**/*.py")]
    naming = {
        path.relative_to(root).as_posix() for path in places if re.search(r"publish\.push ", path.read_text())
    }
    assert naming == {"src/traceproof/cli/publish.py"}
    assert not [path.name for path in places if path.suffix == ".smk" and "--push" in _commands(path.read_text())]


def _commands(text: str) -> str:
    return re.sub(r'"""[^"]*"""', "", text)
