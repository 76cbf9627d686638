"""`traceproof clone-repos`: bring the sources to a folder, each as sources.lock pins it."""

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Annotated

import typer

from traceproof.checkouts.clone import FAILED, CloneRequest, Progress, clone_all
from traceproof.checkouts.gitrun import Git, Patience, available
from traceproof.checkouts.pins import NAME, ORIGINS, Pin, read_lock, resolve, write_lock
from traceproof.cli import run
from traceproof.cli.interpreter import say
from traceproof.environments.building import unlike_the_lock
from traceproof.errors import TraceproofError
from traceproof.text import has_credentials, redacted

COMMIT = re.compile(r"[0-9a-f]{40}")


def clone_repos(  # noqa: PLR0913 - one parameter per option
    names: Annotated[list[str] | None, typer.Argument(help="Sources; all if none.")] = None,
    *,
    target_dir: Annotated[Path | None, typer.Option(help="Folder of them all; sources/ if left out.")] = None,
    branch: Annotated[list[str] | None, typer.Option(help="NAME=BRANCH: pin its newest commit.")] = None,
    tag: Annotated[list[str] | None, typer.Option(help="NAME=TAG: pin the tag's commit.")] = None,
    commit: Annotated[list[str] | None, typer.Option(help="NAME=COMMIT, all 40 digits.")] = None,
    release: Annotated[list[str] | None, typer.Option(help="NAME=VERSION: a released package instead.")] = None,
    url: Annotated[list[str] | None, typer.Option(help="NAME=URL of a fork or a new source.")] = None,
    lfs: Annotated[list[str] | None, typer.Option(help="Sources whose LFS files are wanted too.")] = None,
    lock: Annotated[Path | None, typer.Option(help="Where the pins stand; sources.lock if left out.")] = None,
    jobs: Annotated[int, typer.Option(min=1, help="Sources at once.")] = 4,
    stall: Annotated[float, typer.Option(min=1, help="Seconds of silence until a remote is given up.")] = 60.0,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write repos_config.json's content; - is stdout.")
    ] = None,
) -> None:
    """Clone or update the sources. What sources.lock names is what is taken; options change it, branches never do.

    One that can not be had keeps no other from being brought. Without --target-dir and --lock, sources/ and
    sources.lock of the repository are meant, wherever the command runs.

    Exit codes: 0 all are there, 2 bad use, or a source that could not be had.
    """
    available()
    own = lock is None
    lock, target_dir = lock or _home() / NAME, _folder(target_dir or _home() / "sources")
    options = {"branch": branch, "tag": tag, "commit": commit, "release": release, "url": url}
    changes = {name: _pairs(f"--{name}", given) for name, given in options.items()}
    git, lfs = Git(Path.cwd(), Patience(stall=stall)), lfs or []
    found, unpinned = _pinned(names, changes, lfs, read_lock(lock), git)
    order = CloneRequest(pins=found, target_dir=target_dir, jobs=jobs, lfs=frozenset(lfs), unpinned=unpinned)
    value, known = clone_all(replace(order, patience=git.patience), Progress())
    chosen, records = names or sorted({*found, *unpinned}), value["repositories"]
    failed = [name for name in chosen if records[name]["status"] == FAILED]
    before = read_lock(lock)  # it only names what was there once
    after = before | {name: pin for name, pin in known.items() if name not in failed}
    if after != before:
        write_lock(lock, after)
    run.write_result(json_file, value)
    if own:
        _tell_what_is_judged(chosen)
    if failed:
        what = f"{len(failed)} of {len(chosen)} sources could not be brought to {target_dir}"
        raise TraceproofError(what, problems=[f"{name}: {_one_line(records[name]['error'])}" for name in failed])


def _one_line(text: str) -> str:
    """A message of several lines as one: it stands in a list."""
    return "; ".join(line.strip().removeprefix("- ").rstrip(":;") for line in text.splitlines())


def _tell_what_is_judged(names: Sequence[str]) -> None:
    """Say of which of the sources `traceproof verify` judges another version than the repository's lock pins."""
    with suppress(TraceproofError):  # there is no repository here, or its config.yaml can not be used
        root, config = run.configured()
        for name, line in unlike_the_lock(config, root=root).items():
            if name in names:
                say(f"note: {line}")


def _pinned(
    names: Sequence[str] | None,
    changes: dict[str, dict[str, str]],
    lfs: Sequence[str],
    pins: dict[str, Pin],
    git: Git,
) -> tuple[dict[str, Pin], dict[str, str]]:
    """The pin of each source that is meant, all where none is named, and why others have none.

    Raises TraceproofError: a name, an address or a commit is none, or options contradict each other.
    """
    urls = changes.pop("url")
    for name, address in urls.items():
        if has_credentials(address):
            raise TraceproofError(
                f"--url {name}: the address holds credentials, and sources.lock is a tracked file",
                todo=f"Give {redacted(address)}, and set up git's credential helper or ssh.",
            )
    for name, digits in changes["commit"].items():
        if not COMMIT.fullmatch(digits):
            raise TraceproofError(f"--commit {name}={digits}: expected all 40 hexadecimal digits")
    chosen, known = names or sorted({*ORIGINS, *pins, *urls}), {*ORIGINS, *pins, *urls}
    unknown = sorted({*chosen, *lfs, *chain.from_iterable(changes.values())} - known)
    if unknown:
        raise TraceproofError(
            f"unknown sources: {', '.join(unknown)}; known: {', '.join(sorted(known))}",
            todo="Give the repository of a new one with --url NAME=URL.",
        )
    given = {name: _given(name, changes) for name in chosen}
    found: dict[str, Pin] = {}
    unpinned: dict[str, str] = {}
    for name, choice in given.items():
        try:
            found[name] = _pin(name, pins.get(name), choice, urls.get(name), git)
        except TraceproofError as error:
            unpinned[name] = str(error)
    return found, unpinned


def _home() -> Path:
    """The repository; where there is none, the working directory."""
    try:
        return run.repository()
    except TraceproofError:
        return Path.cwd()


def _folder(given: Path) -> Path:
    """A folder that can be written to, made if it is absent. Raises TraceproofError: it can not be one."""
    folder = given.expanduser().resolve()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        todo = "Give a folder, or a path at which one can be made."
        raise TraceproofError(f"--target-dir {given} can not be used: {error.strerror}", todo=todo) from error
    return folder


def _pairs(option: str, given: Sequence[str] | None) -> dict[str, str]:
    pairs = {}
    for text in given or []:
        name, equals, value = text.partition("=")
        if not (name and equals and value):
            raise TraceproofError(f"{option} {text!r}: expected NAME=VALUE, e.g. {option} flashinfer=...")
        pairs[name] = value
    return pairs


def _given(name: str, changes: Mapping[str, Mapping[str, str]]) -> dict[str, str]:
    """What the options say of a source, by option. Raises TraceproofError: they contradict each other."""
    given = {kind: values[name] for kind, values in changes.items() if name in values}
    if len(given) > 1:
        raise TraceproofError(f"{name}: give one of {', '.join('--' + kind for kind in given)}")
    if "release" in given and (name not in ORIGINS or not ORIGINS[name].package):
        raise TraceproofError(f"--release {name}: it is not known under which name it is released")
    return given


def _pin(name: str, old: Pin | None, given: Mapping[str, str], url: str | None, git: Git) -> Pin:
    """What a source is pinned at: by an option, else as before, else where its repository stands now."""
    if "release" in given:
        origin = ORIGINS[name]
        return Pin(package=origin.package, version=given["release"], folder=origin.inside or None)
    if not given and url is None and old is not None:
        return old
    address = url or (old.url if old and old.url else None) or ORIGINS[name].url
    ref = given.get("commit", "HEAD")
    if "branch" in given:
        ref = f"refs/heads/{given['branch'].removeprefix('refs/heads/')}"
    elif "tag" in given:
        ref = f"refs/tags/{given['tag'].removeprefix('refs/tags/')}"
    commit = resolve(address, ref, git=git)
    tagged = ref.startswith("refs/tags/")
    if old is not None and tagged and (old.url, old.ref) == (address, ref) and old.commit != commit:
        raise TraceproofError(
            f"{name}: the tag {ref.removeprefix('refs/tags/')} of {address} was moved",
            problems=[f"sources.lock has {old.commit}", f"the remote has   {commit}"],
            todo=f"Find out why. To take the new one all the same: --commit {name}={commit}.",
        )
    return Pin(url=address, commit=commit, ref=None if ref == commit else ref)
