"""Each rule finds its planted defect and nothing else; a clean dataset has no finding."""

from __future__ import annotations

from pathlib import Path

import pytest
from lint_planted import PLANTED, Edit, add_residual
from lint_samples import Sample

from traceproof.dataset.definition import LARGEST
from traceproof.lint import lint
from traceproof.lint.run import all_rules


@pytest.fixture(scope="module")
def flashinfer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("site")
    (root / "flashinfer").mkdir()
    (root / "flashinfer/__init__.py").write_text("")
    (root / "flashinfer/prefill.py").write_text("class Prefill: ...\n")
    (root / "flashinfer/moe.py").write_text("def fp4_moe(): ...\n")
    (root / "flashinfer/fused_moe.py").write_text("def block_scale_fp8_moe(): ...\n")
    return root


def test_a_clean_dataset_has_no_finding(tmp_path: Path, flashinfer: Path) -> None:
    report = lint(Sample().write(tmp_path), flashinfer=flashinfer)
    assert report.findings == ()
    assert report.not_run == ()
    assert report.definitions == 2


def test_a_fused_add_that_returns_the_sum_is_clean(tmp_path: Path, flashinfer: Path) -> None:
    sample = Sample()
    add_residual(sample, outputs=2)
    assert lint(sample.write(tmp_path), flashinfer=flashinfer).findings == ()


def test_every_rule_has_a_planted_defect() -> None:
    assert sorted({code for code, _, _ in PLANTED}) == [rule.code for rule in all_rules()]


@pytest.mark.parametrize(
    ("code", "evidence", "edits"), PLANTED, ids=[f"{code}-{evidence[:40]}" for code, evidence, _ in PLANTED]
)
def test_a_planted_defect_is_found_and_nothing_else(
    tmp_path: Path, flashinfer: Path, code: str, evidence: str, edits: tuple[Edit, ...]
) -> None:
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
    sample.moe["reference"] = sample.moe["reference"].replace(
        "    TOP_K = 2", f"    TOP_K = 2\n    depth = {deep}"
    )
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
