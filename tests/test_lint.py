"""Each rule finds its planted defect and nothing else; exit codes, the baseline, JSON and text."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer
from definitions import write_files
from lint_samples import ATTENTION, PLANTED, Edit, Sample, attention_line
from typer.testing import CliRunner

from traceproof.cli.lint import lint_command
from traceproof.dataset.definition import LARGEST
from traceproof.errors import TraceproofError
from traceproof.lint.flashinfer_names import Package
from traceproof.lint.model import codes
from traceproof.lint.run import lint, report_text


@pytest.fixture(scope="module")
def flashinfer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("site")
    files = {"__init__": "", "prefill": "class Prefill: ...\n", "moe": "def fp4_moe(): ...\n"}
    files["fused_moe"] = "def block_scale_fp8_moe(): ...\n"
    write_files(root, {f"flashinfer/{name}.py": text for name, text in files.items()})
    return root


def test_a_clean_dataset_has_no_finding(tmp_path: Path, flashinfer: Path) -> None:
    report = lint(Sample().write(tmp_path), flashinfer=flashinfer)
    assert report.findings == ()
    assert report.not_run == ()
    assert report.definitions == 2


def test_every_rule_has_a_planted_defect() -> None:
    assert sorted({code for code, *_ in PLANTED}) == [*codes("TP")]


@pytest.mark.parametrize("planted", PLANTED, ids=lambda planted: f"{planted[0]}-{planted[1][:40]}")
def test_a_planted_defect(tmp_path: Path, flashinfer: Path, planted: tuple[str, str, *tuple[Edit, ...]]) -> None:
    code, evidence, *edits = planted
    sample = Sample()
    for edit in edits:
        edit(sample)
    findings = lint(sample.write(tmp_path), flashinfer=flashinfer).findings
    assert [finding for finding in findings if evidence in finding.evidence], findings
    assert {finding.code for finding in findings} == {code}


@pytest.mark.parametrize("terms", [900, 2500])
def test_a_deep_expression_does_not_end_the_run(tmp_path: Path, flashinfer: Path, terms: int) -> None:
    sample = Sample()
    deep = "1" + "+1" * terms
    sample.attention["constraints"].append(f"{deep} < 5")
    sample.moe["reference"] = sample.moe["reference"].replace("    TOP_K = 2", f"    TOP_K = 2\n    deep = {deep}")
    findings = lint(sample.write(tmp_path), flashinfer=flashinfer).findings
    assert [finding.code for finding in findings] == ["TP203"]


@pytest.mark.parametrize(
    "constraint", ["1 // 0 > 2", "1e308 * 10 > total_q / 0", "10.0 ** huge > 1", "q.shape[9] > 1"]
)
def test_an_expression_without_a_value_is_no_finding(tmp_path: Path, flashinfer: Path, constraint: str) -> None:
    sample = Sample()
    sample.attention["axes"]["huge"] = {"type": "const", "value": LARGEST}
    sample.attention["constraints"] += [constraint, "huge * total_q > 1"]
    sample.attention["name"] += "_v" + "9" * 50
    findings = lint(sample.write(tmp_path), flashinfer=flashinfer).findings
    assert {finding.code for finding in findings} == {"TP103", "TP501"}, "only the file's name is wrong"


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


def test_exit_codes_say_whether_there_are_findings_beyond_notes(tmp_path: Path) -> None:
    code, text = run_command("--dataset", str(Sample().write(tmp_path / "clean")))
    assert code == 0
    assert "2 definitions: 0 errors, 0 warnings, 0 notes" in text
    assert "TP422 (FlashInfer has no such name) did not run: it needs --flashinfer-path" in text
    root = str(spoiled(tmp_path / "spoiled"))
    code, text = run_command("--dataset", root)
    assert code == 1
    assert "2 definitions: 1 error, 1 warning, 1 note" in text
    assert f"workloads/gqa_paged/{ATTENTION}.jsonl:3/workload/axes: TP508" in text
    assert "Write '<namespace>:<value>'" in text
    code, text = run_command("--dataset", root, "--select", "TP401,TP421")
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


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"version": 2, "findings": []}', '{"version": 1, "findings": [1]}']
)
def test_a_file_that_is_no_baseline_is_refused(tmp_path: Path, text: str) -> None:
    baseline = tmp_path / "baseline.json"
    baseline.write_text(text)
    with pytest.raises(TraceproofError, match="baseline"):
        lint(Sample().write(tmp_path / "set"), baseline=baseline)


def test_markup_and_control_characters_of_a_dataset_do_not_steer_the_terminal(tmp_path: Path) -> None:
    sample = Sample()
    sample.moe["tags"].append("[bold]:[/x]")
    root = sample.write(tmp_path)
    (root / "definitions" / "moe" / "\x1b[31mred.json").write_text("{")
    text = report_text(lint(root))
    assert "'[bold]:[/x]'" in text
    assert "\x1b" not in text


def test_the_documented_codes_are_the_rules() -> None:
    text = (Path(__file__).parents[1] / "docs" / "findings-lint.md").read_text(encoding="utf-8")
    rows = [
        f"| {rule.code} | {rule.severity.value} | {rule.title} | {rule.todo} |" for rule in codes("TP").values()
    ]
    assert [row for row in rows if row not in text] == []


FILES = {
    "__init__.py": """
raise RuntimeError("this package must not be imported")
from .decode import Wrapper as DecodeWrapper
from . import norm
from .star import *
from .missing_module import gone
from . import circle_a
""",
    "norm.py": """
from .core.rms import rmsnorm
import math
from os import path
limit: int = 3
a, (b, c) = 1, (2, 3)
""",
    "core/__init__.py": "",
    "core/rms.py": """
try:
    from fast import rmsnorm
except ImportError:
    def rmsnorm(x): ...
if math:
    def slow(x): ...
else:
    def slow(x): ...
with lock:
    guarded = 1
""",
    "decode.py": """
class Base:
    def plan(self): ...
class Wrapper:
    size = 1
    def run(self): ...
class Heir(Base): ...
async def wait(): ...
from flashinfer.norm import rmsnorm as absolute
from ..outside import thing
""",
    "star.py": "def shining(): ...\n",
    "circle_a.py": "from .circle_b import lost\n",
    "circle_b.py": "from .circle_a import lost\n",
}


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Package:
    root = tmp_path_factory.mktemp("site")
    write_files(root / "flashinfer", FILES)
    return Package(root)


FOUND = """flashinfer.norm flashinfer.norm.rmsnorm flashinfer.norm.math flashinfer.norm.path.join
flashinfer.norm.limit flashinfer.norm.c flashinfer.core.rms.rmsnorm flashinfer.core.rms.slow
flashinfer.core.rms.guarded flashinfer.decode.Wrapper flashinfer.decode.Wrapper.run
flashinfer.decode.Wrapper.size flashinfer.decode.Heir.plan flashinfer.decode.wait
flashinfer.decode.absolute flashinfer.DecodeWrapper.run flashinfer.shining"""
MISSING = {
    "flashinfer.norm.layernorm": "flashinfer.norm has no layernorm",
    "flashinfer.dark": "flashinfer has no dark",
    "flashinfer.decode.Wrapper.plan": "Wrapper has no plan",
    "flashinfer.gone": "flashinfer has no module missing_module",
    "flashinfer.circle_a.lost": "re-exports of flashinfer.circle_b.lost go in a circle",
    "torch.nn": "not a dotted name in flashinfer",
    "flashinfer": "not a dotted name in flashinfer",
    "flashinfer..norm": "not a dotted name in flashinfer",
    "flashinfer.norm()": "not a dotted name in flashinfer",
}


def test_a_dotted_name_is_read_off_the_packages_files_or_told_why_it_is_not_there(package: Package) -> None:
    found = {name: package.problem(name) for name in (*FOUND.split(), *MISSING)}
    assert found == dict.fromkeys(FOUND.split(), "") | MISSING
    assert Package(package.root / "flashinfer").problem("flashinfer.norm.rmsnorm") == ""


def test_a_folder_without_the_package_and_a_file_that_is_no_python_are_refused(tmp_path: Path) -> None:
    with pytest.raises(TraceproofError, match="holds no flashinfer"):
        Package(tmp_path)
    (tmp_path / "flashinfer").mkdir()
    (tmp_path / "flashinfer/__init__.py").write_text("def (:")
    with pytest.raises(TraceproofError, match="can not be read as Python"):
        Package(tmp_path).problem("flashinfer.norm")
