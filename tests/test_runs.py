"""What runs side by side have in common."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from run_claims import claimed

from traceproof import runs
from traceproof.errors import TraceproofError


def test_a_selection_belongs_to_one_run_until_that_ends(tmp_path: Path) -> None:
    with claimed(tmp_path, "selections/a", "e") as other:
        with pytest.raises(TraceproofError, match=f"process {other.pid}"):
            runs.claim(tmp_path, "selections/a", environments="e")
        with pytest.raises(TraceproofError, match=f"`kill {other.pid}`"):
            runs.check_free(tmp_path, "selections/a")
        runs.claim(tmp_path, "selections/b", environments="e")
        other.kill()
    runs.check_free(tmp_path, "selections/a")
    runs.claim(tmp_path, "selections/a", environments="e")


def test_runs_of_other_stacks_do_not_share_a_results_folder(tmp_path: Path) -> None:
    with claimed(tmp_path, "", "one") as other:
        with pytest.raises(TraceproofError, match="other stacks or models"):
            runs.claim(tmp_path, "selections/b", environments="another")
        other.kill()


def test_what_another_run_made_meanwhile_is_not_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = Path("results/stacks/torch.json")
    (tmp_path / made).parent.mkdir(parents=True)
    (tmp_path / made).touch()
    monkeypatch.setenv(runs.SINCE, str(time.time() + 1))
    with runs.alone(made, root=tmp_path) as needed:
        assert needed
    monkeypatch.setenv(runs.SINCE, str(time.time() - 1))
    with runs.alone(made, root=tmp_path) as needed:
        assert not needed
    monkeypatch.delenv(runs.SINCE)
    with runs.alone(made, root=tmp_path) as needed:
        assert needed
