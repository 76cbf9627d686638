from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from traceproof.bumps.diff import Diff, diff
from traceproof.bumps.history import Kept, Scope, find, keep
from traceproof.checkouts.pins import Pin
from traceproof.cli import main, run
from traceproof.cli.results import difference
from traceproof.errors import TraceproofError

PINS = {"fla": Pin(url="https://example.org/x", commit="1" * 40)}
STACKS = [{"stack": "fla", "digest": "d", "versions": {"fla-core": "0.5.0"}}]


def row(verdict: str = "pass", *, margin: float | None = 0.5, **changes: object) -> dict[str, Any]:
    """A verdict row."""
    reason = None if verdict == "pass" else "x"
    base = {
        "definition": "a",
        "op_type": "gdn",
        "case": "small-0",
        "implementation": "fla",
        "output": "o",
        "message": "m",
    }
    return {**base, "verdict": verdict, "reason": reason, "gate": {"kind": "close", "margin": margin}, **changes}


def state(digest: str, rows: Sequence[Mapping[str, Any]], version: str = "0.5.0") -> Kept:
    return Kept(digest, tuple(rows), {"stacks": {"fla": {"fla-core": version}}})


def compared(before: Sequence[Mapping[str, Any]], after: Sequence[Mapping[str, Any]]) -> Diff:
    return diff(state("1", before), state("2", after))


SKIP: dict[str, Any] = {"output": "*", "reason": "api_absent", "message": "module has no x"}


@pytest.mark.parametrize(
    ("before", "after", "kind", "worse"),
    [
        pytest.param([row()], [row("fail")], "failing", True, id="a pass fails"),
        pytest.param([row(output="p")], [row("error"), row(output="p")], "failing", True, id="a new row fails"),
        pytest.param([row("fail")], [row()], "passing", False, id="a failure passes"),
        pytest.param([row()], [row("skip", **SKIP)], "skipped", True, id="a pass is skipped"),
        pytest.param([row()], [row(margin=0.9)], None, False, id="a margin within noise"),
        pytest.param([row(margin=0.2)], [row(margin=0.9)], "moved", False, id="a margin that moved"),
        pytest.param([row(margin=0.001)], [row(margin=0.04)], None, False, id="margins of the last bits"),
        pytest.param([row(), row(output="p")], [row()], "vanished_rows", True, id="an output is gone"),
        pytest.param([row("fail")], [row("fail")], None, False, id="what failed fails"),
        pytest.param([row(definition="b")], [row()], None, False, id="another selection"),
        pytest.param([row(definition="b")], [row("fail")], None, False, id="a definition that was not run before"),
        pytest.param([row(case="small-1")], [row("fail")], None, False, id="a case that was not run before"),
        pytest.param(
            [row(implementation="reference")],
            [row("fail")],
            None,
            False,
            id="an implementation that did not run before",
        ),
    ],
)
def test_a_change_is_of_one_kind(
    before: list[dict[str, Any]], after: list[dict[str, Any]], kind: str | None, *, worse: bool
) -> None:
    found = compared(before, after)
    kinds = ("failing", "passing", "skipped", "moved", "vanished_rows")
    assert {name for name in kinds if getattr(found, name)} == ({kind} if kind else set())
    assert found.worse is worse


def test_apis_that_go_and_come_are_named() -> None:
    gone = compared([row()], [row("skip", **SKIP)])
    assert gone.vanished_apis == ["fla: module has no x"]
    assert compared([row("skip", **SKIP)], [row()]).new_apis == ["fla: module has no x"]


def test_a_verdict_that_changed_with_its_package_names_both_versions() -> None:
    was, now = row("fail", margin=None), row(margin=None)
    fixed = diff(state("1", [was], "0.5.0"), state("2", [now], "0.6.0"))
    broken = diff(state("1", [now], "0.5.0"), state("2", [was], "0.6.0"))
    assert fixed.as_json()["passing"][0]["between"] == "fixed between fla-core 0.5.0 and 0.6.0"
    assert broken.as_json()["failing"][0]["between"] == "broken between fla-core 0.5.0 and 0.6.0"
    lines = difference(fixed, limit=1)
    assert "  fla: fla-core 0.5.0 -> 0.6.0" in lines
    assert "  a small-0 fla o: fail (x) -> pass; fixed between fla-core 0.5.0 and 0.6.0" in lines


def test_no_version_is_named_where_none_changed_or_the_row_was_not_there() -> None:
    assert not compared([row("fail")], [row()]).as_json()["passing"][0]["between"]
    appeared = diff(state("1", [row(output="p")], "0.5.0"), state("2", [row("fail")], "0.6.0"))
    assert not appeared.as_json()["failing"][0]["between"]
    of_torch = diff(
        state("1", [row(implementation="reference")]),
        state("2", [row("fail", implementation="reference")], "0.6.0"),
    )
    assert not of_torch.as_json()["failing"][0]["between"]


def verdicts(folder: Path, *rows: Mapping[str, Any]) -> list[Path]:
    path = folder / "gdn.jsonl"
    path.write_text("".join(json.dumps(one) + "\n" for one in rows))
    return [path]


def test_runs_of_other_op_types_in_one_state_are_one_state(tmp_path: Path) -> None:
    """A run has the environments of its own op_types alone; without a bump there is nothing to compare."""
    history = tmp_path / "history"
    torch = {"stack": "torch", "digest": "t", "versions": {"torch": "2.13.0"}}
    sglang = {"stack": "sglang", "digest": "s", "versions": {"sglang": "0.5.23"}}
    first = keep(history, verdicts(tmp_path, row()), [torch, *STACKS], PINS)
    assert keep(history, verdicts(tmp_path, row("fail", definition="b")), [torch, sglang], PINS) == first
    assert keep(history, verdicts(tmp_path, row(definition="c")), [torch], PINS) == first
    state = find(history, "latest")
    assert [one["definition"] for one in state.rows] == ["a", "b", "c"]
    assert set(state.about["stacks"]) == {"fla", "sglang", "torch"}
    with pytest.raises(TraceproofError, match=f"nothing to compare: one state is kept, {first}"):
        find(history, "previous")
    bumped = keep(history, verdicts(tmp_path, row("fail")), [torch, {**STACKS[0], "digest": "e"}], PINS)
    pinned = keep(
        history,
        verdicts(tmp_path, row()),
        [torch],
        {**PINS, "fla": PINS["fla"].model_copy(update={"commit": "2" * 40})},
    )
    assert len({first, bumped, pinned}) == 3
    assert len(diff(find(history, first), find(history, bumped)).failing) == 1
    again = keep(history, verdicts(tmp_path, row()), [torch, *STACKS], PINS)
    assert again == first  # the bump was taken back


def test_without_a_bump_nothing_is_newly_failing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = run.configured()[1].model_copy(update={"results": Path("results")})
    monkeypatch.setattr(run, "configured", lambda: (tmp_path, config))
    history = tmp_path / "results" / "history"
    flashinfer = {"stack": "flashinfer", "digest": "f", "versions": {"flashinfer-python": "0.7.2"}}
    keep(history, verdicts(tmp_path, row()), STACKS, PINS, FULL)
    keep(history, verdicts(tmp_path, row(), row("fail", definition="b")), [*STACKS, flashinfer], PINS, FULL)
    with pytest.raises(SystemExit) as caught:
        main(["diff"])
    said = capsys.readouterr()
    assert caught.value.code == 0
    assert "0 newly failing" in said.out
    assert "one state is kept" in said.err


FULL = Scope(dataset="ours")
CASE = Scope(dataset="ours", whole=False)
OTHER = Scope(dataset="other")


def test_a_kept_state_that_is_damaged_ends_no_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    digest = keep(tmp_path / "history", verdicts(tmp_path, row()), STACKS, PINS)
    (tmp_path / "history" / f"{digest}.json").write_text("", encoding="utf-8")
    assert keep(tmp_path / "history", verdicts(tmp_path, row("fail")), STACKS, PINS) == digest
    said = capsys.readouterr().err
    assert f"what was kept of earlier runs in {tmp_path / 'history' / f'{digest}.json'} is lost: " in said
    assert [kept["verdict"] for kept in find(tmp_path / "history", digest).rows] == ["fail"]


def kept(folder: Path, runs: Sequence[tuple[Scope, Sequence[Mapping[str, Any]]]], digest: str = "d") -> Kept:
    """A state after some runs."""
    stacks = [{**STACKS[0], "digest": digest}]
    name = [keep(folder / "history", verdicts(folder, *rows), stacks, PINS, scope) for scope, rows in runs][-1]
    return find(folder / "history", name)


def test_cases_that_were_not_run_again_are_not_gone(tmp_path: Path) -> None:
    cases = [row(case=case, size="small", seed=0) for case in ("small-0", "small-1")]
    before = kept(tmp_path, [(FULL, cases)])
    after = kept(tmp_path, [(CASE, cases[:1])], digest="e")
    assert not diff(before, after).worse
    gone = kept(tmp_path, [(FULL, cases[:1])], digest="f")
    assert [was["case"] for was, _ in diff(before, gone).vanished_rows] == ["small-1"]


def test_a_part_of_the_cases_replaces_itself_alone(tmp_path: Path) -> None:
    cases = [row(case=case, size="small", seed=0) for case in ("small-0", "small-1")]
    sizes = [row(case="medium-0", size="medium", seed=0)]
    failing = [row("fail", case="small-0", size="small", seed=0)]
    state = kept(tmp_path, [(FULL, [*cases, *sizes]), (CASE, failing)])
    assert [(one["case"], one["verdict"]) for one in state.rows] == [
        ("medium-0", "pass"),
        ("small-0", "fail"),
        ("small-1", "pass"),
    ]
    smaller = kept(tmp_path, [(FULL, cases[:1])])
    assert [one["case"] for one in smaller.rows] == ["medium-0", "small-0"]
    other_seed = kept(tmp_path, [(FULL, [row(case="small-0", size="small", seed=7)])])
    assert [one["case"] for one in other_seed.rows] == ["medium-0", "small-0", "small-0"]


def test_a_namesake_of_another_dataset_is_another_definition(tmp_path: Path) -> None:
    ours = row(size="small", seed=0, digests={"definition": "1"})
    namesake = row("fail", size="small", seed=0, digests={"definition": "2"})
    before = kept(tmp_path, [(FULL, [ours])])
    beside = kept(tmp_path, [(FULL, [ours]), (OTHER, [namesake])], digest="e")
    assert {one["verdict"] for one in beside.rows} == {"pass", "fail"}
    assert not diff(before, beside).worse
    assert not diff(before, kept(tmp_path, [(OTHER, [namesake])], digest="f")).worse


def test_the_same_text_is_the_same_definition_in_any_dataset_and_an_edited_one_in_its_own(tmp_path: Path) -> None:
    ours = row(size="small", seed=0, digests={"definition": "1"})
    before = kept(tmp_path, [(FULL, [ours])])
    moved = kept(tmp_path, [(OTHER, [{**ours, "verdict": "fail"}])], digest="e")
    assert len(diff(before, moved).failing) == 1
    edited = kept(
        tmp_path, [(FULL, [ours]), (FULL, [row("fail", size="small", seed=0, digests={"definition": "2"})])]
    )
    assert [one["verdict"] for one in edited.rows] == ["fail"]
    assert len(diff(before, edited).failing) == 1
