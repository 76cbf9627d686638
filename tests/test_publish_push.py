"""Against a hub over real HTTP: one pull request, whatever goes wrong on the way."""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from hub_server import READER, TOKENS, WRITER, Fault, HubServer, Repository, serving
from publish_support import REPOSITORY, made_here, path_of, pull_requests, run_of, start_push, with_file
from tenacity import wait_none

from traceproof.cli import publish as command
from traceproof.errors import TraceproofError
from traceproof.publish.pull_request import PullRequest, Source, base_of, dry_run
from traceproof.publish.push import Hub, Pushed

# The hub's own library uploads LFS objects with an argument that its HTTP client is about to rename.
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Source:
    return run_of(tmp_path_factory.mktemp("publish"), "alpha", "beta")


@pytest.fixture(scope="module")
def made(source: Source) -> PullRequest:
    return pull_requests(source, "alpha")[0]


@pytest.fixture
def hub(source: Source, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    monkeypatch.setenv("HF_TOKEN", WRITER)
    monkeypatch.setenv("HF_HUB_DISABLE_XET", "1")
    with serving() as server:
        server.create(REPOSITORY).seed(source.dataset)
        yield server


def store(hub: HubServer) -> Repository:
    return hub.repository(REPOSITORY)


def push(hub: HubServer, made: PullRequest, *, allow_changes: bool = False) -> Pushed:
    target = Hub(REPOSITORY, endpoint=hub.endpoint, pauses=wait_none())
    return target.push(made, allow_changes=allow_changes)


def writes(hub: HubServer) -> list[str]:
    return [item["request"] for item in hub.log if not item["request"].startswith(("GET", "HEAD"))]


def is_whole(hub: HubServer, made: PullRequest, *, pull_requests: int = 1, number: int = 1) -> None:
    """Exactly one pull request with one commit, every file of it byte for byte what was made."""
    assert len(store(hub).discussions) == pull_requests
    assert store(hub).ahead(f"refs/pr/{number}") == 1
    for path, data in made.files.items():
        assert store(hub).read(f"refs/pr/{number}", path) == data


def test_a_pull_request_has_its_files_byte_for_byte_and_is_opened_once(hub: HubServer, made: PullRequest) -> None:
    main = store(hub).head("main")
    outcome = push(hub, made)
    assert outcome.committed
    assert outcome.where.endswith("/discussions/1")
    is_whole(hub, made)
    assert store(hub).head("main") == main
    described = store(hub).discussions[0]["events"][0]["data"]["latest"]["raw"]
    assert "| `alpha` | reference | passed |" in described
    hub.log.clear()
    second = push(hub, made)
    assert (second.committed, second.where, writes(hub)) == (False, outcome.where, [])
    is_whole(hub, made)


def test_a_changed_one_updates_the_same_pull_request_and_files_leave_it(hub: HubServer, made: PullRequest) -> None:
    more = "tests/references/test_other.py"
    push(hub, with_file(made, more, b"assert 1 == 1\n"))
    path = path_of(made, "solutions/")
    value = json.loads(made.files[path])
    main = store(hub).head("main")
    assert push(hub, with_file(made, path, json.dumps(value | {"description": "another"}).encode())).committed
    assert len(store(hub).discussions) == 1
    assert store(hub).ahead("refs/pr/1") == 2
    assert json.loads(store(hub).read("refs/pr/1", path))["description"] == "another"
    paths = {entry["path"] for entry in store(hub).tree("refs/pr/1")}
    assert more not in paths
    assert "definitions/rmsnorm/beta.json" in paths
    assert store(hub).head("main") == main


def test_a_pull_request_that_somebody_else_opened_gets_no_commit(hub: HubServer, made: PullRequest) -> None:
    push(hub, made)
    theirs = store(hub).discussions
    theirs[0]["author"] = theirs[0]["events"][0]["author"] = {"name": "somebody"}
    before = store(hub).head("refs/pr/1")
    push(hub, made)
    assert store(hub).head("refs/pr/1") == before
    is_whole(hub, made, pull_requests=2, number=2)


def test_our_marker_in_somebody_elses_comment_makes_none_ours(hub: HubServer, made: PullRequest) -> None:
    push(hub, replace(made, slug="other"))
    found = store(hub).discussions
    comment = {**found[0]["events"][0], "id": "2", "author": {"name": "somebody"}}
    comment["data"] = {"edited": False, "hidden": False, "latest": {"raw": made.marker}}
    quoted = found[0]["events"][0]["data"]["latest"]
    quoted["raw"] = f"{made.marker}\n\n{quoted['raw']}"
    found[0]["events"].append(comment)
    push(hub, made)
    is_whole(hub, made, pull_requests=2, number=2)


def test_a_merged_one_needs_no_pull_request(hub: HubServer, made: PullRequest) -> None:
    push(hub, made)
    store(hub).refs["main"] = store(hub).head("refs/pr/1")
    hub.log.clear()
    assert not push(hub, made).committed
    assert writes(hub) == []


@pytest.mark.parametrize(
    "faults",
    [
        [
            Fault("POST .*/commit/", 429, 3, {"Retry-After": "0"}),
            Fault("GET .*/(tree|revision|discussions)", 503, 3),
            Fault("POST .*/preupload/", 500, 2),
            Fault("HEAD .*/resolve/", 429, 2, {"Retry-After": "0"}),
        ],
        [Fault("POST .*/commit/", 502, 1, after=True)],
    ],
    ids=["before", "after"],
)
def test_bursts_of_failures_are_waited_out(hub: HubServer, made: PullRequest, faults: list[Fault]) -> None:
    hub.faults += faults
    push(hub, made)
    assert [fault.times for fault in faults] == [0] * len(faults)
    is_whole(hub, made)


@pytest.mark.parametrize("path", ["POST .*/commit/", "GET .*/(tree|revision|discussions)", "HEAD .*/resolve/"])
def test_a_wait_that_is_no_number_is_told(hub: HubServer, made: PullRequest, path: str) -> None:
    hub.faults.append(Fault(path, 429, 1000, {"Retry-After": "²"}))
    with pytest.raises(TraceproofError, match=r"429|²"):
        push(hub, made)
    hub.faults.clear()
    push(hub, made)
    is_whole(hub, made)


def test_a_server_that_stays_down_is_given_up_on(hub: HubServer, made: PullRequest) -> None:
    hub.faults.append(Fault("POST .*/commit/", 503, 1000))
    with pytest.raises(TraceproofError, match="503"):
        push(hub, made)
    assert store(hub).discussions == []
    hub.faults.clear()
    push(hub, made)
    is_whole(hub, made)


@pytest.mark.parametrize("token", [READER, "hf_" + "nobody" * 5, ""])
def test_without_a_token_that_has_the_rights_it_is_told_so(
    hub: HubServer, made: PullRequest, monkeypatch: pytest.MonkeyPatch, token: str
) -> None:
    monkeypatch.setattr("huggingface_hub.get_token", lambda: token or None)
    with pytest.raises(TraceproofError, match="may open pull requests" if token else "Set HF_TOKEN") as caught:
        push(hub, made)
    assert not token or token not in str(caught.value)
    assert store(hub).discussions == []
    assert token or hub.log == []


def test_a_base_that_moved_is_taken_up(hub: HubServer, made: PullRequest) -> None:
    def move() -> None:
        store(hub).commit("main", {"definitions/moved.txt": b"moved\n"}, "Move")

    hub.before_commit.append(move)
    push(hub, made)
    is_whole(hub, made)
    assert store(hub).read("refs/pr/1", "definitions/moved.txt") == b"moved\n"
    assert [item["status"] for item in hub.log if "/commit/" in item["request"]] == [412, 200]


def test_a_base_that_moved_into_a_conflict_is_refused(hub: HubServer, made: PullRequest) -> None:
    path = path_of(made, "definitions/")
    value = json.loads(made.files[path])
    value["axes"]["hidden_size"]["value"] = 48
    conflict = {path: json.dumps(value).encode()}

    def move() -> None:
        store(hub).commit("main", conflict, "Conflict")

    hub.before_commit.append(move)
    with pytest.raises(TraceproofError, match='"value": 48'):
        push(hub, made)
    assert store(hub).discussions == []
    assert push(hub, made, allow_changes=True).committed


def test_a_push_that_is_killed_is_taken_up_where_it_was(hub: HubServer, made: PullRequest, tmp_path: Path) -> None:
    for hook in (hub.before_commit, hub.after_commit):
        child = start_push(made, hub, tmp_path, WRITER)
        hook.append(child.kill)
        child.communicate()
    push(hub, made)
    is_whole(hub, made)


def test_the_token_is_written_nowhere(
    hub: HubServer, made: PullRequest, source: Source, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    dry_run(made, base_of(source), tmp_path / "dry")
    hub.faults.append(Fault("POST .*/commit/", 503, 1))
    push(hub, made)
    child = start_push(made, hub, tmp_path, WRITER)
    said = child.communicate()[0].decode() + "".join(capfd.readouterr())
    assert child.returncode == 0, said
    texts = [path.read_bytes() for top in (tmp_path, source.run) for path in top.rglob("*") if path.is_file()]
    texts += [said.encode(), json.dumps(hub.log).encode(), repr(store(hub)).encode()]
    assert not [text for text in texts for token in TOKENS if token.encode() in text]


def test_the_command_tells_what_it_pushed(
    hub: HubServer, made: PullRequest, source: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "_source", lambda *_: source)
    told = []
    for push in (False, True, True):
        with made_here():
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
    pushed = {"pull_request": "definition-alpha", "where": where}
    assert told == [[], [pushed | {"committed": True}], [pushed | {"committed": False}]]
    is_whole(hub, made)


@pytest.mark.parametrize(("token", "what"), [("", "there is no token"), ("hf_" + "nobody" * 5, "not published")])
def test_the_token_is_looked_at_before_the_work(
    hub: HubServer, monkeypatch: pytest.MonkeyPatch, token: str, what: str
) -> None:
    monkeypatch.setattr("huggingface_hub.get_token", lambda: token or None)
    monkeypatch.setattr(command, "_source", lambda *_: pytest.fail("the work began"))
    with pytest.raises(TraceproofError, match=what):
        command.publish(push=True, repository=REPOSITORY, endpoint=hub.endpoint)


def test_a_library_told_to_be_offline_is_asked_once(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    said: list[str] = []
    with pytest.raises(TraceproofError, match="Unset HF_HUB_OFFLINE"):
        _ = Hub(REPOSITORY, endpoint=hub.endpoint, say=said.append, pauses=wait_none()).owner
    assert said == []


@pytest.mark.parametrize("place", [r"GET /api/whoami", r"GET .*/discussions", r"GET .*/revision/"])
@pytest.mark.parametrize("text", [b"", b"<html>", b"[]", b"{}"], ids=range(4))
def test_what_is_no_answer_is_one_message(hub: HubServer, made: PullRequest, place: str, text: bytes) -> None:
    hub.faults.append(Fault(place, 200, body=text))
    with pytest.raises(TraceproofError) as caught:
        push(hub, made, allow_changes=True)
    assert WRITER not in str(caught.value)


def test_a_hub_that_can_not_be_reached_is_given_up_on(made: PullRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", WRITER)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and nobody listens
        hub = Hub(REPOSITORY, endpoint=f"http://127.0.0.1:{taken.getsockname()[1]}", pauses=wait_none())
        with pytest.raises(TraceproofError, match="not published") as caught:
            hub.push(made, allow_changes=False)
    assert "again later" in caught.value.todo


@pytest.mark.parametrize(
    "endpoint",
    ["https://me:s3cret@example.org", "https://s3cret@example.org", "https://x/?token=s3cret", "ftp://x", "x"],
)
def test_an_endpoint_with_a_token_in_it_is_refused_and_not_printed(endpoint: str) -> None:
    with pytest.raises(TraceproofError, match="no address of a hub") as caught:
        Hub(REPOSITORY, endpoint=endpoint)
    assert "s3cret" not in str(caught.value)


def test_only_the_command_can_push() -> None:
    """No rule, script or stage names the pusher, so `verify_all` and `snakemake publish` have no way to it."""
    root = Path(__file__).resolve().parent.parent
    places = [root / "Snakefile", *root.glob("rules/*.smk"), *root.glob("scripts/*.py"), *root.glob("src/**/*.py")]
    naming = {one.relative_to(root).as_posix() for one in places if re.search(r"publish\.push ", one.read_text())}
    assert naming == {"src/traceproof/cli/publish.py"}
    assert not [path.name for path in places if path.suffix == ".smk" and "--push" in _commands(path.read_text())]


def _commands(text: str) -> str:
    return re.sub(r'"""[^"]*"""', "", text)
