"""Replays of bugs with a tiny package under SGLang's name, whose native norm needs no GPU."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path
from typing import Any

import pytest
from packaging.version import Version
from ruamel.yaml import YAML
from test_bumps import BASE, clone_of_traceproof

import replay_history
from replay_history import Bug, Found, NoReleaseError, Releases, Why, bugs, judged, main, parsed
from traceproof.reasons import Skip
from traceproof.run.schema import VerdictRow

ROOT = Path(__file__).resolve().parents[1]
FILE = """
title: The norm is too large
kind: scale
op_type: rmsnorm
package: sglang
last_bad: "1.1"
first_good: "1.2"
hardware: cpu
shows: wrong
cases: regular
needs: any row
definitions: [rmsnorm_*]
evidence: {sglang/srt/layers/layernorm.py: a factor is gone}
"""


def bug(**changes: Any) -> Bug:  # noqa: ANN401 - fields
    return parsed("planted", YAML(typ="safe").load(FILE)).model_copy(update=changes)


def test_every_bug_of_the_catalogue_can_be_read() -> None:
    assert len(bugs()) >= 33
    assert {one.kind for one in bugs().values()} >= {"address", "mask", "layout", "race"}


def row(case: str, verdict: str, **more: Any) -> VerdictRow:  # noqa: ANN401 - fields
    values = {"definition": "d", "op_type": "rmsnorm", "case": case, "implementation": "x", "output": "output"}
    return VerdictRow.model_validate({**values, "verdict": verdict, **more})


CRASH = row("a", "error", reason="crash", output="*")
REFUSED = row("a", "error", reason="exception", message="unexpected keyword")
SKIPPED = row("a", "skip", reason="no_cuda", message="needs a CUDA device")
PASS, FAIL = row("a", "pass"), row("a", "fail")
BOTH = [PASS, row("b", "pass")]


@pytest.mark.parametrize(
    ("what", "before", "after", "found", "reason"),
    [
        pytest.param({}, [FAIL, BOTH[1]], BOTH, Found.CAUGHT, None, id="fails with the bug alone"),
        pytest.param({}, [PASS], [PASS], Found.MISSED, None, id="passes on both"),
        pytest.param({}, [REFUSED], [PASS], Found.NOT_HERE, Why.NOT_RUN, id="the old release refuses the call"),
        pytest.param({"shows": "error"}, [CRASH], [PASS], Found.CAUGHT, None, id="a bug that crashes"),
        pytest.param({"kind": "address"}, [CRASH, BOTH[1]], BOTH, Found.CAUGHT, None, id="an address"),
        pytest.param({}, [CRASH, BOTH[1]], BOTH, Found.MISSED, None, id="a crash of another bug"),
        pytest.param({"shown_by": ("b",)}, [FAIL, BOTH[1]], BOTH, Found.MISSED, None, id="in another case"),
        pytest.param({}, [SKIPPED], [SKIPPED], Found.NOT_HERE, Skip.NO_CUDA, id="skipped"),
    ],
)
def test_a_bug_is_caught_where_a_case_that_shows_it_fails_with_it_and_passes_without_it(
    what: dict[str, Any], before: list[VerdictRow], after: list[VerdictRow], found: Found, reason: object
) -> None:
    outcome = judged(bug(**what), before, after)
    assert (outcome.found, outcome.reason) == (found, reason)
    assert outcome.finding is (found is Found.MISSED)


def test_a_release_without_the_bug_that_fails_is_an_alarm() -> None:
    found = judged(bug(), [FAIL], [FAIL, row("b", "pass")])
    assert (found.found, found.alarms, found.finding) == (Found.MISSED, ("d a x output",), True)


def wheel(folder: Path, version: str, *, factor: str) -> None:
    """A released package of which only the norm is there."""
    folder.mkdir(exist_ok=True)
    with zipfile.ZipFile(folder / f"sglang-{version}-py3-none-any.whl", "w") as archive:
        for name, text in BASE.items():
            path = name.removeprefix("python/").replace("1.0", version)
            archive.writestr(
                path, str(text).replace("1.0", version).replace("x * weight", f"x * weight * {factor}")
            )
        archive.writestr(f"sglang-{version}.dist-info/WHEEL", "Wheel-Version: 1.0\n")


def test_the_releases_nearest_the_fix_are_taken_from_a_folder(tmp_path: Path) -> None:
    for version in ("0.9", "1.0", "1.1", "1.2", "1.3"):
        wheel(tmp_path / "wheels", version, factor="1")
    releases = Releases(tmp_path / "releases", tmp_path / "wheels")
    assert releases.pair(bug(since="1.0"), None) == ("1.1", "1.2")
    assert releases.pair(bug(since="0.9", last_bad="1.0", first_good="1.3"), None) == ("1.0", "1.3")
    assert releases.pair(bug(last_bad="1.3", first_good="1.4"), "1.5") == ("1.3", None)
    with pytest.raises(NoReleaseError, match=r"from 1\.4 on, nor is one installed"):
        releases.pair(bug(last_bad="1.3", first_good="1.4"), "1.3")
    with pytest.raises(NoReleaseError, match="pip download"):
        releases.pair(bug(last_bad="0.8", first_good="0.9"), None)


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A clone of traceproof with results of its own, with one bug in its catalogue."""
    folder = clone_of_traceproof(tmp_path / "repository", "torch", "sglang")
    monkeypatch.chdir(folder)
    monkeypatch.setattr(replay_history, "bugs", lambda: {"planted": bug()})
    return folder


def replay(folder: Path, *arguments: str) -> tuple[int, dict[str, Any]]:
    answer = folder / "answer.json"
    return main(["--json", str(answer), *arguments]), json.loads(answer.read_text())


@pytest.mark.slow
def test_a_planted_bug_is_caught_between_its_releases_and_one_that_no_case_shows_is_a_miss_and_a_finding(
    repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    planted = {"planted": bug(), "unseen": bug(id="unseen", shown_by=("edge-empty",))}
    monkeypatch.setattr(replay_history, "bugs", lambda: planted)
    wheels = repository / "wheels"
    for version in ("1.1", "1.2"):
        wheel(wheels, version, factor="1.02" if Version(version) < Version("1.2") else "1")
    code, found = replay(repository, "--packages", str(wheels))
    outcome, unseen = found["outcomes"]
    assert (outcome["found"], outcome["bad"], outcome["good"], outcome["alarms"]) == ("caught", "1.1", "1.2", [])
    assert outcome["flips"]
    assert (unseen["found"], unseen["flips"], code) == ("missed", [], 1)
    replays = repository / "results" / "replays"
    ended = json.loads((replays / "outcomes" / f"{outcome['bug']}.json").read_text())
    assert ended["flips"] == outcome["flips"]
    kept = json.loads((replays / "replay.json").read_text())
    assert kept["outcomes"][0]["flips"] == outcome["flips"]
