"""The ledger: what earns a definition its tag, and keeps it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from definitions import GOOD, rmsnorm
from publish_support import ACTORS, row

from traceproof.dataset.definition import Definition
from traceproof.errors import TraceproofError
from traceproof.publish.ledger import DATES, Ledger, keep, tagged


def ledger_of(tmp_path: Path, rows: list[dict[str, Any]]) -> Ledger:
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(item) + "\n" for item in rows))
    return keep([tmp_path / "rows.jsonl"], tmp_path / "ledger.jsonl", tmp_path, references={})


ALPHA = Definition.model_validate(rmsnorm("alpha"))


def rows_of(**changes: dict[str, Any]) -> list[dict[str, Any]]:
    return [row("alpha", ALPHA.digest, "small-0", actor, **changes.get(actor, {})) for actor in ACTORS]


def test_a_reference_and_a_ground_truth_that_pass_earn_the_tag(tmp_path: Path) -> None:
    standing = ledger_of(tmp_path, rows_of()).standing(ALPHA)
    assert standing.truths == ("torch",)
    assert tagged(ALPHA, standing) == ("status:verified",)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"reference": {"verdict": "fail", "reason": "nan"}}, "its reference: fail nan in case small-0, output"),
        ({"reference": {"verdict": "skip", "reason": "no_oracle", "output": "*"}}, "nothing was compared"),
        ({"reference": {"tolerance": 0.1}}, "a tolerance of the user's own"),
        ({"torch": {"verdict": "fail", "reason": "numerics"}}, "torch: fail numerics"),
        ({"torch": {"verdict": "skip", "reason": "no_cuda", "output": "*"}}, "no_cuda 1"),
        ({"torch": {"case": "small-1", "digests": {"definition": "f" * 32, "inputs": ""}}}, "no ground truth"),
    ],
)
def test_anything_less_does_not(tmp_path: Path, changes: dict[str, dict[str, Any]], reason: str) -> None:
    standing = ledger_of(tmp_path, rows_of(**changes)).standing(ALPHA)
    assert reason in standing.reason
    assert tagged(ALPHA, standing) == ("status:unverified",)


def test_a_definition_whose_reference_changed_is_not_verified(tmp_path: Path) -> None:
    changed = Definition.model_validate(rmsnorm("alpha", GOOD.replace("1e-6", "1e-5")))
    assert "it changed" in ledger_of(tmp_path, rows_of()).standing(changed).reason


def test_a_record_keeps_its_date_and_reads_back(tmp_path: Path) -> None:
    first = ledger_of(tmp_path, rows_of())
    dates = json.loads((tmp_path / DATES).read_text())
    (tmp_path / DATES).write_text(json.dumps(dict.fromkeys(dates, "2020-02-02")))
    again = ledger_of(tmp_path, rows_of())
    assert again.records["alpha"]["torch"].date == "2020-02-02"
    assert Ledger.read(tmp_path / "ledger.jsonl").records == again.records
    assert first.records["alpha"]["torch"].digests == again.records["alpha"]["torch"].digests


def test_a_torn_ledger_says_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "ledger.jsonl").write_text('{"definition": "alpha"')
    with pytest.raises(TraceproofError, match="to write it anew"):
        Ledger.read(tmp_path / "ledger.jsonl")
