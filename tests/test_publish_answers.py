"""Whatever a hub answers, a push ends with one message, and the token goes to the hub alone."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from fuzzing import repeatedly
from hub_server import WRITER
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from publish_support import REPOSITORY, of_alpha, path_of

from traceproof.errors import TraceproofError
from traceproof.publish import push as pushing
from traceproof.publish.prepare import Prepared
from traceproof.publish.push import Hub

SHA = "a" * 40
BLOB = "b" * 40
WHEN = "2026-01-01T00:00:00.000Z"
Answer = tuple[int, dict[str, str], bytes]


class Server(ThreadingHTTPServer):
    """Answers as it is told, by the path's end; the log has what was asked, and with which token."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.answers: dict[str, Callable[[str], Answer]] = {}
        self.log: list[tuple[str, str]] = []
        self.endpoint = f"http://127.0.0.1:{self.server_port}"

    def handle_error(self, request: Any, client_address: Any) -> None:  # noqa: ANN401 - clients that give up
        pass


class Handler(BaseHTTPRequestHandler):
    server: Server
    protocol_version = "HTTP/1.1"

    def answer(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.server.log.append((f"{self.command} {self.path}", self.headers.get("Authorization", "")))
        path = self.path.partition("?")[0]
        name = next((key for key in self.server.answers if key in path), "")
        status, headers, body = self.server.answers[name](self.path)
        self.send_response(status)
        for key, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    do_GET = do_POST = do_HEAD = do_PUT = answer  # noqa: N815 - the base's names

    def log_message(self, *_: object) -> None:
        pass


def said(value: Any) -> Callable[[str], Answer]:  # noqa: ANN401 - JSON
    return lambda _: (200, {"Content-Type": "application/json"}, json.dumps(value).encode())


def usual(path: str) -> dict[str, Callable[[str], Answer]]:
    """A hub with one file, which differs from the bundle's, and no pull requests; longer paths first."""
    headers = {"X-Repo-Commit": SHA, "ETag": f'"{BLOB}"'}
    info = {"id": REPOSITORY, "sha": SHA, "siblings": [], "tags": [], "private": False, "lastModified": WHEN}
    return {
        "whoami": said({"name": "writer", "type": "user"}),
        "/resolve/": lambda _: (200, headers, b""),
        "/tree/": said([{"type": "file", "path": path, "oid": BLOB, "size": 0}]),
        "/discussions": said({"discussions": [], "count": 0, "start": 0}),
        "": said(info),
    }


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Prepared:
    return of_alpha(tmp_path_factory.mktemp("publish"), "alpha")


@pytest.fixture
def server(prepared: Prepared, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    for name in ("HF_TOKEN", "HF_HUB_DISABLE_XET"):
        monkeypatch.setenv(name, WRITER if name == "HF_TOKEN" else "1")
    made = Server()
    # A file that is read before anything is sent: new workload lines go behind those that are there.
    made.answers = usual(path_of(prepared, "workloads/"))
    thread = threading.Thread(target=made.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    yield made
    made.shutdown()
    thread.join()
    made.server_close()


def push(server: Server, prepared: Prepared) -> str:
    """What a push ended with."""
    target = Hub(REPOSITORY, endpoint=server.endpoint, pause=lambda _: None)
    with pytest.raises(TraceproofError) as caught:
        target.push(prepared.bundle, prepared.describe, allow_changes=True)
    assert WRITER not in str(caught.value)
    return str(caught.value)


def slow(_: str) -> Answer:
    time.sleep(1)
    return 200, {}, b"{}"


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
PLACES = ["whoami", "/tree/", "/discussions", ""]


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("text", TEXTS, ids=range(len(TEXTS)))
def test_what_is_no_answer_is_one_message(server: Server, prepared: Prepared, place: str, text: bytes) -> None:
    server.answers[place] = lambda _: (200, {"Content-Type": "application/json"}, text)
    if place == "" or text not in {b"[]", b"{}"}:  # an empty tree is a tree
        assert push(server, prepared)


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
@pytest.mark.parametrize("place", PLACES)
def test_no_token_follows_a_redirect_to_another_host(
    server: Server, prepared: Prepared, place: str, status: int
) -> None:
    other = {"Location": f"http://localhost:{server.server_port}/elsewhere"}
    server.answers = {"/elsewhere": lambda _: (401, {}, b"")} | server.answers
    server.answers[place] = lambda _: (status, other, b"")
    push(server, prepared)
    asked = [token for line, token in server.log if "/elsewhere" in line]
    assert asked
    assert set(asked) == {""}


def test_a_download_may_be_redirected_without_the_token(server: Server, prepared: Prepared) -> None:
    other = f"http://localhost:{server.server_port}/elsewhere"
    headers = {"X-Repo-Commit": SHA, "ETag": f'"{BLOB}"', "X-Linked-Size": "1", "Location": other}
    server.answers = {"/elsewhere": lambda _: (200, {}, b"\n")} | server.answers
    server.answers["/resolve/"] = lambda _: (302, headers, b"")
    push(server, prepared)
    asked = [token for line, token in server.log if "/elsewhere" in line]
    assert asked
    assert set(asked) == {""}


def test_a_slow_answer_is_not_waited_for(
    server: Server, prepared: Prepared, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pushing, "READ_SECONDS", 0.2)
    server.answers[""] = slow
    began = time.monotonic()
    assert "attempts failed" in push(server, prepared)
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


def test_a_wait_that_is_no_number_is_no_traceback(server: Server, prepared: Prepared) -> None:
    server.answers["/resolve/"] = lambda _: (429, {"Retry-After": "\N{SUPERSCRIPT TWO}"}, b"")
    assert push(server, prepared)


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


def test_no_answer_is_a_traceback(server: Server, prepared: Prepared) -> None:
    @settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck), database=None)
    @given(place=st.sampled_from(PLACES), value=JSON, status=st.sampled_from(STATUSES))
    def fuzz(place: str, value: Any, status: int) -> None:  # noqa: ANN401 - JSON
        body = json.dumps(value).encode()
        server.answers = usual(path_of(prepared, "workloads/"))
        server.answers[place] = lambda _: (status, {"Content-Type": "application/json"}, body)
        target = Hub(REPOSITORY, endpoint=server.endpoint, pause=lambda _: None)
        began = time.monotonic()
        with pytest.raises(TraceproofError):  # the hub at hand takes no commits
            target.push(prepared.bundle, prepared.describe, allow_changes=True)
        assert time.monotonic() - began < 60

    repeatedly(fuzz)
