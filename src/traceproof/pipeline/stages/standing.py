"""What a run's verdicts and summary were made of, so that a stale one is never shown as this run's.

A summary states the digest of every plan, manifest and verdict file that it stands on. Snakemake compares times,
and takes a summary for new whose verdicts a failed job removed, or whose file is dated ahead.
"""

import os
import shutil
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

from traceproof.digests import digest_file
from traceproof.errors import TraceproofError
from traceproof.pipeline.plan_facts import PlanFacts
from traceproof.pipeline.records import EARLIER, OpTypePlan
from traceproof.reasons import Error
from traceproof.runs import under_way
from traceproof.store import read_sealed
from traceproof.untrusted.border import BorderError

CRASH = str(Error.CRASH)
KEY, INODES = "stands_on", "inodes"  # of a summary
OUTCOME = "TRACEPROOF_OUTCOME"  # environment variable: the file in which a run's last job leaves its exit code
THREADS = 4  # that digests are taken by
SHOWN = 20  # files named in a message
STACKS, DEPENDENCIES = "stacks", "dependencies.json"  # records of stacks below results, and of one's op_types
# Of a run's folder: what rules compare the times of, and what is put into its place.
PARTS = ("cases", f"cases-{EARLIER}", "actors", "verdicts", "jit", "summaries")


def standing(run: Path, op_types: Iterable[str], summary: Mapping[str, Any] = {}) -> dict[str, str | None]:
    """Digest of each file that the summary of some op_types stands on, by path below the run's folder.

    What a `summary` states is believed of files whose inodes are as they were then. None: the file is absent or
    can not be read.
    """
    paths = [path for name in sorted(op_types) for path in _files(run, name)]
    stated, known = summary.get(KEY, {}), summary.get(INODES, {})

    def found_of(path: Path) -> str | None:
        name = str(path.relative_to(run))
        return stated[name] if name in stated and known.get(name) == _inode(path) else _digest(path)

    with ThreadPoolExecutor(THREADS) as threads:  # they may be hundreds of megabytes
        found = zip(paths, threads.map(found_of, paths), strict=True)
        return {str(path.relative_to(run)): digest for path, digest in found}


def inodes(run: Path, op_types: Iterable[str]) -> dict[str, list[int] | None]:
    """By what `standing` finds files unchanged; to be taken before their digests are."""
    return {str(path.relative_to(run)): _inode(path) for name in op_types for path in _files(run, name)}


def _files(run: Path, op_type: str) -> Iterator[Path]:
    yield run / "cases" / f"{op_type}.json"
    yield from sorted((run / "actors" / op_type).glob("*.json"))
    yield run / "verdicts" / f"{op_type}.jsonl"


def _inode(path: Path) -> list[int] | None:
    """Which file that is, and when it was changed last, which nobody can set back; None: there is none."""
    try:
        found = path.stat()
    except OSError:
        return None
    return [found.st_dev, found.st_ino, found.st_size, found.st_ctime_ns]


def _digest(path: Path) -> str | None:
    try:
        return digest_file(path)
    except OSError:
        return None


def changed(run: Path, summary: Any, *, by_inode: bool = False) -> list[str]:  # noqa: ANN401 - whatever is there
    """The files that are not what a summary was made of, relative to the run; itself where it states none.

    Who reads them next reads all; `by_inode`, those alone that have been written to since.
    """
    stated = summary.get(KEY) if isinstance(summary, dict) else None
    if not isinstance(stated, dict):
        return ["summary.json"]
    op_types = {Path(name).stem for name in stated if name.startswith("verdicts/")}
    found = standing(run, op_types, summary if by_inode else {})
    return sorted(name for name in stated.keys() | found.keys() if stated.get(name) != found.get(name))


def read_summary(path: Path, run: Path) -> dict[str, Any]:
    """A run's summary of the verdicts that are there. Raises TraceproofError: it is absent, damaged or stale."""
    again = "Run the same command again; what is finished is kept."
    try:
        value = read_sealed(path)
        found = changed(run, value, by_inode=True)
    except BorderError as error:
        raise TraceproofError(f"{path} can not be read: {error}", todo=again) from error
    if found:
        raise TraceproofError(
            f"{path} is of an earlier state: it was made of other files than are there now",
            problems=found[:SHOWN],
            todo=again,
        )
    return value


def settle(
    root: Path, results: Path, run: str, *, also: Iterable[str] = (), anew: Iterable[str] = ()
) -> list[str]:
    """Before a run: remove a summary that is stale with what it can not vouch for, and undo times in the future.

    A stack's record that is not what was written goes, too, and a manifest in which a case crashed: its process
    may have been killed from outside. What is finished of it is in the store. Nothing is touched while another run
    of the same folder is under way. Finished outputs stay in the store, so what is removed is made again without
    running anything twice. `also` are further files and folders whose times rules compare, relative to `root`;
    `anew` are folders of the run that are to be made again whatever they hold. Gives what was removed, relative to
    the run's folder.
    """
    if any(other.folder == run for other in under_way(root / results)):
        return []
    folder = root / results / run
    for name in anew:
        shutil.rmtree(folder / name, ignore_errors=True)
    for part in (*(folder / part for part in PARTS), *(root / name for name in also)):
        for path in (part, *part.rglob("*")):
            _not_ahead(path)
    _crashed(folder / "actors")
    summaries = [folder / "summary.json", *sorted((folder / "summaries").glob("*.json"))]
    removed = {name for path in summaries for name in _stale(folder, path)}
    if any(name.startswith("cases/") for name in removed) or not all(map(_readable, folder.glob("cases/*.json"))):
        shutil.rmtree(folder / "cases", ignore_errors=True)  # planning makes it whole
    for name in removed:
        (folder / name).unlink(missing_ok=True)
    return sorted(removed | _damaged(root / results / STACKS))


def _crashed(actors: Path) -> None:
    """Remove manifests that tell of a crash, so that its case is run again."""
    for path in sorted(actors.glob("*/*.json")):
        with suppress(BorderError, KeyError, TypeError, AttributeError):  # damaged: told where it is read
            cases = read_sealed(path)["cases"].values() if CRASH.encode() in path.read_bytes() else ()
            if any(record.get("reason") == CRASH for records in cases for record in records.values()):
                path.unlink(missing_ok=True)


def _damaged(stacks: Path) -> set[str]:
    """Remove stacks' records that are not what was written, and say so; their rules make them again."""
    found = set()
    for path in sorted(stacks.rglob("*.json")):
        try:
            read_sealed(path)
        except BorderError as error:
            sys.stderr.write(f"{path} is removed and will be made again: {error}\n")
            found.add(str(path.relative_to(stacks.parent)))
            path.unlink(missing_ok=True)
            if path.parent != stacks:  # one rule makes all of the folder, and states this one
                (path.parent / DEPENDENCIES).unlink(missing_ok=True)
    return found


def _stale(folder: Path, summary: Path) -> set[str]:
    """What must be made again since a summary does not stand on it; empty: the summary holds, or there is none."""
    if not summary.is_file():
        return set()
    _not_ahead(summary)
    own = str(summary.relative_to(folder))
    try:
        found = changed(folder, read_sealed(summary), by_inode=True)
    except BorderError:
        return {own}
    stale = {own} if found else set()
    for name in found:
        part, *rest = Path(name).parts
        op_type = rest[0].partition(".")[0] if rest else ""
        stale |= {name} if part == "cases" else set()
        stale |= {f"verdicts/{op_type}.jsonl"} if rest else set()
        if part == "cases":
            stale |= {str(path.relative_to(folder)) for path in (folder / "actors" / op_type).glob("*.json")}
    return stale


def _readable(plan: Path) -> bool:
    """Whether a plan is whole: by the digest that its facts state, else by reading it."""
    try:
        return PlanFacts.beside(plan) is not None or bool(OpTypePlan.read(plan))
    except (BorderError, TraceproofError):
        return False


def _not_ahead(path: Path) -> None:
    """Give a file that is dated ahead the time that it is now."""
    try:
        if path.lstat().st_mtime > time.time():
            os.utime(path, follow_symlinks=False)
    except OSError:  # absent, or somebody else's: the digests tell
        return
