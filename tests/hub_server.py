"""A small hub: dataset repositories in bare git repositories, an LFS store, pull requests, over real HTTP.

Made for tests of publishing: it keeps a log of every request, and it can be told to fail, to lie and to be slow.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from hub_repository import WHEN, Refusal, Repository

WRITER = "hf_" + "testwriter" * 3
READER = "hf_" + "testreader" * 3
TOKENS = {WRITER: "write", READER: "read"}
OWNER = {"write": "writer", "read": "reader"}
POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:{}\nsize {}\n"


@dataclass
class Fault:
    """Answers of `status` to the next `times` requests whose `METHOD path` matches; `after`: once it is done."""

    pattern: str
    status: int
    times: int = 1_000_000
    headers: dict[str, str] = field(default_factory=dict)
    after: bool = False
    body: bytes | None = None  # None: an error's


class HubServer(ThreadingHTTPServer):
    """The hub. `faults` and `before_commit` are for tests; `log` holds one record a request."""

    daemon_threads = True

    def __init__(self, root: Path, port: int = 0) -> None:
        super().__init__(("127.0.0.1", port), Handler)
        self.root = root
        self.lock = threading.Lock()
        self.log: list[dict[str, Any]] = []
        self.faults: list[Fault] = []
        self.before_commit: list[Callable[[], None]] = []
        self.after_commit: list[Callable[[], None]] = []

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def repository(self, name: str) -> Repository:
        if not re.fullmatch(r"[\w.-]+/[\w.-]+", name) or not (self.root / name).is_dir():
            raise Refusal(404, "Repository not found", {"X-Error-Code": "RepoNotFound"})
        return Repository(self.root / name)

    def create(self, name: str) -> Repository:
        (self.root / name).mkdir(parents=True)
        return Repository(self.root / name)

    def fault(self, line: str, *, after: bool) -> None:
        with self.lock:
            for fault in self.faults:
                if fault.times and fault.after == after and re.search(fault.pattern, line):
                    fault.times -= 1
                    raise Refusal(fault.status, "told to fail", dict(fault.headers), fault.body)

    def handle_error(self, request: Any, client_address: Any) -> None:  # noqa: ANN401 - the base's signature
        if not isinstance(sys.exception(), ConnectionError):  # a killed client is what some tests are about
            super().handle_error(request, client_address)


class Handler(BaseHTTPRequestHandler):
    server: HubServer
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *arguments: object) -> None:  # noqa: A002 - the base's signature
        del format, arguments

    def answer(self) -> None:
        length = int(self.headers.get("Content-Length") or 0)
        body = self.rfile.read(length)
        if "chunked" in self.headers.get("Transfer-Encoding", ""):
            body = b"".join(self._chunks())
        url = urlsplit(self.path)
        path = unquote(url.path)
        query = {key: values[0] for key, values in parse_qs(url.query).items()}
        line = f"{self.command} {path}"
        try:
            self.server.fault(line, after=False)
            value = self._route(path, query, body)
            self.server.fault(line, after=True)
            status, headers = 200, {}
            if isinstance(value, tuple):
                value, status, headers = value
        except Refusal as refusal:
            value = {"error": refusal.message} if refusal.body is None else refusal.body
            status, headers = refusal.status, refusal.headers
            headers.setdefault("X-Error-Message", refusal.message.splitlines()[0] if refusal.message else "")
        with self.server.lock:
            told = {"request": line, "status": status, "body": body.decode("latin-1")}
            self.server.log.append(told | {"authorized": "Authorization" in self.headers})
        data = value if isinstance(value, bytes) else json.dumps(value).encode()
        self.send_response(status)
        usual = {"Content-Type": "application/json", "Content-Length": str(len(data))}
        for name, text in (usual | headers).items():
            self.send_header(name, text)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    do_GET = do_POST = do_PUT = do_HEAD = answer  # noqa: N815 - the base's names

    def _chunks(self) -> Iterator[bytes]:
        while size := int(self.rfile.readline().split(b";")[0], 16):
            yield self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()

    def _route(self, path: str, query: dict[str, str], body: bytes) -> Any:  # noqa: ANN401, C901, PLR0911 - a table
        if found := re.fullmatch(r"/lfs/([\w.-]+/[\w.-]+)/([0-9a-f]{64})", path):
            return self._lfs(found[1], found[2], body)
        rights = TOKENS.get(self.headers.get("Authorization", "").removeprefix("Bearer "))
        if rights is None:
            raise Refusal(401, "Invalid username or password.")
        if path == "/api/whoami-v2":
            return {"name": OWNER[rights], "type": "user"}
        if found := re.fullmatch(r"/datasets/([\w.-]+/[\w.-]+)\.git/info/lfs/objects/(batch|verify)", path):
            return self._batch(found[1], json.loads(body)) if found[2] == "batch" else {}
        if found := re.fullmatch(r"(?:/datasets)?/([\w.-]+/[\w.-]+)/resolve/(refs/pr/\d+|[^/]+)/(.+)", path):
            return self._resolve(*found.groups())
        if found := re.fullmatch(r"/api/datasets/([\w.-]+/[\w.-]+)(?:/(\w+))?(?:/(refs/pr/\d+|[^/]+))?/?", path):
            name, what, which = found.groups()
            repository = self.server.repository(name)
            match self.command, what:
                case "GET", None | "revision":
                    sha = repository.head(which or "main")
                    return {
                        "id": name,
                        "sha": sha,
                        "siblings": [],
                        "tags": [],
                        "private": False,
                        "lastModified": WHEN,
                    }
                case "GET", "tree":
                    return repository.tree(which)
                case "POST", "preupload":
                    return self._preupload(repository, which, json.loads(body))
                case "GET", "discussions":
                    return self._discussions(repository, which)
                case "POST", "commit":
                    if rights != "write":
                        raise Refusal(403, "Forbidden: you must have write rights")
                    return self._commit(name, repository, which, body, pull_request=query.get("create_pr") == "1")
        raise Refusal(404, f"no such thing: {path}")

    def _preupload(self, repository: Repository, revision: str, given: dict[str, Any]) -> dict[str, Any]:
        present = {entry["path"]: entry for entry in repository.tree(revision)}
        files = []
        for item in given["files"]:
            binary = item["path"].endswith(".safetensors")
            entry = {"path": item["path"], "uploadMode": "lfs" if binary else "regular", "shouldIgnore": False}
            known = present.get(item["path"])
            if known is not None:
                entry["oid"] = known.get("lfs", known)["oid"]
            files.append(entry)
        return {"files": files}

    def _batch(self, name: str, given: dict[str, Any]) -> dict[str, Any]:
        repository = self.server.repository(name)
        objects = []
        for item in given["objects"]:
            entry = {"oid": item["oid"], "size": item["size"]}
            if not (repository.lfs / item["oid"]).exists():
                href = f"http://localhost:{self.server.server_port}/lfs/{name}/{item['oid']}"
                verify = f"{self.server.endpoint}/datasets/{name}.git/info/lfs/objects/verify"
                entry["actions"] = {"upload": {"href": href}, "verify": {"href": verify}}
            objects.append(entry)
        return {"transfer": "basic", "objects": objects}

    def _lfs(self, name: str, oid: str, body: bytes) -> bytes | dict[str, Any]:
        file = self.server.repository(name).lfs / oid
        if self.command == "PUT":
            if hashlib.sha256(body).hexdigest() != oid:
                raise Refusal(400, "the content's digest is another")
            partial = file.with_name(f"{oid}.{threading.get_ident()}")
            partial.write_bytes(body)
            partial.replace(file)
            return {}
        return file.read_bytes()

    def _resolve(self, name: str, revision: str, path: str) -> Any:  # noqa: ANN401 - bytes with headers
        repository = self.server.repository(name)
        commit = repository.head(revision)
        entry = next((item for item in repository.tree(commit) if item["path"] == path), None)
        if entry is None:
            raise Refusal(404, "Entry not found", {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": commit})
        headers = {
            "X-Repo-Commit": commit,
            "ETag": f'"{entry["oid"]}"',
            "Content-Type": "application/octet-stream",
        }
        if "lfs" in entry:
            oid = entry["lfs"]["oid"]
            headers |= {"X-Linked-Etag": f'"{oid}"', "X-Linked-Size": str(entry["size"])}
            headers["Location"] = f"http://localhost:{self.server.server_port}/lfs/{name}/{oid}"
            return b"", 302, headers
        return repository.read(commit, path), 200, headers

    def _discussions(self, repository: Repository, number: str | None) -> dict[str, Any]:
        found = repository.discussions()
        if number is None:
            listed = [{key: value for key, value in item.items() if key != "events"} for item in found]
            return {"discussions": listed, "count": len(found), "start": 0}
        return found[int(number) - 1] | {"changes": {"base": "main"}, "filesWithConflicts": [], "diff": ""}

    def _commit(  # noqa: C901 - one commit's steps
        self, name: str, repository: Repository, revision: str, body: bytes, *, pull_request: bool
    ) -> dict[str, Any]:
        while self.server.before_commit:
            self.server.before_commit.pop(0)()
        lines = [json.loads(line) for line in body.splitlines()]
        head = lines[0]["value"]
        files: dict[str, bytes | None] = {}
        for line in lines[1:]:
            value = line["value"]
            match line["key"]:
                case "file":
                    files[value["path"]] = base64.b64decode(value["content"])
                case "lfsFile":
                    if not (repository.lfs / value["oid"]).exists():
                        raise Refusal(400, f"no LFS object {value['oid']}")
                    files[value["path"]] = POINTER.format(value["oid"], value["size"]).encode()
                case "deletedFile":
                    files[value["path"]] = None
        with self.server.lock:
            tip = repository.head(revision)
            if head.get("parentCommit", tip) != tip:
                raise Refusal(412, "A commit has happened since. Please refresh and try again.")
            found = repository.discussions()
            ref = f"refs/pr/{len(found) + 1}" if pull_request else revision
            ref = ref if ref.startswith("refs/") else f"refs/heads/{ref}"
            message = f"{head['summary']}\n\n{head['description']}"
            commit = repository.commit_files(ref, files, message, tip)
            if pull_request:
                repository.discuss(name, head["summary"], head["description"])
        while self.server.after_commit:
            self.server.after_commit.pop(0)()
        answer = {"commitUrl": f"{self.server.endpoint}/datasets/{name}/commit/{commit}", "commitOid": commit}
        if pull_request:
            answer["pullRequestUrl"] = (
                f"{self.server.endpoint}/datasets/{name}/discussions/{ref.rpartition('/')[2]}"
            )
        return answer


@contextmanager
def serving(root: Path) -> Iterator[HubServer]:
    """A hub in a thread."""
    server = HubServer(root)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
