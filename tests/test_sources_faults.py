"""Remotes, folders and disks that fail a checkout: an error says so, and nothing is left that looks whole."""

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
from source_remotes import Upstream, git
from test_sources_checkout import clone, fill, same, want

from traceproof.checkouts.checkout import WantedCheckout, changes
from traceproof.checkouts.gitrun import Git, GitError
from traceproof.checkouts.pins import State
from traceproof.errors import TraceproofError

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


@pytest.fixture
def upstream(tmp_path: Path) -> Upstream:
    return Upstream(tmp_path / "upstream")


def test_a_folder_that_is_no_repository_is_left_alone(tmp_path: Path, upstream: Upstream) -> None:
    target = tmp_path / "out"
    target.mkdir()
    (target / "thesis.tex").write_text("x")
    with pytest.raises(TraceproofError, match="no git repository"):
        clone(target, want(upstream, fill(upstream)))
    assert [path.name for path in target.iterdir()] == ["thesis.tex"]


def test_a_missing_commit_is_an_error_that_says_so(tmp_path: Path, upstream: Upstream) -> None:
    fill(upstream)
    target = tmp_path / "out"
    with pytest.raises(GitError, match="no such commit") as caught:
        clone(target, want(upstream, "0123456789" * 4))
    assert caught.value.final
    assert not target.exists()


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
    assert time.monotonic() - started < 40
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
    """Start a clone in a process of its own and kill it with every git that it started; whether it still ran."""
    process = subprocess.Popen([sys.executable, "-c", CLONE, str(target), url, commit], start_new_session=True)
    time.sleep(seconds)
    running = process.poll() is None
    children = descendants(process.pid)
    for pid in (process.pid, *children):
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    process.wait()
    while any(Path(f"/proc/{pid}/exe").exists() for pid in children):
        time.sleep(0.01)
    return running


def descendants(pid: int) -> list[int]:
    found = []
    try:
        text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    except FileNotFoundError:
        return []
    for child in map(int, text.split()):
        found += [child, *descendants(child)]
    return found
