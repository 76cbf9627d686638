"""sources.lock: which commit or version of every source this project stands on. Branches and tags end here."""

import json
from collections.abc import Mapping
from pathlib import Path

from pydantic import ValidationError

from traceproof.checkouts.gitrun import Git
from traceproof.checkouts.pin import FULL_COMMIT, Locked, Pin
from traceproof.digests import digest_json
from traceproof.errors import TraceproofError
from traceproof.files import write_text

NAME = "sources.lock"
PEELED = "^{}"  # how ls-remote marks the commit that an annotated tag points at


def read_lock(path: Path) -> dict[str, Pin]:
    """The pins by source name; none without such a file. Raises TraceproofError: every problem in reading it."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return {}
    try:
        return dict(Locked.model_validate(json.loads(text)).sources)
    except ValidationError as error:
        problems = [f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors(include_url=False)]
        raise _unusable(path, problems) from error
    except ValueError as error:
        raise _unusable(path, [f"not JSON: {error}"]) from error


def _unusable(path: Path, problems: list[str]) -> TraceproofError:
    return TraceproofError(
        f"{path} cannot be used",
        problems=problems,
        todo="Repair it, or delete the entry and run `traceproof clone-repos` to pin it anew.",
    )


def write_lock(path: Path, pins: Mapping[str, Pin]) -> None:
    """Write it sorted: a changed pin is a changed line or two. Raises TraceproofError: the disk is full."""
    value = {"sources": {name: pins[name].model_dump(exclude_none=True) for name in sorted(pins)}}
    write_text(path, json.dumps(value, indent=2) + "\n")


def lock_digest(pins: Mapping[str, Pin]) -> str:
    """Digest of what is pinned; the name of the branch that a commit came from means nothing."""
    return digest_json({name: pin.model_dump(exclude={"ref"}, exclude_none=True) for name, pin in pins.items()})


def resolve(url: str, ref: str, *, git: Git) -> str:
    """The full commit that a branch, tag, `HEAD` or full commit means now.

    Raises TraceproofError: there is no such ref, it is ambiguous, or the remote can not be reached.
    """
    if FULL_COMMIT.fullmatch(ref):
        return ref
    found: dict[str, str] = {}
    for line in git.network("ls-remote", "--", url).splitlines():
        commit, _, name = line.partition("\t")
        found[name] = commit
    names = ("HEAD",) if ref == "HEAD" else (ref, f"refs/tags/{ref}", f"refs/heads/{ref}")
    commits = {found.get(name + PEELED, found[name]) for name in names if name in found}
    if len(commits) > 1:
        todo = f"Say which: refs/tags/{ref} or refs/heads/{ref}."
        raise TraceproofError(f"{ref!r} is both a tag and a branch of {url}, at different commits", todo=todo)
    if not commits:
        raise TraceproofError(
            f"{url} has no branch or tag {ref!r}", todo="Check the name; a commit is given with all its 40 digits."
        )
    return commits.pop()
