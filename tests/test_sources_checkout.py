"""A checkout is exactly one commit, whatever remotes, folders and disks do; what is somebody's own stays."""

from __future__ import annotations

import os
import random
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from source_remotes import SOON, Upstream, git

from traceproof.checkouts.checkout import WantedCheckout, bring, changes
from traceproof.checkouts.gitrun import Git, GitError, Patience
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


def test_submodules_have_their_files(tmp_path: Path, upstream: Upstream, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_a_worktree_of_one_s_own_at_the_commit_is_taken_as_it_is(tmp_path: Path, upstream: Upstream) -> None:
    first, second = fill(upstream, 1), fill(upstream, 2)
    target = tmp_path / "out"
    git(upstream.folder, "worktree", "add", "--quiet", "--detach", str(target), first)
    assert clone(target, want(upstream, first)) is State.PRESENT
    with pytest.raises(TraceproofError, match="holds work of somebody's own"):
        clone(target, want(upstream, second))


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


KILLS = int(os.environ.get("TRACEPROOF_KILLS", "4"))  # docs/bumps.md has the figures of a run with 50
CLONE = """
import sys
from pathlib import Path
from traceproof.checkouts.checkout import bring
from traceproof.checkouts.checkout import WantedCheckout
from traceproof.checkouts.gitrun import Git
target = Path(sys.argv[1])
bring(target, WantedCheckout(url=sys.argv[2], commit=sys.argv[3]), Git(target))
"""


def test_a_folder_that_is_no_repository_is_left_alone(tmp_path: Path, upstream: Upstream) -> None:
    target = tmp_path / "out"
    target.mkdir()
    (target / "thesis.tex").write_text("x")
    with pytest.raises(TraceproofError, match="no git repository"):
        clone(target, want(upstream, fill(upstream)))
    assert [path.name for path in target.iterdir()] == ["thesis.tex"]


def test_a_corrupt_pack_of_the_remote_is_an_error(tmp_path: Path, upstream: Upstream) -> None:
    commit = fill(upstream)
    upstream.git("gc", "--quiet")
    (pack,) = (upstream.folder / ".git" / "objects" / "pack").glob("*.pack")
    content = bytearray(pack.read_bytes())
    content[len(content) // 3 : len(content) // 2] = bytes(len(content) // 2 - len(content) // 3)
    pack.chmod(0o644)
    pack.write_bytes(content)
    with pytest.raises(TraceproofError):
        clone(tmp_path / "out", want(upstream, commit))
    assert not (tmp_path / "out").exists()


def test_what_a_killed_clone_left_is_cleared_away(tmp_path: Path, upstream: Upstream) -> None:
    commit = fill(upstream)
    target = tmp_path / "out"
    left = target.with_name(f".cloning-{target.name}")
    left.mkdir()
    clone(left / "new", want(upstream, commit))
    (left / "new" / ".git" / "index").unlink()
    (left / "new" / ".git" / "shallow.lock").touch()
    assert clone(target, want(upstream, commit)) is State.CLONED
    assert same(target, upstream, commit)
    assert not left.exists()


@pytest.fixture
def silent() -> Iterator[int]:
    """A server that accepts and says nothing; its port."""
    held = []
    with socket.create_server(("127.0.0.1", 0)) as server:

        def accept() -> None:
            while True:
                try:
                    held.append(server.accept()[0])
                except OSError:
                    return

        thread = threading.Thread(target=accept, daemon=True)
        thread.start()
        yield server.getsockname()[1]
        server.shutdown(socket.SHUT_RDWR)
        thread.join()
    for connection in held:
        connection.close()


def test_a_remote_that_stalls_is_given_up(tmp_path: Path, silent: int) -> None:
    wanted = WantedCheckout(url=f"http://127.0.0.1:{silent}/x.git", commit="1" * 40)
    started = time.monotonic()
    with pytest.raises(TraceproofError, match="sent nothing for 1 s"):
        clone(tmp_path / "out", wanted)
    assert time.monotonic() - started < SOON.attempts * Patience().stall
    assert not (tmp_path / "out").exists()


def test_an_interrupt_of_git_is_one_of_ours_and_no_second_attempt_follows(tmp_path: Path) -> None:
    git(tmp_path, "init", "--quiet")
    counted = "!echo x >> counted; kill -INT $PPID; sleep 1"
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # git inherits it where it is ignored
    try:
        with pytest.raises(KeyboardInterrupt):
            Git(tmp_path).network("-c", f"alias.stop={counted}", "stop")
    finally:
        signal.signal(signal.SIGINT, before)
    assert (tmp_path / "counted").read_text() == "x\n"


def test_a_full_disk_is_an_error_that_says_so(tmp_path: Path, upstream: Upstream) -> None:
    """A limit on the size of files stands for the disk: git meets it in the same call."""
    commit = fill(upstream)
    target = tmp_path / "out"
    done = subprocess.run(
        [sys.executable, "-c", CLONE, str(target), upstream.url, commit],
        check=False,
        text=True,
        capture_output=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000)),
    )
    assert done.returncode
    assert "no space left" in done.stderr
    assert not target.exists()
    assert clone(target, want(upstream, commit)) is State.CLONED
    assert same(target, upstream, commit)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(KILLS))
@pytest.mark.parametrize("updates", [False, True], ids=["clone", "update"])
def test_a_killed_run_leaves_nothing_that_looks_whole(
    tmp_path: Path, upstream: Upstream, seed: int, record_property: Callable[[str, object], None], *, updates: bool
) -> None:
    first, second = fill(upstream, 1), fill(upstream, 2)
    target = tmp_path / "out"
    if updates:
        clone(target, want(upstream, first))
    moment = random.Random(seed).uniform(0.1, 0.6)  # noqa: S311 - a moment, no secret
    running = kill_at(moment, target, upstream.url, second)
    begun = target.with_name(f".cloning-{target.name}").exists()
    record_property("hit", "midway" if running and begun else "before" if running else "after")
    if not updates and target.exists():
        assert same(target, upstream, second)
    clone(target, want(upstream, second))
    assert same(target, upstream, second)
    assert not changes(Git(target))


def test_a_failed_update_leaves_the_checkout_as_it_was(tmp_path: Path, upstream: Upstream) -> None:
    first = fill(upstream)
    target = tmp_path / "out"
    clone(target, want(upstream, first))
    with pytest.raises(GitError, match="no such commit"):
        clone(target, want(upstream, "0123456789" * 4))
    assert same(target, upstream, first)
    assert clone(target, want(upstream, first)) is State.PRESENT


def kill_at(seconds: float, target: Path, url: str, commit: str) -> bool:
    """Start a clone in a process group of its own and kill the group, git included; whether it still ran."""
    process = subprocess.Popen([sys.executable, "-c", CLONE, str(target), url, commit], start_new_session=True)
    time.sleep(seconds)
    running = process.poll() is None
    if running:
        os.killpg(process.pid, signal.SIGKILL)  # at once: a git that is just being started belongs to the group
    process.wait()
    while any(group_of(stat) == process.pid for stat in Path("/proc").glob("[0-9]*/stat")):
        time.sleep(0.01)
    return running


def group_of(stat: Path) -> int:
    """Process group of a process that has not ended, or 0."""
    try:
        state, _, group = stat.read_text().rpartition(")")[2].split()[:3]
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return 0 if state in "XZ" else int(group)
