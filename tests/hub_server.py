"""A small hub: dataset repositories in memory, an LFS store, pull requests, over real HTTP.

Made for tests of publishing: it keeps a log of every request, and it can be told to fail, to lie and to be slow.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

WRITER = "hf_" + "testwriter" * 3
READER = "hf_" + "testreader" * 3
TOKENS = {WRITER: "write", READER: "read"}
OWNER = {"write": "writer", "read": "reader"}
WHEN = "2026-01-01T00:00:00.000Z"
POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:{}\nsize {}\n"
POINTED = re.compile(rb"version https://git-lfs\S+\noid sha256:([0-9a-f]{64})\nsize (\d+)\n")


class Refusal(Exception):  # noqa: N818 - an answer
    """An answer other than 200."""

    def __init__(
        self, status: int, message: str, headers: dict[str, str] | None = None, body: bytes | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.headers, self.body = status, message, headers or {}, body


@dataclass
class Repository:
    """One dataset: commits (parent and files) by number, refs, LFS objects and discussions."""

    commits: dict[str, tuple[str, dict[str, bytes]]] = field(default_factory=dict)
    refs: dict[str, str] = field(default_factory=dict)
    lfs: dict[str, bytes] = field(default_factory=dict)
    discussions: list[dict[str, Any]] = field(default_factory=list)

    def discuss(self, name: str, title: str, text: str) -> None:
        """Open a pull request with a first comment; `name` is the repository's."""
        author = {"name": "writer"}
        comment = {"edited": False, "hidden": False, "latest": {"raw": text}}
        event = {"id": "1", "type": "comment", "createdAt": WHEN, "author": author, "data": comment}
        entry = {"num": len(self.discussions) + 1, "title": title, "status": "open", "isPullRequest": True}
        entry |= {"createdAt": WHEN, "author": author, "repo": {"name": name, "type": "dataset"}}
        self.discussions.append(entry | {"events": [event]})

    def head(self, revision: str = "main") -> str:
        found = self.refs.get(revision, revision)
        if found not in self.commits:
            raise Refusal(404, f"no revision {revision}")
        return found

    def ahead(self, revision: str) -> int:
        """Commits that main does not have."""
        count, commit = 0, self.head(revision)
        while commit != self.refs["main"]:
            count, commit = count + 1, self.commits[commit][0]
        return count

    def seed(self, source: Path) -> str:
        """Commit a folder's files to main."""
        files = {path.relative_to(source).as_posix(): path for path in source.rglob("*") if path.is_file()}
        return self.commit("main", {name: path.read_bytes() for name, path in files.items()}, "Add the dataset")

    def commit(self, ref: str, files: Mapping[str, bytes | None], message: str, parent: str = "") -> str:
        """Add, replace or (None) delete files in one commit."""
        parent = parent or self.refs.get(ref, "")
        changed: dict[str, bytes | None] = {**(self.commits[parent][1] if parent else {}), **files}
        whole = {path: data for path, data in changed.items() if data is not None}
        told = [parent, ref, message, *sorted((path, blob(data)) for path, data in whole.items())]
        number = hashlib.sha1(json.dumps(told).encode(), usedforsecurity=False).hexdigest()
        self.commits[number], self.refs[ref] = (parent, whole), number
        return number

    def tree(self, revision: str) -> list[dict[str, Any]]:
        entries = []
        for path, data in sorted(self.commits[self.head(revision)][1].items()):
            entry: dict[str, Any] = {"type": "file", "path": path, "oid": blob(data), "size": len(data)}
            if found := POINTED.fullmatch(data):
                entry["lfs"] = {"oid": found[1].decode(), "size": int(found[2]), "pointerSize": len(data)}
                entry["size"] = int(found[2])
            entries.append(entry)
        return entries

    def read(self, revision: str, path: str) -> bytes:
        data = self.commits[self.head(revision)][1][path]
        found = POINTED.fullmatch(data)
        return self.lfs[found[1].decode()] if found else data


def blob(data: bytes) -> str:
    """The number that git gives a file's content, by which a client knows what is there."""
    return hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()


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
    """The hub. `faults`, `before_commit` and `after_commit` are for tests; `log` holds a record per request."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.lock = threading.Lock()
        self.repositories: dict[str, Repository] = {}
        self.log: list[dict[str, Any]] = []
        self.faults: list[Fault] = []
        self.before_commit: list[Callable[[], None]] = []
        self.after_commit: list[Callable[[], None]] = []

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def repository(self, name: str) -> Repository:
        if name not in self.repositories:
            raise Refusal(404, "Repository not found", {"X-Error-Code": "RepoNotFound"})
        return self.repositories[name]

    def create(self, name: str) -> Repository:
        return self.repositories.setdefault(name, Repository())

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
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if "chunked" in self.headers.get("Transfer-Encoding", ""):
            body = b"".join(self._chunks())
        url = urlsplit(self.path)
        path = unquote(url.path)
        query = {key: values[0] for key, values in parse_qs(url.query).items()}
        line = f"{self.command} {path}"
        status, headers = 200, dict[str, str]()
        try:
            self.server.fault(line, after=False)
            value = self._route(path, query, body)
            self.server.fault(line, after=True)
            if isinstance(value, tuple):
                value, status, headers = value
        except Refusal as refusal:
            value = {"error": refusal.message} if refusal.body is None else refusal.body
            status, headers = refusal.status, refusal.headers
            headers.setdefault("X-Error-Message", refusal.message)
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

    def _route(self, path: str, query: dict[str, str], body: bytes) -> Any:  # noqa: ANN401, C901, PLR0911, PLR0912 - a table
        if found := re.fullmatch(r"/lfs/([\w.-]+/[\w.-]+)/([0-9a-f]{64})", path):
            objects = self.server.repository(found[1]).lfs
            if self.command != "PUT":
                return objects[found[2]]
            if hashlib.sha256(body).hexdigest() != found[2]:
                raise Refusal(400, "the content's digest is another")
            objects[found[2]] = body
            return {}
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
                    about = {"siblings": [], "tags": [], "private": False, "lastModified": WHEN}
                    return {"id": name, "sha": repository.head(which or "main")} | about
                case "GET", "tree":
                    return repository.tree(which)
                case "POST", "preupload":
                    present = {entry["path"]: entry for entry in repository.tree(which)}
                    return {"files": [_planned(item["path"], present) for item in json.loads(body)["files"]]}
                case "GET", "discussions" if which is None:
                    listed = [{k: v for k, v in item.items() if k != "events"} for item in repository.discussions]
                    return {"discussions": listed, "count": len(listed), "start": 0}
                case "GET", "discussions":
                    changes = {"changes": {"base": "main"}, "filesWithConflicts": [], "diff": ""}
                    return repository.discussions[int(which) - 1] | changes
                case "POST", "commit":
                    if rights != "write":
                        raise Refusal(403, "Forbidden: you must have write rights")
                    return self._commit(name, repository, which, body, pull_request=query.get("create_pr") == "1")
        raise Refusal(404, f"no such thing: {path}")

    def _batch(self, name: str, given: dict[str, Any]) -> dict[str, Any]:
        objects = []
        for item in given["objects"]:
            entry = {"oid": item["oid"], "size": item["size"]}
            if item["oid"] not in self.server.repository(name).lfs:
                href = f"http://localhost:{self.server.server_port}/lfs/{name}/{item['oid']}"
                verify = f"{self.server.endpoint}/datasets/{name}.git/info/lfs/objects/verify"
                entry["actions"] = {"upload": {"href": href}, "verify": {"href": verify}}
            objects.append(entry)
        return {"transfer": "basic", "objects": objects}

    def _resolve(self, name: str, revision: str, path: str) -> tuple[bytes, int, dict[str, str]]:
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

    def _commit(
        self, name: str, repository: Repository, revision: str, body: bytes, *, pull_request: bool
    ) -> dict[str, Any]:
        while self.server.before_commit:
            self.server.before_commit.pop(0)()
        head, *lines = (json.loads(line) for line in body.splitlines())
        summary, description = head["value"]["summary"], head["value"]["description"]
        files: dict[str, bytes | None] = {}
        for value, kind in ((line["value"], line["key"]) for line in lines):
            if kind == "lfsFile" and value["oid"] not in repository.lfs:
                raise Refusal(400, f"no LFS object {value['oid']}")
            match kind:
                case "file":
                    files[value["path"]] = base64.b64decode(value["content"])
                case "lfsFile":
                    files[value["path"]] = POINTER.format(value["oid"], value["size"]).encode()
                case "deletedFile":
                    files[value["path"]] = None
        with self.server.lock:
            tip = repository.head(revision)
            if head["value"].get("parentCommit", tip) != tip:
                raise Refusal(412, "A commit has happened since. Please refresh and try again.")
            ref = f"refs/pr/{len(repository.discussions) + 1}" if pull_request else revision
            commit = repository.commit(ref, files, f"{summary}\n\n{description}", tip)
            if pull_request:
                repository.discuss(name, summary, description)
        while self.server.after_commit:
            self.server.after_commit.pop(0)()
        where = f"{self.server.endpoint}/datasets/{name}"
        answer = {"commitUrl": f"{where}/commit/{commit}", "commitOid": commit}
        return answer | ({"pullRequestUrl": f"{where}/discussions/{ref[8:]}"} if pull_request else {})


def _planned(path: str, present: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    """How a file is to be uploaded, and the number of what is there already."""
    mode = "lfs" if path.endswith(".safetensors") else "regular"
    known = present.get(path)
    given = {} if known is None else {"oid": known.get("lfs", known)["oid"]}
    return {"path": path, "uploadMode": mode, "shouldIgnore": False} | given


@contextmanager
def serving() -> Iterator[HubServer]:
    """A hub in a thread."""
    server = HubServer()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
