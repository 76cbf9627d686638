"""A small hub: dataset repositories in bare git repositories, an LFS store, pull requests, over real HTTP.

Made for tests of publishing: it keeps a log of every request, and it can be told to fail, to lie and to be slow.
Run it by itself with `python tests/hub_server.py ROOT --port 8000`; the token is `hf_test...`, see TOKENS.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
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
COMMIT = re.compile(r"[0-9a-f]{40}")
KNOWN: dict[tuple[Path, tuple[str, ...]], bytes] = {}  # by repository and question
PERSON = {"GIT_AUTHOR_NAME": "hub", "GIT_AUTHOR_EMAIL": "hub@example.org", "GIT_CONFIG_GLOBAL": os.devnull}
PERSON |= {"GIT_COMMITTER_NAME": "hub", "GIT_COMMITTER_EMAIL": "hub@example.org", "GIT_CONFIG_SYSTEM": os.devnull}


class Refusal(Exception):  # noqa: N818 - an answer
    """An answer other than 200."""

    def __init__(self, status: int, message: str, headers: dict[str, str] | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.headers = status, message, headers or {}


@dataclass
class Fault:
    """Answers of `status` to the next `times` requests whose `METHOD path` matches; `after`: once it is done."""

    pattern: str
    status: int
    times: int
    headers: dict[str, str] = field(default_factory=dict)
    after: bool = False


class Repository:
    """One dataset: a bare git repository and its discussions."""

    def __init__(self, folder: Path) -> None:
        self.git_dir, self.lfs, self.file = folder / "git", folder / "lfs", folder / "discussions.json"
        if not self.git_dir.exists():
            self.lfs.mkdir(parents=True)
            self.git("init", "--quiet", "--bare", "--initial-branch=main", str(self.git_dir), bare=False)

    def git(self, *arguments: str, data: bytes | None = None, bare: bool = True, index: str = "") -> bytes:
        command = ["git", *(["--git-dir", str(self.git_dir)] if bare else []), *arguments]
        environment = {**os.environ, **PERSON, **({"GIT_INDEX_FILE": index} if index else {})}
        done = subprocess.run(command, input=data, capture_output=True, env=environment, check=False)
        if done.returncode:
            raise Refusal(404, done.stderr.decode())
        return done.stdout

    def known(self, *arguments: str) -> bytes:
        """What a commit or a blob says, which stays so."""
        if (self.git_dir, arguments) not in KNOWN:
            KNOWN[self.git_dir, arguments] = self.git(*arguments)
        return KNOWN[self.git_dir, arguments]

    def discussions(self) -> list[dict[str, Any]]:
        return json.loads(self.file.read_text()) if self.file.exists() else []

    def head(self, revision: str) -> str:
        ask = self.known if COMMIT.fullmatch(revision) else self.git
        return ask("rev-parse", "--verify", "--quiet", f"{revision}^{{commit}}").decode().strip()

    def seed(self, source: Path, message: str = "Add the dataset") -> str:
        """Commit a folder's files to main."""
        files = {
            p.relative_to(source).as_posix(): p.read_bytes() for p in sorted(source.rglob("*")) if p.is_file()
        }
        return self.commit_files("refs/heads/main", files, message)

    def commit_files(self, ref: str, files: Mapping[str, bytes | None], message: str, parent: str = "") -> str:
        """Add, replace or (None) delete files in one commit."""
        try:
            parent = parent or self.head(ref)
        except Refusal:
            parent = ""
        with tempfile.TemporaryDirectory() as scratch:
            index = str(Path(scratch) / "index")
            if parent:
                self.git("read-tree", parent, index=index)
            lines = []
            for path, content in files.items():
                blob = "0" * 40 if content is None else ""
                if content is not None:
                    blob = self.git("hash-object", "-w", "--stdin", data=content).decode().strip()
                lines.append(f"{'0' if content is None else '100644'} {blob}\t{path}")
            self.git("update-index", "--index-info", data="\n".join(lines).encode() + b"\n", index=index)
            tree = self.git("write-tree", index=index).decode().strip()
        parents = ["-p", parent] if parent else []
        commit = self.git("commit-tree", tree, *parents, data=message.encode()).decode().strip()
        self.git("update-ref", ref, commit)
        return commit

    def tree(self, revision: str) -> list[dict[str, Any]]:
        entries = []
        for line in self.known("ls-tree", "-r", "-l", "-z", self.head(revision)).decode().split("\0")[:-1]:
            meta, path = line.split("\t")
            _, _, blob, size = meta.split()
            entry: dict[str, Any] = {"type": "file", "path": path, "oid": blob, "size": int(size)}
            if entry["size"] < 200 and (found := POINTED.fullmatch(self.known("cat-file", "blob", blob))):
                entry["lfs"] = {"oid": found[1].decode(), "size": int(found[2]), "pointerSize": entry["size"]}
                entry["size"] = int(found[2])
            entries.append(entry)
        return entries

    def read(self, revision: str, path: str) -> bytes:
        data = self.known("cat-file", "blob", f"{self.head(revision)}:{path}")
        found = POINTED.fullmatch(data)
        return (self.lfs / found[1].decode()).read_bytes() if found else data


class HubServer(ThreadingHTTPServer):
    """The hub. `faults`, `lies` and `before_commit` are for tests; `log` holds one record a request."""

    daemon_threads = True

    def __init__(self, root: Path, port: int = 0) -> None:
        super().__init__(("127.0.0.1", port), Handler)
        self.root = root
        self.lock = threading.Lock()
        self.log: list[dict[str, Any]] = []
        self.faults: list[Fault] = []
        self.lies: set[str] = set()  # out of: blob, lfs
        self.claims: dict[str, str] = {}  # digests of files that it says to hold
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
                    raise Refusal(fault.status, "told to fail", fault.headers)

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
            value, status, headers = {"error": refusal.message}, refusal.status, refusal.headers
            headers.setdefault("X-Error-Message", refusal.message.splitlines()[0] if refusal.message else "")
        with self.server.lock:
            self.server.log.append({"request": line, "status": status, "body": body.decode("latin-1")})
        data = value if isinstance(value, bytes) else json.dumps(value).encode()
        self.send_response(status)
        for name, text in {
            "Content-Type": "application/json",
            "Content-Length": str(len(data)),
            **headers,
        }.items():
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
            if item["path"] in self.server.claims:
                entry["oid"] = self.server.claims[item["path"]]
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
        data = repository.read(commit, path)
        if "blob" in self.server.lies and revision != repository.head("main"):
            data = data[:-2] + b"?\n"
        return data, 200, headers

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
                    oid = "0" * 64 if "lfs" in self.server.lies else value["oid"]
                    files[value["path"]] = POINTER.format(oid, value["size"]).encode()
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
                comment = {"edited": False, "hidden": False, "latest": {"raw": head["description"]}}
                author = {"name": "writer"}
                event = {"id": "1", "type": "comment", "createdAt": WHEN, "author": author, "data": comment}
                entry = {"num": len(found) + 1, "title": head["summary"], "status": "open", "isPullRequest": True}
                entry |= {"createdAt": WHEN, "author": author, "repo": {"name": name, "type": "dataset"}}
                partial = repository.file.with_suffix(".partial")
                partial.write_text(json.dumps([*found, entry | {"events": [event]}]))
                partial.replace(repository.file)
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


if __name__ == "__main__":
    PARSER = argparse.ArgumentParser(description=__doc__)
    PARSER.add_argument("root", type=Path)
    PARSER.add_argument("--port", type=int, default=8000)
    OPTIONS = PARSER.parse_args()
    HubServer(OPTIONS.root, OPTIONS.port).serve_forever()
