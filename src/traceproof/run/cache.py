"""Rows of earlier runs, in one SQLite file: a key -> the rows of one (definition, case, implementation).

A key is a digest of all that the rows depend on, so an entry is right for whoever finds it, and two runs may write
at the same time. A damaged entry or file is thrown away and computed again.
"""

import json
import os
import shutil
import sqlite3
import sys
import threading
import time
import zlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from traceproof.digests import digest_bytes
from traceproof.errors import TraceproofError

FILE = "cache.sqlite"  # below results
WAIT_SECONDS = 120.0  # waiting for other processes that write
AT_ONCE = 500  # keys per query
COLUMNS = "key TEXT PRIMARY KEY, digest TEXT, value BLOB, written REAL"
TABLE = f"CREATE TABLE IF NOT EXISTS rows ({COLUMNS}) WITHOUT ROWID"
DAMAGED = frozenset({sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_ERROR})  # the last: no table


def key_of_file(path: Path, cache: Path) -> str:
    """Key for the digest of a verdict file, by which damage shows; relative, so that both may move together."""
    return digest_bytes(f"verdicts {os.path.relpath(path, cache.parent)}".encode())


class Cache:
    """The cache in its file, which is made where there is none; usable from any thread of this process.

    It uses SQLite's rollback journal: a write-ahead log needs shared memory, which nodes of a cluster do not have.
    No write waits for the disk: after a power failure the file is whole or found damaged.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._connection: sqlite3.Connection | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._connection is not None:
            self._connection.close()

    def get(self, keys: Iterable[str]) -> dict[str, Any]:
        """The values of those keys that the cache has. Raises TraceproofError: the file can not be used."""
        distinct = list(dict.fromkeys(keys))
        values: dict[str, Any] = {}
        for first in range(0, len(distinct), AT_ONCE):
            batch = distinct[first : first + AT_ONCE]
            marks = ",".join("?" * len(batch))
            query = f"SELECT key, digest, value FROM rows WHERE key IN ({marks})"  # noqa: S608 - marks alone
            for key, digest, value in self._done([(query, batch)]):
                if isinstance(value, bytes) and digest == _digest(key, value):
                    values[key] = json.loads(zlib.decompress(value))
        return values

    def put(self, values: Mapping[str, Any]) -> None:
        """Keep values under their keys, all or none. Raises TraceproofError: the disk is full."""
        statements: list[tuple[str, Sequence[Any]]] = []
        for key, value in values.items():
            packed = zlib.compress(json.dumps(value, ensure_ascii=False, allow_nan=False).encode(), level=1)
            entry = key, _digest(key, packed), packed, time.time()
            statements.append(("INSERT OR REPLACE INTO rows VALUES (?, ?, ?, ?)", entry))
        self._done([("BEGIN IMMEDIATE", ()), *statements, ("COMMIT", ())])

    def entries(self) -> list[tuple[str, int, float]]:
        """(key, bytes, time of writing in seconds since 1970) of every entry."""
        return self._done([("SELECT key, LENGTH(value), written FROM rows", ())])

    def remove(self, keys: Iterable[str]) -> None:
        """Remove entries, and shrink the file."""
        deletions: list[tuple[str, Sequence[Any]]] = [("DELETE FROM rows WHERE key = ?", [key]) for key in keys]
        if deletions:
            self._done([("BEGIN IMMEDIATE", ()), *deletions, ("COMMIT", ()), ("VACUUM", ())])

    def _done(self, statements: Sequence[tuple[str, Sequence[Any]]]) -> list[Any]:
        """Execute statements and return the last one's rows; a damaged file is removed and created again."""
        with self._lock:
            try:
                return self._execute(statements)
            except sqlite3.DatabaseError as error:
                # Where Python itself can not read the file, its error has no code.
                if getattr(error, "sqlite_errorcode", sqlite3.SQLITE_CORRUPT) & 0xFF not in DAMAGED:
                    raise self._unusable(error) from error
                sys.stderr.write(f"{self._path} is damaged ({error}): removed, its rows will be computed again\n")
            self.__exit__()
            self._connection = None
            for suffix in ("", "-journal", "-wal", "-shm"):
                self._path.with_name(self._path.name + suffix).unlink(missing_ok=True)
            try:
                return self._execute(statements)
            except sqlite3.DatabaseError as error:
                raise self._unusable(error) from error

    def _execute(self, statements: Sequence[tuple[str, Sequence[Any]]]) -> list[Any]:
        if self._connection is None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._connection = sqlite3.connect(
                self._path, timeout=WAIT_SECONDS, isolation_level=None, check_same_thread=False
            )
            self._connection.execute("PRAGMA synchronous=OFF")
            self._connection.execute(TABLE)
        try:
            return [self._connection.execute(statement, values).fetchall() for statement, values in statements][-1]
        except sqlite3.DatabaseError:
            if self._connection.in_transaction:
                self._connection.rollback()
            raise

    def _unusable(self, error: sqlite3.DatabaseError) -> TraceproofError:
        full = getattr(error, "sqlite_errorcode", 0) & 0xFF == sqlite3.SQLITE_FULL
        what = "no space left while writing" if full else f"{error} while using"
        todo = "Check the disk, or remove the file: its rows are then computed again."
        todo = "Free some space and run the same command again: finished rows are kept." if full else todo
        free = shutil.disk_usage(self._path.parent).free
        return TraceproofError(f"{what} {self._path} ({free / 2**20:.0f} MiB free)", todo=todo)


def _digest(key: str, packed: bytes) -> str:
    return digest_bytes(key.encode() + packed)
