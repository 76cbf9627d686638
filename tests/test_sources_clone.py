"""Sources are pinned once, by git or from a package index; packages are files of which nothing runs."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import threading
import zipfile
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from repository import ROOT, own_dataset
from source_remotes import SOON, Upstream, git, packed

from traceproof.checkouts import packages as package
from traceproof.checkouts.gitrun import Git
from traceproof.checkouts.packages import download_sdist
from traceproof.checkouts.pins import (
    DATASET,
    NAME,
    ORIGINS,
    Pin,
    State,
    lock_digest,
    read_lock,
    resolve,
    write_lock,
)
from traceproof.cli import run
from traceproof.cli.sources import clone_repos
from traceproof.errors import TraceproofError
from traceproof.programs import for_untrusted, without_secrets


@pytest.fixture
def upstream(tmp_path: Path) -> Upstream:
    upstream = Upstream(tmp_path / "upstream")
    upstream.commit({"fla/__init__.py": "one"})
    return upstream


def bring(folder: Path, *names: str, **options: list[str]) -> dict[str, dict[str, str]]:
    """`traceproof clone-repos`; the records by source."""
    clone_repos(list(names), target_dir=folder / "sources", lock=folder / "sources.lock", **options)  # type: ignore[arg-type]
    config = json.loads((folder / "sources" / "repos_config.json").read_text())
    assert config["target_dir"] == str(folder / "sources")
    records: dict[str, dict[str, str]] = config["repositories"]
    return records


def test_a_branch_is_pinned_once_and_not_followed(tmp_path: Path, upstream: Upstream) -> None:
    first = upstream.git("rev-parse", "HEAD")
    record = bring(tmp_path, "fla", url=[f"fla={upstream.url}"], branch=["fla=main"])["fla"]
    assert (record["status"], record["commit"], record["url"]) == ("cloned", first, upstream.url)
    assert record["path"] == str(tmp_path / "sources" / "fla")
    assert record["digest"] == upstream.git("rev-parse", f"{first}^{{tree}}")
    second = upstream.commit({"fla/__init__.py": "two"})
    assert bring(tmp_path, "fla")["fla"]["commit"] == first
    record = bring(tmp_path, "fla", branch=["fla=main"])["fla"]
    assert (record["status"], record["commit"]) == ("updated", second)
    assert read_lock(tmp_path / "sources.lock")["fla"].ref == "refs/heads/main"


def test_a_moved_tag_is_refused(tmp_path: Path, upstream: Upstream) -> None:
    upstream.git("tag", "-a", "-m", "x", "v1")
    first = bring(tmp_path, "fla", url=[f"fla={upstream.url}"], tag=["fla=v1"])["fla"]["commit"]
    second = upstream.commit({"fla/__init__.py": "two"})
    upstream.git("tag", "-f", "v1")
    with pytest.raises(TraceproofError, match=rf"(?s)v1 of .* was moved.*{first}.*{second}"):
        bring(tmp_path, "fla", tag=["fla=v1"])
    assert bring(tmp_path, "fla")["fla"]["commit"] == first


def test_a_branch_and_a_tag_of_one_name_have_to_be_told_apart(tmp_path: Path, upstream: Upstream) -> None:
    upstream.git("tag", "main")
    upstream.commit({"a": "2"})
    with pytest.raises(TraceproofError, match="both a tag and a branch"):
        resolve(upstream.url, "main", git=Git(tmp_path, SOON))


def test_what_failed_is_recorded_and_not_pinned(tmp_path: Path, upstream: Upstream) -> None:
    urls = [f"fla={upstream.url}", f"mine={upstream.url}"]
    with pytest.raises(TraceproofError, match=r"(?s)1 of 2 sources.*no such commit"):
        bring(tmp_path, "fla", "mine", url=urls, commit=[f"mine={'0' * 40}"])
    config = json.loads((tmp_path / "sources" / "repos_config.json").read_text())
    assert {name: one["status"] for name, one in config["repositories"].items()} == {
        "fla": "cloned",
        "mine": "failed",
    }
    assert list(read_lock(tmp_path / "sources.lock")) == ["fla"]


def test_a_mirror_is_git_s_own_affair(tmp_path: Path, upstream: Upstream, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tmp_path / "gitconfig"
    git(tmp_path, "config", "-f", str(config), f"url.{upstream.url}.insteadOf", "https://example.invalid/fla")
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", str(config))
    record = bring(tmp_path, "fla", url=["fla=https://example.invalid/fla"])["fla"]
    assert record["url"] == "https://example.invalid/fla"
    assert (tmp_path / "sources" / "fla" / "fla" / "__init__.py").read_text() == "one"


@pytest.mark.parametrize("variable", [None, "GIT_SSH", "GIT_SSH_COMMAND"])
def test_the_user_s_own_ssh_command_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str | None
) -> None:
    config, called, script = tmp_path / "gitconfig", tmp_path / "called", tmp_path / "script"
    script.write_text(f"#!/bin/sh\necho here > {called}\nexit 1\n")
    script.chmod(0o755)
    if variable is None:
        git(tmp_path, "config", "-f", str(config), "core.sshCommand", str(script))
        monkeypatch.setenv("GIT_CONFIG_GLOBAL", str(config))
    else:
        monkeypatch.setenv(variable, str(script))
    with pytest.raises(TraceproofError):
        Git(tmp_path, SOON).network("ls-remote", "ssh://git@example.invalid/fla")
    assert called.is_file()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"branch": ["fla"]}, "expected NAME=VALUE"),
        ({"branch": ["fla=a"], "tag": ["fla=b"]}, "give one of --branch, --tag"),
        ({"branch": ["flsh=a"]}, "unknown sources: flsh"),
        ({"release": ["mine=1.0"], "url": ["mine=https://example.org/x"]}, "not known under which name"),
    ],
)
def test_bad_options_are_said(tmp_path: Path, options: dict[str, list[str]], message: str) -> None:
    with pytest.raises(TraceproofError, match=message):
        bring(tmp_path, *(["mine"] if "release" in options else ["fla"]), **options)


def test_the_rule_brings_what_is_pinned_and_nothing_else(tmp_path: Path) -> None:
    dataset, lock, out = own_dataset(tmp_path / "data", "rmsnorm/rmsnorm_h96"), tmp_path / NAME, tmp_path / "out"
    write_lock(lock, {DATASET: Pin(package="flashinfer-bench", version="0.1.2")})
    before = lock.read_bytes()
    options = {"lock": lock, "dataset": dataset, "origin": json.dumps({"path": str(dataset)}), "log": out / "log"}
    command = [sys.executable, str(ROOT / "scripts" / "job.py"), "clone", "--out", str(out / "repos_config.json")]
    command += [word for name, value in options.items() for word in (f"--{name}", str(value))]
    subprocess.run(command, check=True, env=os.environ | {"PYTHONPATH": str(ROOT / "src")}, timeout=60)
    assert list(json.loads((out / "repos_config.json").read_text())["repositories"]) == [DATASET]
    assert lock.read_bytes() == before


def test_a_lock_says_every_problem(tmp_path: Path) -> None:
    path = tmp_path / "sources.lock"
    path.write_text('{"sources": {"fla": {"url": "--upload-pack=x", "commit": "12"}, "x": {"package": "y"}}}')
    with pytest.raises(TraceproofError, match=r"(?s)sources\.fla\.url.*sources\.fla\.commit.*sources\.x"):
        read_lock(path)


def test_the_name_of_a_branch_does_not_count(tmp_path: Path) -> None:
    pins = {"fla": Pin(url="https://example.org/x", commit="1" * 40, ref="refs/heads/main")}
    write_lock(tmp_path / "sources.lock", pins)
    assert read_lock(tmp_path / "sources.lock") == pins
    assert lock_digest(pins) == lock_digest({"fla": Pin(url="https://example.org/x", commit="1" * 40)})
    assert lock_digest(pins) != lock_digest({"fla": Pin(url="https://example.org/x", commit="2" * 40)})


@pytest.fixture
def wheel(monkeypatch: pytest.MonkeyPatch) -> None:
    """A package index with one package in any version."""

    def download(pin: Pin, folder: Path) -> Path:
        folder.mkdir()
        path = folder / f"fla_core-{pin.version}-py3-none-any.whl"
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr(zipfile.ZipInfo("fla/__init__.py"), f"version = '{pin.version}'")
            archive.writestr(zipfile.ZipInfo("../outside.py"), "")
        return path

    monkeypatch.setattr(package, "_download", download)


@pytest.mark.usefixtures("wheel")
def test_a_released_version_is_a_source_too(tmp_path: Path) -> None:
    record = bring(tmp_path, "fla", release=["fla=1.0"])["fla"]
    assert (record["status"], record["version"]) == ("cloned", "1.0")
    assert record["commit"] is None
    pin = read_lock(tmp_path / "sources.lock")["fla"]
    assert pin.package == "fla-core"
    assert pin.sha256
    assert not (tmp_path / "sources" / "outside.py").exists()
    assert bring(tmp_path, "fla")["fla"]["status"] == "present"
    assert bring(tmp_path, "fla", release=["fla=1.1"])["fla"]["status"] == "updated"
    assert (tmp_path / "sources" / "fla" / "fla" / "__init__.py").read_text() == "version = '1.1'"


@pytest.mark.usefixtures("wheel")
def test_a_release_comes_from_git_at_its_tag_s_commit_and_where_git_has_it_not_from_the_index(
    tmp_path: Path, upstream: Upstream, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "gitconfig"
    git(tmp_path, "config", "-f", str(config), f"url.{upstream.url}.insteadOf", ORIGINS["fla"].url)
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", str(config))
    write_lock(tmp_path / NAME, {"fla": Pin(package="fla-core", version="1.0", sha256=None)})

    def again() -> dict[str, str]:
        shutil.rmtree(tmp_path / "sources", ignore_errors=True)
        capsys.readouterr()
        return bring(tmp_path, "fla")["fla"]

    assert (again()["version"], read_lock(tmp_path / NAME)["fla"].commit) == ("1.0", None)
    told = f"fla: fla-core 1.0 from the package index, since git could not bring it from {ORIGINS['fla'].url}"
    assert f"{told}: {ORIGINS['fla'].url} has no branch or tag" in capsys.readouterr().err
    upstream.git("tag", "v1.0")
    record, pin = again(), read_lock(tmp_path / NAME)["fla"]
    assert (record["commit"], record["url"]) == (upstream.git("rev-parse", "HEAD"), ORIGINS["fla"].url)
    assert (pin.commit, pin.ref, pin.package, pin.version) == (
        record["commit"],
        "refs/tags/v1.0",
        "fla-core",
        "1.0",
    )
    assert pin.sha256  # of the first call
    assert "package index" not in capsys.readouterr().err
    upstream.folder.rename(tmp_path / "gone")
    record = again()
    assert (record["status"], record["version"], bool(record["commit"])) == ("cloned", "1.0", False)
    assert "fla-core 1.0 from the package index, since git could not bring it" in capsys.readouterr().err
    assert read_lock(tmp_path / NAME)["fla"] == pin
    assert bring(tmp_path, "fla")["fla"]["status"] == "present"


@pytest.mark.usefixtures("wheel")
def test_an_edited_package_is_left_alone(tmp_path: Path) -> None:
    target = tmp_path / "fla"
    state, pin = package.bring_package(target, Pin(package="fla-core", version="1.0"))
    assert state is State.CLONED
    (target / "fla" / "__init__.py").write_text("mine")
    with pytest.raises(TraceproofError, match="local changes"):
        package.bring_package(target, pin)


@pytest.mark.usefixtures("wheel")
def test_another_file_than_the_pinned_one_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TraceproofError, match="not the file that was pinned"):
        package.bring_package(tmp_path / "fla", Pin(package="fla-core", version="1.0", sha256="0" * 64))
    assert not (tmp_path / "fla").exists()


def test_elsewhere_the_repository_s_lock_and_folder_are_meant(
    tmp_path: Path, upstream: Upstream, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "home"
    write_lock(home / NAME, {"fla": Pin(url=upstream.url, commit=upstream.git("rev-parse", "HEAD"))})
    monkeypatch.setattr(run, "repository", lambda: home)
    monkeypatch.chdir(tmp_path)
    clone_repos(["fla"])
    assert (home / "sources" / "fla" / "fla" / "__init__.py").read_text() == "one"
    assert not (tmp_path / "sources").exists()


@pytest.mark.usefixtures("wheel")
def test_a_release_of_a_file_per_platform_has_several_digests_and_cloning_changes_no_lock(tmp_path: Path) -> None:
    bring(tmp_path, "fla", release=["fla=1.0"])
    pin = read_lock(tmp_path / NAME)["fla"]
    assert isinstance(pin.sha256, str)
    write_lock(tmp_path / NAME, {"fla": pin.model_copy(update={"sha256": sorted(["0" * 64, pin.sha256])})})
    before = (tmp_path / NAME).read_text()
    assert bring(tmp_path, "fla")["fla"]["status"] == "present"
    shutil.rmtree(tmp_path / "sources")
    assert bring(tmp_path, "fla")["fla"]["status"] == "cloned"
    assert (tmp_path / NAME).read_text() == before
    write_lock(tmp_path / NAME, {"fla": pin.model_copy(update={"sha256": ["0" * 64, "1" * 64]})})
    with pytest.raises(TraceproofError, match="is not the file that was pinned"):
        bring(tmp_path, "fla")


def test_every_source_of_the_repository_is_pinned_by_digest_or_commit() -> None:
    pins = read_lock(Path(__file__).parent.parent / NAME)
    assert pins.keys() == ORIGINS.keys()
    assert [name for name, pin in pins.items() if pin.commit is None and not pin.digests] == []


def test_a_folder_of_a_source_package_is_a_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def sdist(name: str, version: str, folder: Path, **_: object) -> Path:
        folder.mkdir()
        packed(folder, name, {"flashinfer_trace/definitions/a.json": "", "other.py": ""})
        return folder / f"{name}-{version}.0.tar.gz"

    monkeypatch.setattr(package, "download_sdist", sdist)
    record = bring(tmp_path, "flashinfer_trace", release=["flashinfer_trace=1"])["flashinfer_trace"]
    assert (record["status"], record["url"]) == ("cloned", "pypi:flashinfer-bench")
    assert (tmp_path / "sources" / "flashinfer-trace" / "definitions" / "a.json").is_file()
    assert not list((tmp_path / "sources").rglob("other.py"))
    assert read_lock(tmp_path / NAME)["flashinfer_trace"].folder == "flashinfer_trace"


SETUP = "import os, pathlib\npathlib.Path({ran!r}).write_text(str(dict(os.environ)))\nraise SystemExit(1)\n"
SECRETS = {
    "HF_TOKEN": "hf_x",
    "GITHUB_TOKEN": "x",
    "AWS_SECRET_ACCESS_KEY": "x",
    "MY_PASSWORD": "x",
    "TWINE_api_key": "x",
}


def sdist(folder: Path) -> bytes:
    """A source package that leaves the file `ran` beside it where anything of it runs."""
    packed(folder, "tiny", {"setup.py": SETUP.format(ran=str(folder / "ran")), "tiny/__init__.py": "it = 1\n"})
    return (folder / "tiny-1.0.tar.gz").read_bytes()


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
        self.send_response(301 if kind == "moved" else 200 if kind else 404)
        self.send_header(*(("Location", body.decode()) if kind == "moved" else ("Content-Type", kind)))
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


def serve(index: Index, data: bytes) -> None:
    files = ("../../files/tiny-0.9.tar.gz", "../../files/tiny-1.0.tar.gz")
    links = "".join(f'<a data-x="1" href="{file}#sha256={"0" * 64}">x</a>' for file in files)
    page = f"<!doctype html><html><body>{links}</body></html>"
    index.pages["/simple/tiny/"] = ("moved", b"/own/index/simple/tiny/")  # as caches do; links are relative to it
    index.pages["/own/index/simple/tiny/"] = ("text/html", page.encode())
    index.pages["/own/index/files/tiny-1.0.tar.gz"] = ("application/x-tar", data)


@pytest.mark.slow
def test_a_source_package_is_a_file_and_nothing_of_it_runs(
    index: Index, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)
    data = sdist(tmp_path)
    serve(index, data)
    _, pin = package.bring_package(tmp_path / "out" / "tiny", Pin(package="tiny", version="1.0"))
    assert (tmp_path / "out" / "tiny" / "tiny" / "__init__.py").read_text() == "it = 1\n"
    assert pin.sha256 == hashlib.sha256(data).hexdigest()
    assert not (tmp_path / "ran").exists()


def test_a_folder_of_links_serves_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "links"
    folder.mkdir()
    data = sdist(folder)
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    assert download_sdist("tiny", "1.0", tmp_path / "out").read_bytes() == data
    assert not (folder / "ran").exists()


PAGES = {
    "no page": b"{}",
    "binary": b"\xff\xfe\x00" * 100,
    "nothing": b"",
    "another place": b'<a href="ftp://x/tiny-1.0.tar.gz">x</a><a href="file:///etc/passwd#tiny-1.0.tar.gz">',
    "a bad address": b'<a href="http://[/tiny-1.0.tar.gz">x</a>',
}


@pytest.mark.parametrize("page", PAGES)
def test_any_answer_is_a_message(index: Index, tmp_path: Path, page: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(package, "_pip_options", lambda: {"index-url": index.url})
    index.pages["/simple/tiny/"] = ("text/html", PAGES[page])
    with pytest.raises(TraceproofError, match="have no source package"):
        download_sdist("tiny", "1.0", tmp_path / "out")


def test_what_programs_get_to_know_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    harmless = {"PATH": "/bin", "LANG": "C", "CUDA_VISIBLE_DEVICES": "0"}
    mine = {"HOME": "/home/me", "SSH_AUTH_SOCK": "/x", "PIP_INDEX_URL": "https://example.org"}
    monkeypatch.setattr(os, "environ", SECRETS | harmless | mine)
    assert without_secrets() == harmless | mine
    assert for_untrusted() == harmless
