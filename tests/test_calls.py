"""Which worker makes which calls of a reference."""

from __future__ import annotations

from traceproof.ops.cases import Case
from traceproof.pipeline.records import PlannedCase
from traceproof.pipeline.stages.calls import ROWS_AT_ONCE, Call, shared


def call(name: str, trials: int, *, rows: int = 10, repeat: bool = False, hidden: str = "") -> Call:
    planned = PlannedCase(
        case=Case(name, "small", {"batch_size": rows}, 0, {}),
        digest="0" * 32,
        memory=0,
        trials=trials,
        skip=None,
        large=False,
        nonce=0,
        repeat=repeat,
        hidden=hidden,
    )
    return Call(planned=planned, key=name)


def names(parts: list[list[Call]]) -> list[list[str]]:
    return [[one.case_id for one in part] for part in parts]


def test_what_draws_little_has_one_worker() -> None:
    calls = [call("a", 0), call("b", ROWS_AT_ONCE // 10), call("c", 0, repeat=True), call("d", 0, hidden="seed")]
    assert names(shared(calls)) == [["a", "b", "c", "d"]]
    assert names(shared([])) == [[]]


def test_what_draws_much_has_several_and_what_shows_a_memory_one_of_them() -> None:
    half = ROWS_AT_ONCE // 10
    calls = [
        call("a", half),
        call("b", half),
        call("again", half // 2, repeat=True),
        call("hidden", half // 2, hidden="seed"),
    ]
    assert sorted(names(shared(calls))) == [["a"], ["again", "hidden"], ["b"]]
