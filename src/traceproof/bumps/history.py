"""Verdicts kept for later comparison: a file per state, which is a set of pins and environments."""

import json
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock

from traceproof.checkouts.pins import Pin, lock_digest
from traceproof.digests import digest_json
from traceproof.errors import TraceproofError
from traceproof.files import write_text
from traceproof.run.schema import VerdictRow, each_row

# Columns of a row that are kept.
KEPT = (
    *("definition", "op_type", "case", "implementation", "output"),
    *("verdict", "reason", "message", "gate", "size", "seed", "device"),
)
Rows = list[dict[str, Any]]
NEWEST = {"latest": 0, "previous": 1}


@dataclass(frozen=True, slots=True)
class Kept:
    """The verdicts of one state."""

    digest: str  # of pins and environments
    # verdict rows with the columns KEPT, `dataset`, the definition's `digest`, and `whole` if the run was not
    # limited to some cases
    rows: tuple[Mapping[str, Any], ...]
    about: Mapping[str, Any]  # `pins`, `stacks` (versions by stack), `time`, and more of the file


@dataclass(frozen=True, slots=True)
class Scope:
    """What a run covered."""

    dataset: str = ""  # the dataset, whatever its version
    whole: bool = True  # whether all cases of the planned sizes ran, or only some named ones


def keep(
    folder: Path,
    verdicts: Iterable[Path],
    stacks: Sequence[Mapping[str, Any]],
    pins: Mapping[str, Pin],
    scope: Scope = Scope(),
) -> str:
    """Keep a run's verdicts in the file of its state; returns the state's digest.

    A second run in the same state, for example of another selection, adds to the file: its rows replace those of
    what it covered, and those of definitions' texts that the dataset no longer has. Raises TraceproofError: the
    disk is full.
    """
    pinned = {name: pin.model_dump(mode="json", exclude_none=True) for name, pin in pins.items()}
    environments = {str(stack["stack"]): str(stack["digest"]) for stack in stacks}
    new = [_cut(row, scope) for path in sorted(verdicts) for row in each_row(path)]
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(folder / ".lock"):  # runs of other selections write the same file
        before = _same(folder, pinned, environments)
        digest = before.get("digest") or digest_json([lock_digest(pins), sorted(map(list, environments.items()))])
        rows = [*new, *_untouched(before.get("rows", []), new, scope)]
        rows.sort(key=lambda row: [str(row.get(key)) for key in (*KEPT[:5], "dataset", "seed")])
        value = {
            "digest": digest,
            "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "pins": pinned,
            "environments": before.get("environments", {}) | environments,
            "stacks": before.get("stacks", {}) | {stack["stack"]: stack["versions"] for stack in stacks},
        }
        head = json.dumps(value, ensure_ascii=False, allow_nan=False).removesuffix("}")
        lines = ",\n".join(json.dumps(row, ensure_ascii=False, allow_nan=False) for row in rows)
        write_text(folder / f"{digest}.json", f'{head}, "rows": [\n{lines}\n]}}\n')
    return digest


def _same(folder: Path, pins: Mapping[str, Any], environments: Mapping[str, str]) -> dict[str, Any]:
    """Content of the newest kept file of this state; {}: there is none. An unreadable file is reported.

    A run has only its op_types' environments: two runs are in one state if the environments of both agree.
    """
    for path in states(folder):
        try:
            about = dict(load(path).about)
        except TraceproofError as error:
            sys.stderr.write(f"what was kept of earlier runs in {path} is lost: {error}\n")
            continue
        known = about.get("environments", {})
        if about.get("pins") == pins and all(known.get(name, new) == new for name, new in environments.items()):
            return about
    return {}


def _cut(row: VerdictRow, scope: Scope) -> dict[str, Any]:
    columns = row.as_json()
    kept = {key: columns[key] for key in KEPT if columns.get(key) is not None}
    digest = row.digests.definition
    return kept | {"dataset": scope.dataset, "whole": scope.whole} | ({"digest": digest} if digest else {})


def _untouched(old: Iterable[Mapping[str, Any]], new: Sequence[Mapping[str, Any]], scope: Scope) -> Rows:
    """The old rows that a run does not replace."""

    def unit(row: Mapping[str, Any]) -> tuple[Any, ...]:
        """What is replaced together: all cases of a size, or one case."""
        part = row.get("size") if scope.whole else row.get("case")
        return row.get("dataset"), row["definition"], row["implementation"], row.get("seed"), part

    covered = set(map(unit, new))
    texts = {(row.get("dataset"), row["definition"]): row.get("digest") for row in new if row.get("digest")}
    kept = [dict(row) for row in old if unit(row) not in covered]
    return [row for row in kept if texts.get((row.get("dataset"), row["definition"])) in {None, row.get("digest")}]


def states(folder: Path) -> list[Path]:
    """Files of the kept states, newest first."""
    return sorted(folder.glob("*.json"), key=lambda path: path.stat().st_mtime, reverse=True)


def load(path: Path) -> Kept:
    """The state in a file. Raises TraceproofError: it has none."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
        return Kept(value["digest"], tuple(value["rows"]), value)
    except (OSError, ValueError, KeyError) as error:
        raise TraceproofError(f"{path} holds no kept verdicts: {error}") from error


def find(folder: Path, name: str) -> Kept:
    """A kept state, by the start of its digest, `latest`, `previous`, or a file.

    Raises TraceproofError: there is none, or several.
    """
    if Path(name).is_file():
        return load(Path(name))
    files = states(folder)
    if name in NEWEST:
        matching = files[NEWEST[name] : NEWEST[name] + 1]
    else:
        matching = [path for path in files if path.stem.startswith(name)]
    if len(matching) == 1:
        return load(matching[0])
    if not files:
        raise TraceproofError(f"no verdicts are kept in {folder}", todo="Run `traceproof verify` first.")
    if name == "previous" and len(files) == 1:
        what = f"there is nothing to compare: one state is kept, {files[0].stem}"
        todo = "Bump a source or an environment and verify again: a state is one set of pins and environments."
        raise TraceproofError(what, todo=todo)
    problems = [path.stem for path in matching or files][:10]
    todo = "Give the start of one digest, latest, previous, or a file. `traceproof verify` keeps one a state."
    raise TraceproofError(f"{len(matching) or 'no'} kept states are called {name!r}", problems=problems, todo=todo)
