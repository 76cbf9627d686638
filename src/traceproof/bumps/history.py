"""Verdicts that are kept: one file for everything that they stand on, so that two states can be compared later."""

import json
import sys
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from filelock import FileLock

from traceproof.checkouts.pins import Pin, lock_digest
from traceproof.digests import digest_bytes, digest_file, digest_json
from traceproof.errors import TraceproofError
from traceproof.files import write_text
from traceproof.run.schema import VerdictRow, each_row

# What of a row two runs can be compared by.
KEPT = (
    *("definition", "op_type", "case", "implementation", "output"),
    *("verdict", "reason", "message", "gate", "size", "seed", "device"),
)
Rows = list[dict[str, Any]]
NEWEST = {"latest": 0, "previous": 1}
ROWS = ', "rows": ['  # the end of a file's first line


@dataclass(frozen=True, slots=True)
class Kept:
    """One state."""

    digest: str  # of the pins and the environments
    # verdict rows, cut down to KEPT; with `dataset`, the `digest` of the definition, and `whole` where the run was
    # not limited to some cases
    rows: tuple[Mapping[str, Any], ...]
    about: Mapping[str, Any]  # `pins`, `stacks` (versions by stack), `time`


@dataclass(frozen=True, slots=True)
class Scope:
    """What a run covered."""

    dataset: str = ""  # which dataset, whatever its version
    whole: bool = True  # whether all cases of the planned sizes were run, or only some that were named


@dataclass(frozen=True, slots=True)
class _Part:
    """Kept rows of one op_type, which stay as they are while its verdicts do."""

    lines: str  # the rows
    # what the file's first line says of them: `covers`, the digest of the verdicts and the scope of the run that
    # was kept last, `run`, that run's definitions, `names`, those of all rows, `size` and `digest` of `lines`
    about: Mapping[str, Any]

    @classmethod
    def of(cls, rows: Rows, covers: str = "", run: Iterable[str] = ()) -> Self:
        """From rows, in any order."""
        ordered = sorted(rows, key=lambda row: [str(row.get(key)) for key in (*KEPT[:5], "dataset", "seed")])
        lines = ",\n".join(json.dumps(row, ensure_ascii=False, allow_nan=False) for row in ordered)
        about = {"covers": covers, "run": sorted(run), "names": sorted({row["definition"] for row in rows})}
        return cls(lines, about | _measured(lines))

    @classmethod
    def read(cls, about: Mapping[str, Any], lines: str) -> Self:
        """From a file, as `about` says. Raises ValueError: it is not what was written."""
        if dict(about) != {**about, **_measured(lines)}:
            raise ValueError("rows were changed after they were written")
        return cls(lines, about)

    @property
    def rows(self) -> Rows:
        """The rows."""
        found: Rows = json.loads(f"[{self.lines}]")
        return found


@dataclass(frozen=True, slots=True)
class _Verdicts:
    """A run's verdict files of one op_type; not read where they were kept already."""

    covers: str
    run: Sequence[str]
    rows: Rows | None

    @classmethod
    def read(cls, paths: Sequence[Path], scope: Scope, before: _Part | None) -> Self:
        """From the files, unless `before` holds them."""
        covers = digest_json([[digest_file(path) for path in paths], asdict(scope)])
        if before is not None and before.about["covers"] == covers:
            return cls(covers, before.about["run"], None)
        rows = [_cut(row, scope) for path in paths for row in each_row(path)]
        return cls(covers, sorted({row["definition"] for row in rows}), rows)


def _measured(lines: str) -> dict[str, Any]:
    return {"size": len(lines), "digest": digest_bytes(lines.encode())}


def keep(
    folder: Path,
    verdicts: Iterable[Path],
    stacks: Sequence[Mapping[str, Any]],
    pins: Mapping[str, Pin],
    scope: Scope = Scope(),
) -> str:
    """Keep a run's verdicts under the digest of what they stand on; gives the digest.

    A second run in the same state, of another selection say, adds to the first: its rows replace those of what it
    covered, and of texts of a definition that are not the dataset's any more. Rows of an op_type with the verdicts
    of the run before are copied as they are. Raises TraceproofError: the disk is full.
    """
    pinned = {name: pin.model_dump(mode="json", exclude_none=True) for name, pin in pins.items()}
    environments = {str(one["stack"]): str(one["digest"]) for one in stacks}
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(folder / ".lock"):  # runs of other selections keep theirs in the same file
        before = _same(folder, pinned, environments)
        digest = before.get("digest") or digest_json([lock_digest(pins), sorted(map(list, environments.items()))])
        path = folder / f"{digest}.json"
        parts = _joined(_parts(path), verdicts, scope)
        value = {
            "digest": digest,
            "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "pins": pinned,
            "environments": before.get("environments", {}) | environments,
            "stacks": before.get("stacks", {}) | {one["stack"]: one["versions"] for one in stacks},
            "parts": {op_type: dict(part.about) for op_type, part in parts.items()},
        }
        head = json.dumps(value, ensure_ascii=False, allow_nan=False).removesuffix("}")
        lines = ",\n".join(part.lines for part in parts.values())
        write_text(path, f"{head}{ROWS}\n{lines}\n]}}\n")
    return digest


def _same(folder: Path, pins: Mapping[str, Any], environments: Mapping[str, str]) -> dict[str, Any]:
    """What the newest file of the same state says of itself; empty: the state is new.

    A run has the environments of its own op_types alone: no environment that two runs share differs in one state.
    """
    for path in states(folder):
        about = _head(path)
        known = about.get("environments")
        if known is None or about.get("pins") != pins:
            continue
        if all(known.get(name, digest) == digest for name, digest in environments.items()):
            return about
    return {}


def _head(path: Path) -> dict[str, Any]:
    """The first line of a state's file; empty: it can not be read, or an earlier version wrote it."""
    try:
        with path.open(encoding="utf-8") as file:
            head = file.readline().rstrip("\n")
        found = json.loads(f"{head}]}}") if head.endswith(ROWS) else {}
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) and found.get("digest") == path.stem else {}


def _parts(path: Path) -> dict[str, _Part]:
    """What a state's file holds, by op_type; what is not as it was written is lost, and said."""
    found: dict[str, _Part] = {}
    try:
        head, _, text = path.read_text(encoding="utf-8").partition("\n")
        start = 0
        for op_type, about in json.loads(f"{head}]}}")["parts"].items():
            end = start + about["size"]
            found[op_type] = _Part.read(about, text[start:end])
            start = end + len(",\n")
    except FileNotFoundError:
        return found
    except (OSError, ValueError, KeyError, TypeError, TraceproofError) as error:
        sys.stderr.write(f"what was kept of earlier runs in {path} is lost: {error}\n")
    return found


def _joined(old: Mapping[str, _Part], verdicts: Iterable[Path], scope: Scope) -> dict[str, _Part]:
    """The parts of a state after a run."""
    files: dict[str, list[Path]] = defaultdict(list)
    for path in sorted(verdicts):
        files[path.name.partition(".")[0]].append(path)  # a large op_type has several
    run = {op_type: _Verdicts.read(paths, scope, old.get(op_type)) for op_type, paths in files.items()}
    places: dict[str, set[str]] = defaultdict(set)  # the op_types of each definition of the run
    for op_type, now in run.items():
        for name in now.run:
            places[name].add(op_type)
    joined = {}
    for op_type in sorted(old.keys() | run.keys()):
        before, now = old.get(op_type, _Part.of([])), run.get(op_type, _Verdicts("", (), None))
        names = before.about["names"]
        moved = {(scope.dataset, name) for name in names if name in places and op_type not in places[name]}
        if now.rows is None and not moved:
            joined[op_type] = before
            continue
        rows = now.rows or []
        others = [row for row in before.rows if (row.get("dataset"), row["definition"]) not in moved]
        joined[op_type] = _Part.of([*rows, *_untouched(others, rows, scope)], now.covers, now.run)
    return {op_type: part for op_type, part in joined.items() if part.lines}


def _cut(row: VerdictRow, scope: Scope) -> dict[str, Any]:
    said = row.as_json()
    kept = {key: said[key] for key in KEPT if said.get(key) is not None}
    digest = row.digests.definition
    return kept | {"dataset": scope.dataset, "whole": scope.whole} | ({"digest": digest} if digest else {})


def _untouched(old: Iterable[Mapping[str, Any]], new: Sequence[Mapping[str, Any]], scope: Scope) -> Rows:
    """The rows that a run leaves as they were."""
    covered = {_unit(row, whole=scope.whole) for row in new}
    texts = {(row.get("dataset"), row["definition"]): row.get("digest") for row in new if row.get("digest")}
    return [
        dict(row)
        for row in old
        if _unit(row, whole=scope.whole) not in covered
        and texts.get((row.get("dataset"), row["definition"])) in {None, row.get("digest")}
    ]


def _unit(row: Mapping[str, Any], *, whole: bool) -> tuple[Any, ...]:
    """What is replaced together: all cases of a size, or one case."""
    part = row.get("size") if whole else row.get("case")
    return row.get("dataset"), row["definition"], row["implementation"], row.get("seed"), part


def states(folder: Path) -> list[Path]:
    """The files of the kept states, the newest first."""
    return sorted(folder.glob("*.json"), key=lambda path: path.stat().st_mtime, reverse=True)


def load(path: Path) -> Kept:
    """The state that a file holds. Raises TraceproofError: it holds none."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
        return Kept(value["digest"], tuple(value["rows"]), value)
    except (OSError, ValueError, KeyError) as error:
        raise TraceproofError(f"{path} holds no kept verdicts: {error}") from error


def find(folder: Path, name: str) -> Kept:
    """A kept state by the start of its digest, by `latest` or `previous`, or by a file.

    Raises TraceproofError: there is none, or several.
    """
    if Path(name).is_file():
        return load(Path(name))
    files = states(folder)
    if name in NEWEST:
        found = files[NEWEST[name] : NEWEST[name] + 1]
    else:
        found = [path for path in files if path.stem.startswith(name)]
    if len(found) == 1:
        return load(found[0])
    if name == "previous" and len(files) == 1:
        what = f"there is nothing to compare: one state is kept, {files[0].stem}"
        todo = "Bump a source or an environment and verify again: a state is one set of pins and environments."
        raise TraceproofError(what, todo=todo)
    problems = [path.stem for path in found or files][:10]
    todo = "Give the start of one digest, latest, previous, or a file. `traceproof verify` keeps one a state."
    raise TraceproofError(f"{len(found) or 'no'} kept states are called {name!r}", problems=problems, todo=todo)
