"""Against a hub over real HTTP and a git remote: one pull request or branch, whatever goes wrong on the way."""

from __future__ import annotations

import hashlib
import json
import os
import random
import re
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fuzzing import repeatedly
from hub_repository import Repository
from hub_server import READER, TOKENS, WRITER, Fault, HubServer, serving
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from publish_support import REPOSITORY, of_alpha, parts_made_here, path_of, start_push, with_piece

from traceproof.cli import publish as command
from traceproof.errors import TraceproofError
from traceproof.publish import push as pushing
from traceproof.publish.prepare import Prepared, dry_run
from traceproof.publish.push import Hub, Pushed, Remote

# The hub's own library uploads LFS objects with an argument that its HTTP client is about to rename.
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")
KILLS = int(os.environ.get("TRACEPROOF_KILLS", "2"))  # docs/publishing.md has the figures of a run with 30


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Prepared:
    return of_alpha(tmp_path_factory.mktemp("publish"), "alpha", "beta")


@pytest.fixture
def hub(tmp_path: Path, prepared: Prepared, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    monkeypatch.setenv("HF_TOKEN", WRITER)
    monkeypatch.setenv("HF_HUB_DISABLE_XET", "1")
    with serving(tmp_path / "hub") as server:
        server.create(REPOSITORY).seed(prepared.source.dataset)
        yield server


def store(hub: HubServer) -> Repository:
    return hub.repository(REPOSITORY)


def push(hub: HubServer, prepared: Prepared, *, allow_changes: bool = False) -> Pushed:
    target = Hub(REPOSITORY, endpoint=hub.endpoint, pause=lambda _: None)
    return target.push(prepared.bundle, prepared.describe, allow_changes=allow_changes)


def commits(hub: HubServer, number: int = 1) -> int:
    """Commits of a pull request that main does not have."""
    return len(store(hub).git("rev-list", f"refs/heads/main..refs/pr/{number}").splitlines())


def writes(hub: HubServer) -> list[str]:
    return [item["request"] for item in hub.log if not item["request"].startswith(("GET", "HEAD"))]


def is_whole(hub: HubServer, prepared: Prepared, *, pull_requests: int = 1, number: int = 1) -> None:
    """Exactly one pull request with one commit, every file of it byte for byte what was prepared."""
    assert len(store(hub).discussions()) == pull_requests
    assert commits(hub, number) == 1
    for piece in prepared.bundle.pieces:
        assert store(hub).read(f"refs/pr/{number}", piece.path) == piece.data


def test_a_pull_request_holds_the_bundle_byte_for_byte_and_main_stays(hub: HubServer, prepared: Prepared) -> None:
    main = store(hub).head("main")
    outcome = push(hub, prepared)
    assert outcome.committed
    assert outcome.where.endswith("/discussions/1")
    is_whole(hub, prepared)
    assert store(hub).head("main") == main
    described = store(hub).discussions()[0]["events"][0]["data"]["latest"]["raw"]
    assert "| `alpha` | reference | passed |" in described


def test_a_second_run_opens_nothing_and_commits_nothing(hub: HubServer, prepared: Prepared) -> None:
    first = push(hub, prepared)
    hub.log.clear()
    second = push(hub, prepared)
    assert not second.committed
    assert second.where == first.where
    assert writes(hub) == []
    is_whole(hub, prepared)


def test_a_changed_bundle_updates_the_same_pull_request(hub: HubServer, prepared: Prepared) -> None:
    push(hub, prepared)
    path = path_of(prepared, "solutions/")
    value = json.loads(next(piece.data for piece in prepared.bundle.pieces if piece.path == path))
    changed = with_piece(prepared, path, json.dumps(value | {"description": "another"}).encode())
    main = store(hub).head("main")
    assert push(hub, changed).committed
    assert len(store(hub).discussions()) == 1
    assert commits(hub) == 2
    assert json.loads(store(hub).read("refs/pr/1", path))["description"] == "another"
    assert store(hub).head("main") == main


def test_what_the_bundle_no_longer_holds_leaves_the_pull_request(hub: HubServer, prepared: Prepared) -> None:
    more = with_piece(prepared, "tests/references/test_alpha.py", b"assert 1 == 1\n")
    push(hub, more)
    push(hub, prepared)
    paths = {entry["path"] for entry in store(hub).tree("refs/pr/1")}
    assert "tests/references/test_alpha.py" not in paths
    assert "definitions/rmsnorm/beta.json" in paths


def test_somebody_elses_pull_request_of_that_title_is_left_alone(hub: HubServer, prepared: Prepared) -> None:
    push(hub, replace(prepared, bundle=replace(prepared.bundle, slug="other")))
    push(hub, prepared)
    is_whole(hub, prepared, pull_requests=2, number=2)


def test_a_pull_request_that_somebody_else_opened_gets_no_commit(hub: HubServer, prepared: Prepared) -> None:
    push(hub, prepared)
    theirs = store(hub).discussions()
    theirs[0]["author"] = theirs[0]["events"][0]["author"] = {"name": "somebody"}
    store(hub).file.write_text(json.dumps(theirs))
    before = store(hub).head("refs/pr/1")
    push(hub, prepared)
    assert store(hub).head("refs/pr/1") == before
    is_whole(hub, prepared, pull_requests=2, number=2)


def test_our_marker_in_somebody_elses_comment_makes_no_pull_request_ours(
    hub: HubServer, prepared: Prepared
) -> None:
    push(hub, replace(prepared, bundle=replace(prepared.bundle, slug="other")))
    found = store(hub).discussions()
    comment = {**found[0]["events"][0], "id": "2", "author": {"name": "somebody"}}
    comment["data"] = {"edited": False, "hidden": False, "latest": {"raw": prepared.bundle.marker}}
    quoted = found[0]["events"][0]["data"]["latest"]
    quoted["raw"] = f"{prepared.bundle.marker}\n\n{quoted['raw']}"
    found[0]["events"].append(comment)
    store(hub).file.write_text(json.dumps(found))
    push(hub, prepared)
    is_whole(hub, prepared, pull_requests=2, number=2)


def test_a_merged_bundle_needs_no_pull_request(hub: HubServer, prepared: Prepared) -> None:
    push(hub, prepared)
    store(hub).git("update-ref", "refs/heads/main", store(hub).head("refs/pr/1"))
    hub.log.clear()
    assert not push(hub, prepared).committed
    assert writes(hub) == []


@pytest.mark.parametrize(
    "fault",
    [
        Fault("POST .*/commit/", 429, 3, {"Retry-After": "0"}),
        Fault("POST .*/commit/", 429, 1, {"Retry-After": "\N{SUPERSCRIPT TWO}"}),  # a digit to str.isdigit
        Fault("POST .*/commit/", 503, 3),
        Fault("POST .*/commit/", 502, 1, after=True),
        Fault("GET .*/(tree|revision|discussions)", 503, 3),
        Fault("POST .*/preupload/", 500, 2),
        Fault("HEAD .*/resolve/", 429, 2, {"Retry-After": "0"}),
    ],
    ids=lambda fault: f"{fault.pattern} {fault.status}{' after' if fault.after else ''}",
)
def test_bursts_of_failures_are_waited_out(hub: HubServer, prepared: Prepared, fault: Fault) -> None:
    hub.faults.append(fault)
    push(hub, prepared)
    assert fault.times == 0
    is_whole(hub, prepared)


def test_a_server_that_stays_down_is_given_up_on(hub: HubServer, prepared: Prepared) -> None:
    hub.faults.append(Fault("POST .*/commit/", 503, 1000))
    with pytest.raises(TraceproofError, match=r"8 attempts failed, the last one on: 503"):
        push(hub, prepared)
    assert store(hub).discussions() == []
    hub.faults.clear()
    push(hub, prepared)
    is_whole(hub, prepared)


@pytest.mark.parametrize("token", [READER, "hf_" + "nobody" * 5])
def test_a_token_without_rights_is_told_so(
    hub: HubServer, prepared: Prepared, monkeypatch: pytest.MonkeyPatch, token: str
) -> None:
    monkeypatch.setenv("HF_TOKEN", token)
    with pytest.raises(TraceproofError, match="may open pull requests") as caught:
        push(hub, prepared)
    assert token not in str(caught.value)
    assert store(hub).discussions() == []


def test_no_token_is_told_so(hub: HubServer, prepared: Prepared, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.get_token", lambda: None)
    with pytest.raises(TraceproofError, match="Set HF_TOKEN"):
        push(hub, prepared)
    assert hub.log == []


def test_a_base_that_moved_is_taken_up(hub: HubServer, prepared: Prepared) -> None:
    def move() -> None:
        store(hub).commit_files("refs/heads/main", {"definitions/moved.txt": b"moved\n"}, "Move")

    hub.before_commit.append(move)
    push(hub, prepared)
    is_whole(hub, prepared)
    assert store(hub).read("refs/pr/1", "definitions/moved.txt") == b"moved\n"
    assert [item["status"] for item in hub.log if "/commit/" in item["request"]] == [412, 200]


def test_a_base_that_moved_into_a_conflict_is_refused(hub: HubServer, prepared: Prepared) -> None:
    path = path_of(prepared, "definitions/")
    value = json.loads(next(piece.data for piece in prepared.bundle.pieces if piece.path == path))
    value["axes"]["hidden_size"]["value"] = 48
    conflict = {path: json.dumps(value).encode()}

    def move() -> None:
        store(hub).commit_files("refs/heads/main", conflict, "Conflict")

    hub.before_commit.append(move)
    with pytest.raises(TraceproofError, match=r"axes\.hidden_size\.value: 48 -> 32"):
        push(hub, prepared)
    assert store(hub).discussions() == []
    assert push(hub, prepared, allow_changes=True).committed


def test_a_name_that_is_taken_is_a_conflict(hub: HubServer, prepared: Prepared) -> None:
    leaf = path_of(prepared, "solutions/").rpartition("/")[2]
    store(hub).commit_files("refs/heads/main", {f"solutions/x/rmsnorm/beta/{leaf}": b"{}"}, "Take the name")
    with pytest.raises(TraceproofError, match="its name is taken by solutions/x"):
        push(hub, prepared)
    assert store(hub).discussions() == []


def test_a_server_that_stores_something_else_is_found_out(hub: HubServer, prepared: Prepared) -> None:
    hub.lies.add("lfs")
    with pytest.raises(TraceproofError, match="does not hold what was sent"):
        push(hub, prepared)


@pytest.mark.parametrize("files", [1, 100])
def test_a_server_that_claims_to_hold_files_already_is_found_out(
    hub: HubServer, prepared: Prepared, files: int
) -> None:
    for piece in prepared.bundle.pieces[:files]:
        data = piece.data
        git = hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()
        hub.claims[piece.path] = hashlib.sha256(data).hexdigest() if piece.path.endswith("tensors") else git
    with pytest.raises(TraceproofError, match=r"made no commit|does not hold what was sent"):
        push(hub, prepared)


def test_a_push_that_is_killed_is_taken_up_where_it_was(
    hub: HubServer, prepared: Prepared, tmp_path: Path
) -> None:
    for hook in (hub.before_commit, hub.after_commit):
        child = start_push(prepared, hub, tmp_path, WRITER)
        hook.append(child.kill)
        child.communicate()
    push(hub, prepared)
    is_whole(hub, prepared)


def test_kills_at_random_points_lose_and_double_nothing(
    hub: HubServer, prepared: Prepared, tmp_path: Path
) -> None:
    chance = random.Random(8)  # noqa: S311 - a repeatable choice, no secret
    for number in range(1, KILLS + 1):
        fresh = replace(prepared, bundle=replace(prepared.bundle, slug=f"round-{number}"))
        child = start_push(fresh, hub, tmp_path, WRITER)
        stop, limit = len(hub.log) + chance.randrange(25), time.monotonic() + 60
        while child.poll() is None and len(hub.log) < stop and time.monotonic() < limit:
            time.sleep(0.002)
        child.kill()
        child.communicate()
        push(hub, fresh)
        is_whole(hub, fresh, pull_requests=number, number=number)


def test_the_token_is_written_nowhere(
    hub: HubServer, prepared: Prepared, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    dry_run(prepared, tmp_path / "dry", allow_changes=False)
    hub.faults.append(Fault("POST .*/commit/", 503, 1))
    push(hub, prepared)
    child = start_push(prepared, hub, tmp_path, WRITER)
    said = child.communicate()[0].decode() + "".join(capfd.readouterr())
    assert child.returncode == 0, said
    texts = [
        path.read_bytes() for top in (tmp_path, prepared.source.run) for path in top.rglob("*") if path.is_file()
    ]
    texts += [said.encode(), json.dumps(hub.log).encode()]
    assert not [text for text in texts for token in TOKENS if token.encode() in text]


def test_the_command_tells_what_it_pushed(
    hub: HubServer, prepared: Prepared, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "_source", lambda *_, **__: prepared.source)
    told = []
    for push in (False, True, True):
        with parts_made_here():
            command.publish(
                definition_name=["alpha"],
                push=push,
                repository=REPOSITORY,
                endpoint=hub.endpoint,
                out=tmp_path / "dry",
                json_file=tmp_path / "told.json",
            )
        told.append(json.loads((tmp_path / "told.json").read_text())["pushed"])
        assert push or hub.log == []
    where = f"{hub.endpoint}/datasets/{REPOSITORY}/discussions/1"
    pushed = {"bundle": "definition-alpha", "where": where}
    assert told == [[], [pushed | {"committed": True}], [pushed | {"committed": False}]]
    is_whole(hub, prepared)


def test_a_dry_run_asks_no_server(hub: HubServer, prepared: Prepared, tmp_path: Path) -> None:
    dry_run(prepared, tmp_path / "dry", allow_changes=False)
    assert hub.log == []


PLACES = [r"GET /api/whoami", r"GET .*/tree/", r"GET .*/discussions", r"GET .*/revision/"]
TEXTS = [
    b"",
    b"{",
    b"<html>",
    b"null",
    b"[]",
    b"{}",
    b"1",
    b'"x"',
    b"[" * 100_000,
    b"\xff\xfe",
    b'{"sha": "../../x"}',
]


def refused(hub: HubServer, prepared: Prepared) -> str:
    """What a push ended with."""
    with pytest.raises(TraceproofError) as caught:
        push(hub, prepared, allow_changes=True)
    assert WRITER not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("text", TEXTS, ids=range(len(TEXTS)))
def test_what_is_no_answer_is_one_message(hub: HubServer, prepared: Prepared, place: str, text: bytes) -> None:
    hub.faults.append(Fault(place, 200, body=text))
    assert refused(hub, prepared)


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
@pytest.mark.parametrize("place", [*PLACES, r"(GET|HEAD) .*/resolve/"])
def test_no_token_follows_a_redirect_to_another_host(
    hub: HubServer, prepared: Prepared, place: str, status: int
) -> None:
    other = {"Location": f"http://localhost:{hub.server_port}/elsewhere", "X-Linked-Size": "1"}
    other |= {"X-Repo-Commit": "a" * 40, "ETag": '"b"'}
    hub.faults.append(Fault(place, status, headers=other))
    assert refused(hub, prepared)
    asked = [item["authorized"] for item in hub.log if "/elsewhere" in item["request"]]
    assert set(asked) == {False}


def test_a_slow_answer_is_not_waited_for(
    hub: HubServer, prepared: Prepared, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pushing, "READ_SECONDS", 0.2)
    hub.faults.append(Fault("GET .*/revision/", 200, seconds=1.0))
    began = time.monotonic()
    assert "attempts failed" in refused(hub, prepared)
    assert time.monotonic() - began < 15


def test_a_hub_that_can_not_be_reached_is_given_up_on(prepared: Prepared, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", WRITER)
    assert pushing.UNREACHED_SECONDS <= 12.0
    monkeypatch.setattr(pushing, "UNREACHED_SECONDS", 2.0)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and nobody listens
        hub = Hub(REPOSITORY, endpoint=f"http://127.0.0.1:{taken.getsockname()[1]}")
        began = time.monotonic()
        with pytest.raises(TraceproofError, match="cannot be reached"):
            hub.push(prepared.bundle, prepared.describe, allow_changes=False)
        assert time.monotonic() - began < 10


@pytest.mark.parametrize(
    "endpoint",
    [
        "https://me:s3cret@example.org",
        "https://s3cret@example.org",
        "https://x/?token=s3cret",
        "ftp://x",
        "x",
        "http://[",
        "http://x:y",
    ],
)
def test_an_endpoint_with_a_token_in_it_is_refused_and_not_printed(endpoint: str) -> None:
    with pytest.raises(TraceproofError, match="no address of a hub") as caught:
        Hub(REPOSITORY, endpoint=endpoint)
    assert "s3cret" not in str(caught.value)


def test_a_wait_that_is_no_number_is_no_traceback(hub: HubServer, prepared: Prepared) -> None:
    hub.faults.append(Fault("HEAD .*/resolve/", 429, headers={"Retry-After": "\N{SUPERSCRIPT TWO}"}))
    assert refused(hub, prepared)


STATUSES = [200, 200, 200, 204, 206, 302, 400, 418, 599]
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(
                ["discussions", "count", "start", "sha", "name", "path", "oid", "size", "type", "id", "lfs"]
            )
            | st.text(max_size=5),
            inner,
            max_size=6,
        )
    ),
    max_leaves=12,
)


def test_no_answer_is_a_traceback(hub: HubServer, prepared: Prepared) -> None:
    @settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck), database=None)
    @given(place=st.sampled_from(PLACES), value=JSON, status=st.sampled_from(STATUSES))
    def fuzz(place: str, value: Any, status: int) -> None:  # noqa: ANN401 - JSON
        hub.faults[:] = [Fault(place, status, body=json.dumps(value).encode())]
        began = time.monotonic()
        with suppress(TraceproofError):  # some answers are as good as the right one
            push(hub, prepared, allow_changes=True)
        assert time.monotonic() - began < 60

    repeatedly(fuzz)


BRANCH = "traceproof/definition-alpha"


@pytest.fixture
def person(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who commits, on a machine whose git was told nothing."""
    for what in ("AUTHOR", "COMMITTER"):
        monkeypatch.setenv(f"GIT_{what}_NAME", "somebody")
        monkeypatch.setenv(f"GIT_{what}_EMAIL", "somebody@example.org")


@pytest.fixture
def remote(tmp_path: Path, prepared: Prepared, person: None) -> Repository:
    del person
    found = Repository(tmp_path / "remote")
    found.seed(prepared.source.dataset)
    return found


def push_branch(remote: Repository, prepared: Prepared) -> bool:
    target = Remote(f"file://{remote.git_dir}")
    return target.push(prepared.bundle, prepared.describe, allow_changes=False).committed


def test_the_bundle_is_a_branch_byte_for_byte(remote: Repository, prepared: Prepared) -> None:
    main = remote.head("main")
    assert push_branch(remote, prepared)
    for piece in prepared.bundle.pieces:
        assert remote.git("cat-file", "blob", f"{BRANCH}:{piece.path}") == piece.data
    assert remote.head("main") == main
    assert remote.git("rev-list", f"main..{BRANCH}").count(b"\n") == 1


def test_a_second_push_commits_nothing(remote: Repository, prepared: Prepared) -> None:
    assert push_branch(remote, prepared)
    tip = remote.head(BRANCH)
    assert not push_branch(remote, prepared)
    assert remote.head(BRANCH) == tip


def test_a_changed_bundle_and_a_moved_base_go_on_top(remote: Repository, prepared: Prepared) -> None:
    push_branch(remote, prepared)
    first = remote.head(BRANCH)
    remote.commit_files("refs/heads/main", {"definitions/moved.txt": b"moved\n"}, "Move")
    more = with_piece(prepared, "tests/references/test_alpha.py", b"assert 1 == 1\n")
    assert push_branch(remote, more)
    parents = remote.git("rev-list", "--parents", "--max-count=1", BRANCH).decode().split()[1:]
    assert parents == [first, remote.head("main")]
    assert remote.git("cat-file", "blob", f"{BRANCH}:definitions/moved.txt") == b"moved\n"


def test_the_default_branch_is_never_pushed_to(remote: Repository, prepared: Prepared) -> None:
    remote.git("branch", BRANCH, "main")
    remote.git("symbolic-ref", "HEAD", f"refs/heads/{BRANCH}")
    before = remote.head(BRANCH)
    with pytest.raises(TraceproofError, match="never pushed to"):
        push_branch(remote, prepared)
    assert remote.head(BRANCH) == before


def test_a_remote_that_is_absent_or_keeps_files_in_lfs_says_so(remote: Repository, prepared: Prepared) -> None:
    with pytest.raises(TraceproofError, match=r"file:///absent clone .*: there is no repository"):
        Remote("file:///absent").push(prepared.bundle, prepared.describe, allow_changes=False)
    remote.commit_files("refs/heads/main", {".gitattributes": b"*.safetensors filter=lfs\n"}, "Use LFS")
    with pytest.raises(TraceproofError, match="files in LFS") as caught:
        push_branch(remote, prepared)
    assert path_of(prepared, "blob/") in str(caught.value)


def test_a_remote_that_refuses_says_why(remote: Repository, prepared: Prepared) -> None:
    hook = remote.git_dir / "hooks" / "pre-receive"
    hook.parent.mkdir(exist_ok=True)
    hook.write_text("#!/bin/sh\necho no room >&2\nexit 1\n")
    hook.chmod(0o755)
    with pytest.raises(TraceproofError, match="no room"):
        push_branch(remote, prepared)
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
