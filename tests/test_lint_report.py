"""What lint writes: exit codes, the baseline, JSON, SARIF and the table."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
import typer
from lint_samples import ATTENTION, Sample, attention_line
from rich.console import Console
from typer.testing import CliRunner

from traceproof.cli.lint import lint_command
from traceproof.errors import TraceproofError
from traceproof.lint import Severity, lint
from traceproof.lint.run import all_rules, as_json, as_sarif, print_report, write_baseline


def spoiled(root: Path) -> Path:
    """A dataset with one warning (TP508), one error (TP402) and one note (TP401)."""
    sample = Sample()
    sample.attention_lines.append(attention_line("a-3", total_q=17))
    sample.moe["tags"] += ["ep:banana", "layout:nhd"]
    return sample.write(root)


def run_command(*arguments: str) -> tuple[int, str]:
    app = typer.Typer()
    app.command()(lint_command)
    result = CliRunner().invoke(app, list(arguments))
    if isinstance(result.exception, TraceproofError):
        return 2, str(result.exception)
    return result.exit_code, result.stdout


def test_exit_code_0_says_that_there_is_nothing(tmp_path: Path) -> None:
    code, text = run_command("--dataset", str(Sample().write(tmp_path)))
    assert code == 0
    assert "2 definitions: 0 errors, 0 warnings, 0 notes" in text
    assert "TP422 (FlashInfer has no such name) did not run: it needs --flashinfer-path" in text


def test_exit_code_1_says_that_there_are_findings(tmp_path: Path) -> None:
    code, text = run_command("--dataset", str(spoiled(tmp_path)))
    assert code == 1
    assert "2 definitions: 1 error, 1 warning, 1 note" in text


def test_notes_alone_do_not_fail(tmp_path: Path) -> None:
    code, text = run_command("--dataset", str(spoiled(tmp_path)), "--select", "TP401,TP421")
    assert code == 0
    assert "0 errors, 0 warnings, 1 note" in text


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--dataset", "/nowhere"), "is not a dataset"),
        (("--select", "TP9"), "'TP9' is the beginning of no code"),
        (("--select", ""), "'' is the beginning of no code"),
        (("--baseline", "/nowhere"), "can not be read"),
        (("--update-baseline",), "Give --baseline FILE as well"),
        (("--flashinfer-path", "/nowhere"), "/nowhere holds no flashinfer"),
        (("--json", "/nowhere/x"), "--json /nowhere/x cannot be written"),
        (("--baseline", "/nowhere/x", "--update-baseline"), "can not be written"),
    ],
)
def test_bad_use_or_input_is_told(tmp_path: Path, arguments: tuple[str, ...], says: str) -> None:
    code, text = run_command("--dataset", str(Sample().write(tmp_path)), *arguments)
    assert code == 2
    assert says in text


def test_select_and_ignore_take_beginnings_of_codes(tmp_path: Path) -> None:
    root = spoiled(tmp_path)
    assert [finding.code for finding in lint(root, select=["TP4"]).findings] == ["TP401", "TP402"]
    assert [finding.code for finding in lint(root, select=["TP4"], ignore=["TP401"]).findings] == ["TP402"]


def test_only_findings_that_the_baseline_does_not_know_fail(tmp_path: Path) -> None:
    root, baseline = spoiled(tmp_path / "set"), tmp_path / "baseline.json"
    given = ("--dataset", str(root), "--baseline", str(baseline))
    assert run_command(*given, "--update-baseline")[0] == 0
    code, text = run_command(*given)
    assert code == 0
    assert "0 errors, 0 warnings, 0 notes; 3 known by the baseline, 0 of it gone" in text
    lines = root / f"workloads/gqa_paged/{ATTENTION}.jsonl"
    lines.write_text(json.dumps(attention_line("a-4", total_q=18)) + "\n" + lines.read_text())
    code, text = run_command(*given)
    assert code == 1
    assert "a-4: total_q = 18" in text
    assert "a-3" not in text, "a line that moved is still the known one"


def test_the_baseline_knows_a_finding_as_often_as_it_was_there(tmp_path: Path) -> None:
    sample = Sample()
    sample.attention["constraints"].append("heads > 0")
    root, baseline = sample.write(tmp_path / "set"), tmp_path / "baseline.json"
    write_baseline(baseline, lint(root).findings)
    sample.attention["constraints"].append("heads > 0")
    report = lint(sample.write(root), baseline=baseline)
    assert (len(report.known), len(report.findings), report.gone) == (1, 1, 0)


def test_findings_that_are_gone_are_counted(tmp_path: Path) -> None:
    baseline = tmp_path / "baseline.json"
    write_baseline(baseline, lint(spoiled(tmp_path / "old")).findings)
    report = lint(Sample().write(tmp_path / "new"), baseline=baseline)
    assert (report.known, report.findings, report.gone) == ((), (), 3)


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"version": 2, "findings": []}', '{"version": 1, "findings": [1]}']
)
def test_a_file_that_is_no_baseline_is_refused(tmp_path: Path, text: str) -> None:
    baseline = tmp_path / "baseline.json"
    baseline.write_text(text)
    with pytest.raises(TraceproofError, match="baseline"):
        lint(Sample().write(tmp_path / "set"), baseline=baseline)


def test_json_holds_every_field(tmp_path: Path) -> None:
    code, text = run_command("--dataset", str(spoiled(tmp_path)), "--json", "-")
    value = json.loads(text)
    assert code == 1
    assert value["failed"]
    assert (value["definitions"], value["known"], value["gone"], len(value["not_run"])) == (2, [], 0, 1)
    found = next(finding for finding in value["findings"] if finding["code"] == "TP508")
    assert found.pop("fingerprint")
    assert found.pop("todo").startswith("Capture it again")
    assert found == {
        "code": "TP508",
        "title": "more queries than keys in a causal operation",
        "severity": "warning",
        "path": f"workloads/gqa_paged/{ATTENTION}.jsonl",
        "line": 3,
        "field": "/workload/axes",
        "evidence": "a-3: total_q = 17, num_kv_indices = 4 pages of 4",
    }


def sarif_of(root: Path, baseline: Path | None = None) -> dict[str, Any]:
    return json.loads(json.dumps(as_sarif(lint(root, baseline=baseline))))  # type: ignore[no-any-return]


def test_sarif_has_the_structure_of_2_1_0(tmp_path: Path) -> None:
    value = sarif_of(spoiled(tmp_path))
    assert set(value) == {"$schema", "version", "runs"}
    assert value["version"] == "2.1.0"
    (run,) = value["runs"]
    rules = run["tool"]["driver"]["rules"]
    assert run["tool"]["driver"]["name"] == "traceproof"
    assert [rule["id"] for rule in rules] == [rule.code for rule in all_rules()]
    for rule in rules:
        assert rule["shortDescription"]["text"]
        assert rule["help"]["text"]
        assert rule["defaultConfiguration"]["level"] in {"error", "warning", "note"}
    for result in run["results"]:
        assert rules[result["ruleIndex"]]["id"] == result["ruleId"]
        assert result["level"] in {"error", "warning", "note"}
        assert result["message"]["text"]
        (location,) = result["locations"]
        place = location["physicalLocation"]
        assert place["region"]["startLine"] >= 1
        assert place["artifactLocation"]["uriBaseId"] in run["originalUriBaseIds"]
        assert (tmp_path / place["artifactLocation"]["uri"]).is_file()
        assert location["logicalLocations"][0]["fullyQualifiedName"].startswith("/")


def test_sarif_tells_new_findings_from_known_ones(tmp_path: Path) -> None:
    baseline = tmp_path / "baseline.json"
    root = spoiled(tmp_path / "set")
    write_baseline(baseline, lint(root, select=["TP4"]).findings)
    results = sarif_of(root, baseline)["runs"][0]["results"]
    states = {result["ruleId"]: result["baselineState"] for result in results}
    assert states == {"TP401": "unchanged", "TP402": "unchanged", "TP508": "new"}


def test_sarif_says_which_rule_did_not_run(tmp_path: Path) -> None:
    (invocation,) = sarif_of(Sample().write(tmp_path))["runs"][0]["invocations"]
    assert "TP422" in invocation["toolExecutionNotifications"][0]["message"]["text"]


def test_the_table_names_file_field_evidence_and_what_to_do(tmp_path: Path) -> None:
    out = io.StringIO()
    print_report(lint(spoiled(tmp_path)), Console(file=out, width=250))
    text = out.getvalue()
    assert f"workloads/gqa_paged/{ATTENTION}.jsonl\n  TP508 :3/workload/axes" in text
    assert "'ep:banana': ep must be a positive whole number" in text
    assert "Write '<namespace>:<value>'" in text


def test_markup_and_control_characters_of_a_dataset_do_not_steer_the_terminal(tmp_path: Path) -> None:
    sample = Sample()
    sample.moe["tags"].append("[bold]:[/x]")
    root = sample.write(tmp_path)
    (root / "definitions" / "moe" / "\x1b[31mred.json").write_text("{")
    out = io.StringIO()
    print_report(lint(root), Console(file=out, width=250))
    assert "'[bold]:[/x]'" in out.getvalue()
    assert "\x1b" not in out.getvalue()


def test_every_code_is_well_formed_and_says_what_to_do() -> None:
    for rule in all_rules():
        assert len(rule.code) == 5
        assert rule.code.startswith("TP")
        assert rule.severity in set(Severity)
        assert rule.todo.endswith(".")


def test_two_runs_say_the_same(tmp_path: Path) -> None:
    root = spoiled(tmp_path)
    assert as_json(lint(root)) == as_json(lint(root))


def test_the_documented_codes_are_the_rules() -> None:
    text = (Path(__file__).parents[1] / "docs" / "findings-lint.md").read_text(encoding="utf-8")
    rows = [f"| {rule.code} | {rule.severity.value} | {rule.title} | {rule.todo} |" for rule in all_rules()]
    assert [row for row in rows if row not in text] == []
