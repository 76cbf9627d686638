"""Packages are fetched as files: nothing of them runs, and their digests are checked."""

from __future__ import annotations

import hashlib
import io
import json
import tarfile
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from traceproof.checkouts import packages as package
from traceproof.checkouts.packages import download_sdist
from traceproof.checkouts.pins import Pin
from traceproof.errors import TraceproofError
from traceproof.programs import for_untrusted, without_secrets

SETUP = "import os, pathlib\npathlib.Path({ran!r}).write_text(str(dict(os.environ)))\nraise SystemExit(1)\n"
SECRETS = {
    "HF_TOKEN": "hf_x",
    "GITHUB_TOKEN": "x",
    "AWS_SECRET_ACCESS_KEY": "x",
    "MY_PASSWORD": "x",
    "TWINE_api_key": "x",
}


def sdist(path: Path, ran: Path) -> bytes:
    """A source package that leaves a file where anything of it runs."""
    with tarfile.open(path, "w:gz") as archive:
        for name, text in (("setup.py", SETUP.format(ran=str(ran))), ("tiny/__init__.py", "it = 1\n")):
            member = tarfile.TarInfo(f"tiny-1.0/{name}")
            member.size = len(text)
            archive.addfile(member, io.BytesIO(text.encode()))
    return path.read_bytes()


class Index(ThreadingHTTPServer):
    """A package index; `pages` are its answers by path."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.pages: dict[str, tuple[str, bytes]] = {}
        self.url = f"http://127.0.0.1:{self.server_port}/simple"


class Handler(BaseHTTPRequestHandler):
    server: Index

    def do_GET(self) -> None:
        kind, body = self.server.pages.get(self.path, ("", b""))
        self.send_response(200 if kind else 404)
        self.send_header("Content-Type", kind or "text/plain")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def index(monkeypatch: pytest.MonkeyPatch) -> Iterator[Index]:
    server = Index()
    for name in ("PIP_FIND_LINKS", "PIP_NO_INDEX", "PIP_EXTRA_INDEX_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_INDEX_URL", server.url)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def serve(index: Index, data: bytes, *, as_json: bool) -> None:
    files = [
        {"filename": "tiny-0.9.tar.gz", "url": "../../files/old"},
        {"filename": "tiny-1.0.tar.gz", "url": "../../files/tiny-1.0.tar.gz"},
    ]
    links = "".join(f'<a data-x="1" href="{file["url"]}#sha256={"0" * 64}">x</a>' for file in files)
    page = json.dumps({"files": files}) if as_json else f"<!doctype html><html><body>{links}</body></html>"
    index.pages["/simple/tiny/"] = ("text/html", page.encode())
    index.pages["/files/tiny-1.0.tar.gz"] = ("application/x-tar", data)


@pytest.mark.slow
@pytest.mark.parametrize("as_json", [True, False])
def test_a_source_package_is_a_file_and_nothing_of_it_runs(
    index: Index, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, as_json: bool
) -> None:
    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)
    data = sdist(tmp_path / "x.tar.gz", tmp_path / "ran")
    serve(index, data, as_json=as_json)
    _, pin = package.bring_package(tmp_path / "out" / "tiny", Pin(package="tiny", version="1.0"))
    assert (tmp_path / "out" / "tiny" / "tiny" / "__init__.py").read_text() == "it = 1\n"
    assert pin.sha256 == hashlib.sha256(data).hexdigest()
    assert not (tmp_path / "ran").exists()


def test_another_file_than_the_pin_names_is_refused(index: Index, tmp_path: Path) -> None:
    data = sdist(tmp_path / "x.tar.gz", tmp_path / "ran")
    serve(index, data, as_json=True)
    with pytest.raises(TraceproofError, match="not the file that was pinned"):
        download_sdist("tiny", "1.0", tmp_path / "b", sha256="1" * 64)


def test_a_folder_of_links_serves_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "links"
    folder.mkdir()
    data = sdist(folder / "tiny-1.0.tar.gz", tmp_path / "ran")
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    assert download_sdist("tiny", "1.0", tmp_path / "out").read_bytes() == data
    assert not (tmp_path / "ran").exists()


PAGES = {
    "no JSON": b"{",
    "a list": b'{"files": {"a": 1}}',
    "no files": b"{}",
    "other types": b'{"files": [1, null, {"filename": 3, "url": []}]}',
    "binary": b"\xff\xfe\x00" * 100,
    "nothing": b"",
    "another place": b'<a href="ftp://x/tiny-1.0.tar.gz">x</a><a href="file:///etc/passwd#tiny-1.0.tar.gz">',
    "a bad address": b'<a href="http://[/tiny-1.0.tar.gz">x</a>',
}


@pytest.mark.parametrize("page", PAGES)
def test_whatever_an_index_answers_is_one_message(
    index: Index, tmp_path: Path, page: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(package, "_pip_options", lambda: {"index-url": index.url})
    index.pages["/simple/tiny/"] = ("text/html", PAGES[page])
    with pytest.raises(TraceproofError, match="have no source package"):
        download_sdist("tiny", "1.0", tmp_path / "out")


def test_what_programs_get_to_know_of_the_environment() -> None:
    harmless = {"PATH": "/bin", "LANG": "C", "CUDA_VISIBLE_DEVICES": "0"}
    mine = {"HOME": "/home/me", "SSH_AUTH_SOCK": "/x", "PIP_INDEX_URL": "https://example.org"}
    assert without_secrets(SECRETS | harmless | mine) == harmless | mine
    assert for_untrusted(SECRETS | harmless | mine) == harmless
