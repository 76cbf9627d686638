"""Finding and removing what the store holds and nothing needs: by age, or by keys that no run refers to."""

import json
import os
import shutil
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from traceproof.store import KINDS
from traceproof.untrusted.border import BorderError, read_json
from traceproof.untrusted.names import confined

FRESH_SECONDS = 3600.0  # what was written so lately may belong to a job that has no manifest yet
APART = frozenset({"store", "compiled", "dataset", "linked", "history"})  # below results, without manifests
SCRATCH = ("scratch-*", ".fetching-*")  # folders of jobs, left behind by ones that were killed


@dataclass(frozen=True, slots=True)
class Item:
    """An object of the store, or a folder that a killed job left."""

    paths: tuple[Path, ...]  # the record first: without it, an object counts as absent
    size: int  # bytes on disk
    written: float  # when, seconds since 1970

    @classmethod
    def of(cls, *paths: Path) -> "Item | None":
        """From its files; None: somebody else has just removed them."""
        try:
            every = [file for path in paths for file in ([path, *path.rglob("*")] if path.is_dir() else [path])]
            stats = [file.lstat() for file in every]
        except OSError:
            return None
        return cls(paths, sum(stat.st_blocks * 512 for stat in stats), max(stat.st_mtime for stat in stats))

    def remove(self, store: Path) -> None:
        """Remove it; a record before its tensors."""
        for path in self.paths:
            if confined(path, within=store).is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)


def older(store: Path, days: float) -> list[Item]:
    """Objects that were written longer ago than that."""
    limit = time.time() - days * 86400.0
    return [item for kind in KINDS for _, item in _objects(store / kind) if item.written < limit]


def unreachable(store: Path, results: Path) -> list[Item]:
    """Outputs that no run in the results folder refers to, and what killed jobs left."""
    needed = set(_keys(results))
    limit = time.time() - FRESH_SECONDS
    found = [item for key, item in _objects(store / "outputs") if key not in needed]
    left = (path for pattern in SCRATCH for path in store.glob(pattern))
    found += [item for path in left if (item := Item.of(path)) is not None]
    return [item for item in found if item.written < limit]


def _objects(folder: Path) -> Iterator[tuple[str, Item]]:
    """Each object's key and files; tensors without a record are one too, and files that were never finished."""
    groups: dict[Path, list[Path]] = {}
    for path in sorted(folder.glob("??/*")):
        groups.setdefault(path.with_suffix(""), []).append(path)
    for stem, paths in groups.items():
        item = Item.of(*sorted(paths, key=lambda path: path.suffix != ".json"))
        if item is not None:
            yield stem.name, item


def _keys(results: Path) -> Iterator[str]:
    """Keys of all outputs that manifests below `results` name."""
    for manifest in _manifests(results):
        try:
            value = read_json(manifest)
        except (OSError, BorderError, json.JSONDecodeError):
            continue  # cut short: its run makes it again
        cases: Iterable[dict[str, dict[str, object]]] = value["cases"].values()
        yield from (str(record["key"]) for records in cases for record in records.values() if record.get("key"))


def _manifests(results: Path) -> Iterator[Path]:
    for folder, below, _ in os.walk(results):
        below[:] = [name for name in below if name not in APART]
        if "actors" in below:
            yield from Path(folder, "actors").glob("*/*.json")
