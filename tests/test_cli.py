from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from pipeline import typed

from traceproof import programs
from traceproof.cli import main, results, run, spread
from traceproof.cli.verify import folder_of

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        (
            ["verify", "--test-sizes", "small", "medium", "large"],
            "--test-sizes small --test-sizes medium --test-sizes large",
        ),
        (["verify", "--op-type", "a", "b", "--force"], "--op-type a --op-type b --force"),
        (["verify", "--test-sizes", "small", "--", "-n", "x"], "--test-sizes small -- -n x"),
        (["verify", "--op-type", "a", "--op-type", "b"], "--op-type a --op-type b"),
        (["verify", "--json", "f"], "--json f"),
        (["verify", "--test-sizes", "small", "rmsnorm"], "--test-sizes small rmsnorm"),
        (["verify", "--case", "small-0", "edge-empty", "a/b.json"], "--case small-0 --case edge-empty a/b.json"),
        (["verify", "--select", "KL1", "KL2", "kernels"], "--select KL1 --select KL2 kernels"),
    ],
)
def test_several_values_may_follow_one_flag(given: list[str], meant: str) -> None:
    assert spread(given) == ["verify", *meant.split()]


def code_of(arguments: list[str]) -> int:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert isinstance(caught.value.code, int)
    return caught.value.code


def test_a_bad_configuration_is_written_as_json_too(tmp_path: Path) -> None:
    assert code_of(["verify", "--seed", "-1", "--json", str(tmp_path / "out.json")]) == 2
    written = json.loads((tmp_path / "out.json").read_text())
    assert written["exit_code"] == 2
    assert "seed: -1" in written["error"]


def test_help_names_the_exit_codes(capsys: pytest.CaptureFixture[str]) -> None:
    assert code_of(["verify", "--help"]) == 0
    assert "0 fine, 1 findings, 2 bad use" in " ".join(capsys.readouterr().out.split())


def test_commands_of_the_driver_import_no_torch() -> None:
    source = "import sys, traceproof.cli, traceproof.run.flow; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", source], check=False, cwd=ROOT).returncode == 0


@pytest.mark.parametrize(
    ("changes", "folder"),
    [
        ({}, ""),
        ({"force": True}, ""),
        ({"selection": {"all": True}}, ""),
        ({"seed": 0}, ""),
        ({"selection": {"op_type": ["rmsnorm"]}}, "selections/rmsnorm-"),
        ({"seed": 7}, "selections/all-"),
        ({"selection": {"definition_name": ["a/../b"]}}, "selections/a-b-"),
    ],
)
def test_only_another_selection_gets_a_folder_of_its_own(changes: dict[str, Any], folder: str) -> None:
    found = folder_of(run.config_of(ROOT, {}), run.config_of(ROOT, changes), changes)
    assert found.startswith(folder)
    assert bool(found) == bool(folder)


def row(**changes: object) -> dict[str, Any]:
    return {
        "definition": "d",
        "op_type": "rmsnorm",
        "case": "small-0",
        "axes": {"n": 3},
        "seed": 0,
        "implementation": "reference",
        "against": "oracle",
        "output": "y",
        "verdict": "pass",
        "message": "fine",
        "metrics": {"max_abs": 0.125, "within_specification": True},
        "specification": {"atol": 0.01},
        "worst": [{"index": [1, 2], "actual": 1.0, "expected": 2.0}],
        "repeat": "traceproof verify --definition-name d",
        **changes,
    }


def test_a_case_is_shown_with_its_outputs_its_worst_place_and_how_to_repeat_it() -> None:
    rows = [row(), row(output="lse", verdict="fail", message="ratio 1.4427")]
    assert list(results.describe(typed(rows), full=False)) == [
        "d, case small-0 (n 3, seed 0), reference",
        "  y    PASS   fine",
        "  lse  FAIL   ratio 1.4427; worst at [1, 2]: oracle 2.0, reference 1.0",
        "  repeat  traceproof verify --definition-name d",
    ]
    text = "\n".join(results.describe(typed([row()]), full=True))
    assert "max_abs 0.125" in text
    assert "within the specification's row (atol 0.01)" in text
    assert "at [1, 2]: oracle 2.0, reference 1.0" in text


def left(folder: Path, dataset: str, *, seconds: float, ended: float | None = None) -> None:
    """What a run leaves of one definition: `seconds` is when it was judged, `ended` when a run last had it."""
    for place in ("verdicts", "cases", "logs"):
        (folder / place).mkdir(parents=True)
    verdicts = folder / "verdicts" / "rmsnorm.jsonl"
    verdicts.write_text(json.dumps(row(message=f"of {dataset}")) + "\n")
    (folder / "cases" / "rmsnorm.json").write_text(json.dumps({"dataset": dataset}))
    os.utime(verdicts, (seconds, seconds))
    if ended is not None:
        log = folder / "logs" / "verify_all.log"
        log.touch()
        os.utime(log, (ended, ended))


def test_show_names_dataset_and_run_and_prefers_the_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = run.configured()[1].model_copy(update={"results": Path("results")})
    monkeypatch.setattr(run, "configured", lambda: (tmp_path, config))
    results = tmp_path / "results"
    left(results, "/old", seconds=1e9)
    left(results / "selections" / "d-1", "/mine", seconds=1.1e9)
    left(
        results / "selections" / "d-2", "/again", seconds=1.05e9, ended=1.2e9
    )  # had nothing to do the second time
    assert code_of(["show", "d"]) == 0
    told = capsys.readouterr().out.splitlines()
    assert re.fullmatch(rf"d of /again, verified \d{{4}}-.* in {results}/selections/d-2", told[0])
    assert told[1].startswith("  also of /mine, verified ")
    assert told[1].endswith(": `traceproof show d --selection selections/d-1`")
    assert told[2].endswith(": `traceproof show d --selection .`")
    assert told[-1] == "  y  PASS   of /again"
    assert code_of(["show", "d", "--selection", "selections/d-1", "--json", "-"]) == 0
    value = json.loads(capsys.readouterr().out)
    assert (value["dataset"], value["run"]) == ("/mine", f"{results}/selections/d-1")
    assert code_of(["show", "d", "--selection", "."]) == 0
    assert "d of /old, verified" in capsys.readouterr().out


def test_a_name_that_is_none_is_written_as_json_too(capsys: pytest.CaptureFixture[str]) -> None:
    dataset = str(ROOT / "tests" / "dataset")
    assert code_of(["verify", "rmsnrom", "--dataset", dataset, "--json", "-"]) == 2
    said = capsys.readouterr()
    value = json.loads(said.out)
    assert value["exit_code"] == 2
    assert value["error"].strip() == said.err.strip()
    assert "close to it: rmsnorm_h96" in value["error"]


def test_verify_says_at_once_what_is_judged_in_another_version_than_the_lock_pins(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("traceproof.cli.verify.unlike_the_lock", lambda *_, **__: {"fla": "fla is another"})

    def snakemake(*_: object, **__: object) -> int:
        assert capsys.readouterr().err == "note: fla is another\n"
        return 7

    monkeypatch.setattr(run, "snakemake", snakemake)
    assert code_of(["verify", "--op-type", "gdn"]) == 7


def test_jobs_may_take_most_of_the_free_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(programs, "available_memory", lambda: 100 << 30)
    monkeypatch.setattr(programs, "nvidia_smi", lambda _: [["1000"]])
    assert programs.memory_for_jobs() == {"mem_mb": 85 << 10, "gpu_mb": 950}
