"""Verdicts that are kept: one file for everything that they stand on, so that two states can be compared later."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from traceproof.digests import digest_json
from traceproof.errors import TraceproofError
from traceproof.sources.lock import lock_digest
from traceproof.sources.model import Pin
from traceproof.store import write_json

# What of a row two runs can be compared by.
KEPT = ("definition", "op_type", "case", "actor", "output", "verdict", "reason", "message", "gate")
NEWEST = {"latest": 0, "previous": 1}


@dataclass(frozen=True, slots=True)
class Kept:
    """One state.

    Attributes:
        digest: of the pins and the environments.
        rows: verdict rows, cut down to KEPT.
        about: `pins`, `stacks` (versions by stack), `time`.
    """

    digest: str
    rows: tuple[Mapping[str, Any], ...]
    about: Mapping[str, Any]


def keep(
    folder: Path, verdicts: Iterable[Path], stacks: Sequence[Mapping[str, Any]], pins: Mapping[str, Pin]
) -> str:
    """Keep a run's verdicts under the digest of what they stand on; gives the digest.

    A second run in the same state, of another selection say, adds to the first: its rows replace those of the same
    definition and actor.

    Raises:
        TraceproofError: the disk is full.
    """
    digest = digest_json([lock_digest(pins), sorted([str(one["stack"]), one["digest"]] for one in stacks)])
    path = folder / f"{digest}.json"
    rows = [
        {key: row[key] for key in KEPT if row.get(key) is not None}
        for file in verdicts
        for row in map(json.loads, file.read_text(encoding="utf-8").splitlines())
    ]
    again = {(row["definition"], row["actor"]) for row in rows}
    if path.is_file():
        rows += [dict(row) for row in _load(path).rows if (row["definition"], row["actor"]) not in again]
    value = {
        "digest": digest,
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "pins": {name: pin.model_dump(exclude_none=True) for name, pin in pins.items()},
        "stacks": {one["stack"]: one["versions"] for one in stacks},
        "rows": sorted(rows, key=lambda row: [str(row.get(key)) for key in KEPT[:5]]),
    }
    write_json(path, value)
    return digest


def _load(path: Path) -> Kept:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
        return Kept(value["digest"], tuple(value["rows"]), value)
    except (OSError, ValueError, KeyError) as error:
        raise TraceproofError(f"{path} holds no kept verdicts: {error}") from error


def find(folder: Path, name: str) -> Kept:
    """A kept state by the start of its digest, by `latest` or `previous`, or by a file.

    Raises:
        TraceproofError: there is none, or several.
    """
    if Path(name).is_file():
        return _load(Path(name))
    files = sorted(folder.glob("*.json"), key=lambda path: path.stat().st_mtime, reverse=True)
    if name in NEWEST:
        found = files[NEWEST[name] : NEWEST[name] + 1]
    else:
        found = [path for path in files if path.stem.startswith(name)]
    if len(found) == 1:
        return _load(found[0])
    raise TraceproofError(
        f"{len(found) or 'no'} kept states are called {name!r}",
        problems=[path.stem for path in found or files][:10],
        todo="Give the start of one digest, latest, previous, or a file. `traceproof verify` keeps one a state.",
    )
