"""The cache of finished rows: what is kept is found, and damage costs what was kept and nothing else."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest
from repository import DEFINITIONS, Repository

from traceproof.cli import main
from traceproof.errors import TraceproofError
from traceproof.reasons import Verdict
from traceproof.run.cache import FILE, Cache, key_of_file
from traceproof.run.schema import REFERENCE, WHOLE, RowDigests, VerdictRow, rows_text

ENTRIES = {f"key {number}": {"rows": [{"definition": f"d{number}", "message": "ä"}] * 20} for number in range(200)}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    with Cache(tmp_path / "results" / FILE) as cache:
        cache.put(ENTRIES)
        cache.put({"key 0": {"rows": []}})
    return tmp_path / "results" / FILE


def test_what_was_put_is_found_by_another_process(path: Path) -> None:
    with Cache(path) as cache:
        assert cache.get([*ENTRIES, "none"]) == {**ENTRIES, "key 0": {"rows": []}}
        assert cache.get([]) == {}


def test_two_processes_write_side_by_side(path: Path) -> None:
    code = (
        "import sys, pathlib; from traceproof.run.cache import Cache\n"
        "with Cache(pathlib.Path(sys.argv[1])) as cache:\n"
        "    for number in range(100): cache.put({f'{sys.argv[2]} {number}': number})\n"
    )
    others = [subprocess.Popen([sys.executable, "-c", code, str(path), name]) for name in ("a", "b", "c")]
    assert [other.wait() for other in others] == [0, 0, 0]
    wanted = {f"{name} {number}": number for name in ("a", "b", "c") for number in range(100)}
    with Cache(path) as cache:
        assert cache.get(wanted) == wanted


def test_a_damaged_file_gives_what_was_put_or_nothing(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole, draw = path.read_bytes(), random.Random(0)  # noqa: S311 - damage
    for number in range(60):
        data = bytearray(whole)
        if number % 3 == 0:
            data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
        elif number % 3 == 1:
            del data[draw.randrange(len(data)) :]
        else:
            start = draw.randrange(len(data))
            data[start : start + 5000] = draw.randbytes(len(data[start : start + 5000]))
        path.write_bytes(data)
        with Cache(path) as cache:
            found = cache.get(ENTRIES)
            assert all(value in (ENTRIES[key], {"rows": []}) for key, value in found.items())
            cache.put({"new": number})
            assert cache.get(["new"]) == {"new": number}
    assert "is damaged" in capsys.readouterr().err


def test_a_full_disk_says_so(path: Path) -> None:
    with Cache(path) as cache:
        cache.get(["key 1"])
        assert cache._connection is not None
        cache._connection.execute("PRAGMA max_page_count = 1")
        with pytest.raises(TraceproofError, match="no space left while writing"):
            cache.put({f"more {number}": os.urandom(999).hex() for number in range(99)})
        assert cache.get(["key 1", "more 1"]) == {"key 1": ENTRIES["key 1"]}


def test_clean_removes_what_no_run_shows_or_what_is_old(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    repository = Repository.copy(tmp_path, dataset={"path": str(DEFINITIONS.parent)})
    monkeypatch.chdir(repository.root)
    results = repository.root / "results"
    ago = time.time() - 10 * 86400
    with monkeypatch.context() as then, Cache(results / FILE) as cache:
        then.setattr(time, "time", lambda: ago)
        cache.put({"shown": [], "hidden": []})
    row = VerdictRow(
        definition="a",
        op_type="b",
        case="c",
        implementation=REFERENCE,
        output=WHOLE,
        verdict=Verdict.PASS,
        digests=RowDigests(outputs="shown"),
    )
    (results / "selections" / "s" / "verdicts").mkdir(parents=True)
    verdicts = results / "selections" / "s" / "verdicts" / "b.jsonl"
    verdicts.write_text(rows_text([row.as_json()]))
    mark = key_of_file(verdicts, results / FILE)
    with monkeypatch.context() as then, Cache(results / FILE) as cache:
        then.setattr(time, "time", lambda: ago)
        cache.put({mark: ""})

    def cleaned(*options: str) -> tuple[int, set[str]]:
        with pytest.raises(SystemExit) as caught:
            main(["clean", *options, "--json", "-"])
        assert caught.value.code == 0
        with Cache(results / FILE) as cache:
            return json.loads(capsys.readouterr().out)["objects"], {key for key, *_ in cache.entries()}

    assert cleaned("--unreachable", "--dry-run") == (1, {"shown", "hidden", mark})
    assert cleaned("--unreachable") == (1, {"shown", mark})
    assert cleaned("--older-than", "11") == (0, {"shown", mark})
    assert cleaned("--older-than", "9") == (1, {mark})
    with pytest.raises(SystemExit):
        main(["clean"])
    assert "nothing says what may go" in capsys.readouterr().err
