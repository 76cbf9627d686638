"""The summary fails on news, on an unexpected pass, and on nothing compared; its end says what that proves."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from pipeline import Rows, row, summarise, told, typed

from traceproof.config import config_of, repeat_options
from traceproof.digests import digest_file
from traceproof.errors import TraceproofError
from traceproof.files import write_text
from traceproof.reasons import Skip
from traceproof.run.cache import FILE, Cache, key_of_file
from traceproof.run.known import Known, read_known
from traceproof.run.report import ERROR, MADE_OF, NO_TRUTH, UNREADABLE, read_summary, report, table
from traceproof.run.report import WHY as WORDS_OF_SKIPS
from traceproof.run.schema import INDEX, RETRY, OpTypePlan, VerdictRow, each_row, rows_text

ROOT = Path(__file__).resolve().parent.parent
WHY = "the reference's fault: see docs/findings.md, evidence there"


def known(**changes: Any) -> Known:  # noqa: ANN401 - JSON
    entry: dict[str, Any] = {"definitions": ["rmsnorm_h8"], "cases": ["small-0"], "outputs": ["output"]}
    entry |= {"verdict": "fail", "reason": "nan", "why": WHY}
    return Known.model_validate({"findings": [entry | changes]})


@pytest.mark.parametrize(("count", "lines", "times"), [(300, 100, 1), (8, 8, 2)])
def test_each_definition_with_findings_has_a_line_and_some_are_told(count: int, lines: int, times: int) -> None:
    names = [f"rmsnorm_h{number}" for number in range(count)]
    rows = [
        row(definition=name, case=f"small-{case}", verdict="fail", reason="nan", repeat=f"again {name}")
        for name in names
        for case in range(9 if name == names[0] else 7)
    ]
    text = table(summarise(rows, Known()))
    listed, full = text[text.index(f"{len(rows)} new:") :].split("\n\n")[:2]
    assert [line.split(":")[0].strip() for line in listed.splitlines()[1 : lines + 1]] == names[:lines]
    assert "  rmsnorm_h0: 9, first case small-0, reference, output: nan" in listed
    assert ("... and 200 more definitions in summary.json" in listed) == (count > lines)
    told = 16 if count == 8 else 20
    assert full.count("repeat  again rmsnorm_h") == told
    assert full.count("repeat  again rmsnorm_h0\n") == times
    assert f"... and {len(rows) - told} more in summary.json" in full


@pytest.mark.parametrize(
    ("changes", "fails", "said"),
    [
        ({"verdict": "fail", "reason": "nan"}, False, "VERIFIED: 1 definition, 1 with known findings"),
        ({}, True, "not as known.yaml says"),
        ({"verdict": "fail", "reason": "shape"}, True, "NOT VERIFIED"),
        ({"verdict": "fail", "reason": "nan", "implementation": "flashinfer"}, True, "NOT VERIFIED"),
        ({"case": "small-1"}, False, "VERIFIED"),  # the known one was not run
    ],
)
def test_a_known_finding_is_that_row_with_that_reason(changes: dict[str, Any], said: str, *, fails: bool) -> None:
    summary = summarise([row(**changes)], known())
    assert summary["verified"] is not fails
    assert said in table(summary)


def test_a_finding_with_a_digest_means_that_definition_alone() -> None:
    entry = known(definitions={"rmsnorm_h8": "a" * 32})
    same, other = ({"digests": {"definition": digit * 32}} for digit in "ab")
    assert not summarise([row(**same)], entry)["verified"]
    assert summarise([row(**other)], entry)["verified"]
    assert summarise([row(verdict="fail", reason="nan", **same)], entry)["verified"]
    assert not summarise([row(verdict="fail", reason="nan", **other)], entry)["verified"]


def flashinfer(version: str) -> list[dict[str, Any]]:
    return [{"stack": "flashinfer", "versions": {"flashinfer-python": version, "torch": "2.14.1"}}]


@pytest.mark.parametrize(
    ("version", "verdict", "kind"),
    [
        ("0.6.13", "fail", "known"),
        ("0.6.13", "pass", "unexpected"),
        ("0.7.2.post1", "fail", "new"),
        ("0.7.2.post1", "pass", None),
        ("0+g1234567890ab", "fail", "known"),  # a checkout has no released version
        ("0+g1234567890ab", "pass", None),
    ],
)
def test_a_finding_is_expected_of_the_versions_that_it_names(version: str, verdict: str, kind: str | None) -> None:
    entry = known(implementation="flashinfer", versions=["flashinfer-python<0.7", "torch<3"])
    one = row(implementation="flashinfer", verdict=verdict, reason=None if verdict == "pass" else "nan")
    for versions in ({}, {"versions": {"flashinfer-python": "0.5"}}):  # this run's count, not a kept row's
        summary = summarise([row(), one | versions], entry, flashinfer(version))
        found = {name: len(found) for name, found in summary["findings"].items() if found}
        assert found == ({kind: 1} if kind else {})
        assert summary["verified"] != (kind in {"new", "unexpected"})


def test_a_package_that_the_environment_of_an_implementation_lacks_is_an_error() -> None:
    entry = known(implementation="flashinfer", versions="fla-core<1")
    with pytest.raises(TraceproofError, match="fla-core<1: that environment holds no fla-core"):
        summarise([row(implementation="flashinfer", verdict="fail", reason="nan")], entry, flashinfer("0.6.13"))
    summarise([row(implementation="flashinfer", verdict="skip", reason="no_cuda")], entry, flashinfer("0.6.13"))


ENTRY = "definitions: [a], cases: [b], outputs: [c], verdict: fail, reason: nan, why: evidence stands elsewhere"


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        (f"{ENTRY}, versions: flashinfer-python<<0.7", ["findings.0.versions", "is no specifier"]),
        (f"{ENTRY}, versions: flashinfer-python", ["must be a package and versions of it"]),
        (f"{ENTRY}, versions: flashinfer<0.7", ["an unknown package; did you mean 'flashinfer-python'?"]),
        (f"{ENTRY}, versions: []", ["is neither a specifier nor a list of some"]),
        (
            "definitions: [a], colour: red, verdict: pass",
            ["findings.0.cases", "findings.0.colour", "findings.0.verdict", "findings.0.why"],
        ),
        ("", ["known"]),  # there is no such file
    ],
)
def test_known_yaml_reports_all_problems_at_once(tmp_path: Path, entry: str, said: list[str]) -> None:
    path = tmp_path / "known.yaml"
    if entry:
        path.write_text(f"findings:\n- {{{entry}}}\n", encoding="utf-8")
    with pytest.raises(TraceproofError) as caught:
        read_known(path)
    assert [part for part in said if part not in str(caught.value)] == []


def test_the_shipped_list_serves_flashinfer_before_and_after_its_mask_was_mended() -> None:
    listed = read_known(ROOT / "known.yaml")
    for entry in (entry for entry in listed.findings if entry.implementation == "flashinfer"):
        mended = entry.why.startswith(("G1 ", "G3 "))
        found = [entry.stands({"flashinfer-python": version}) for version in ("0.6.13", "0.7.2.post1")]
        assert found == [True, not mended], entry.why


def test_nothing_compared_is_a_failure(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").touch()
    summary = report([tmp_path / "empty.jsonl"], tmp_path / "summary.json", known=None)
    assert not summary["verified"]
    assert "nothing was compared" in table(summary)


@pytest.mark.parametrize("damage", ["summary", "verdicts", "absent", "another run's", "unreadable"])
def test_a_summary_that_is_not_of_what_is_there_is_removed(tmp_path: Path, damage: str) -> None:
    verdicts, summary = tmp_path / "verdicts" / "rmsnorm.jsonl", tmp_path / "summary.json"
    write_text(verdicts, rows_text([row()]))
    made = report([verdicts], summary, known=None)
    assert made[MADE_OF] == {verdicts.name: digest_file(verdicts)}
    assert made == read_summary(summary)
    if damage == "summary":
        summary.write_text(summary.read_text(encoding="utf-8").replace("pass", "fail", 1), encoding="utf-8")
    elif damage == "absent":
        verdicts.unlink()
    elif damage == "unreadable":
        unreadable(verdicts)
    else:
        other = row(verdict="fail" if damage == "verdicts" else "error")
        verdicts.write_text(rows_text([other]), encoding="utf-8")
    with pytest.raises(TraceproofError, match="Run the same command again"):
        read_summary(summary)
    assert not summary.exists()
    assert verdicts.exists() is (damage == "summary")
    assert not verdicts.is_symlink()


def unreadable(path: Path) -> None:
    """Make opening a file fail for every user, also for root, whom permissions do not stop."""
    path.unlink()
    path.symlink_to(path)


@pytest.mark.parametrize("reason", ["timeout", "memory", "exception"])
def test_a_new_finding_of_a_limit_starts_its_job_again_a_known_one_does_not(tmp_path: Path, reason: str) -> None:
    verdicts, listed = tmp_path / "verdicts" / "rmsnorm.1-of-2.jsonl", tmp_path / "known.yaml"
    write_text(verdicts, rows_text([row(verdict="error", reason=reason)]))
    entry = known(verdict="error", reason=reason).model_dump_json(exclude={"findings": {"__all__": {"versions"}}})
    listed.write_text(entry, encoding="utf-8")
    retried = tmp_path / RETRY / "rmsnorm.1-of-2"
    report([verdicts], tmp_path / "summary.json", known=listed)
    assert not retried.exists()
    summary = report([verdicts], tmp_path / "summary.json", known=None)
    assert retried.exists() is (reason != "exception")
    assert ("by the next run alone: rmsnorm_h8." in table(summary)) is retried.exists()


def test_a_plan_that_was_damaged_before_its_verdicts_were_is_removed_with_them(tmp_path: Path) -> None:
    verdicts, summary = tmp_path / "verdicts" / "rmsnorm.1-of-2.jsonl", tmp_path / "summary.json"
    index, plans = (
        tmp_path / "cases" / INDEX,
        [tmp_path / "cases" / f"{name}.json" for name in ("rmsnorm.1-of-2", "gemm")],
    )
    whole = OpTypePlan(op_type="gemm", dataset="", definitions={}, broken=()).as_text()
    for text in (whole, whole[:-2]):
        for path in (index, *plans):
            write_text(path, text if path == plans[0] else whole)
        write_text(verdicts, rows_text([row()]))
        report([verdicts], summary, known=None)
        verdicts.write_text("", encoding="utf-8")
        with pytest.raises(TraceproofError, match="Run the same command again"):
            read_summary(summary)
        kept = text == whole
        assert [path.exists() for path in (verdicts, summary, index, *plans)] == [False, False, kept, kept, True]


def test_verdicts_that_were_changed_after_they_were_written_are_removed(tmp_path: Path) -> None:
    verdicts, cache = tmp_path / "verdicts" / "rmsnorm.jsonl", tmp_path / FILE
    write_text(verdicts, rows_text([row(verdict="fail")]))
    with Cache(cache) as kept:
        kept.put({key_of_file(verdicts, cache): digest_file(verdicts)})
    report([verdicts], tmp_path / "summary.json", known=None, cache=cache)
    write_text(verdicts, rows_text([row(verdict="pass")]))
    with pytest.raises(TraceproofError, match="changed after they were written"):
        report([verdicts], tmp_path / "summary.json", known=None, cache=cache)
    assert not verdicts.exists()
    write_text(verdicts, rows_text([row(verdict="pass")]))
    cache.unlink()
    with pytest.raises(TraceproofError, match="the cache that knew is lost"):
        report([verdicts], tmp_path / "summary.json", known=None, cache=cache)
    assert not verdicts.exists()
    write_text(verdicts, rows_text([row()]))
    unreadable(verdicts)
    with pytest.raises(TraceproofError, match="Run the same command again"):
        report([verdicts], tmp_path / "summary.json", known=None, cache=cache)
    assert not verdicts.is_symlink()


def test_op_types_are_summarised_once_and_as_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, read = tmp_path / "run", list[str]()

    def noted(path: Path) -> Iterator[VerdictRow]:
        read.append(path.stem)
        return each_row(path)

    monkeypatch.setattr("traceproof.run.schema.each_row", noted)
    norms = [row(), row(definition="rmsnorm_h9", verdict="fail", reason="nan"), row(implementation="torch")]
    other, absent = {"op_type": "gdn", "definition": "a"}, {"verdict": "skip", "output": "*"}
    others = [
        row(**other, grade="scaled_down", scaled_down="n 2 -> 1"),
        row(op_type="gdn", definition="b", verdict="skip", reason="no_oracle"),
        row(**other, implementation="flashinfer", reason="no_cuda") | absent,
    ]
    entry = tmp_path / "known.yaml"
    entry.write_text(known(definitions=["rmsnorm_h9"]).model_dump_json(exclude_unset=True), encoding="utf-8")

    def reported(rows: Mapping[str, Rows] = {}, *, cache: Path | None = tmp_path / FILE) -> dict[str, Any]:
        read.clear()
        for op_type, own in rows.items():
            path = run / "verdicts" / f"{op_type}.jsonl"
            write_text(path, rows_text(own))
            with Cache(tmp_path / FILE) as kept:
                kept.put({key_of_file(path, tmp_path / FILE): digest_file(path)})
        files = sorted((run / "verdicts").iterdir())
        found = report(files, run / "summary.json", known=entry, cache=cache)
        del found[MADE_OF]
        return found

    first = reported({"rmsnorm": norms, "gdn": others})
    assert first == summarise([*others, *norms], read_known(entry))
    assert first["findings"]["known"]
    assert reported() == first
    assert read == []
    changed = [row(op_type="gdn", definition="other")]
    assert reported({"gdn": changed}) == summarise([*changed, *norms], read_known(entry))
    namesake = [row(op_type="gdn", verdict="error", case=None)]  # of a file that can not be read
    assert reported({"gdn": namesake}) == summarise([*namesake, *norms], read_known(entry))
    assert reported({"gdn": others}) == first
    assert read == []
    assert reported(cache=None) == first
    assert read == ["gdn", "rmsnorm"]
    groups: dict[str, Rows] = {"rmsnorm": [], "rmsnorm.1-of-2": norms[1:2], "rmsnorm.2-of-2": norms[::2]}
    assert reported(groups) == summarise([*others, *norms], read_known(entry))
    for name in ("rmsnorm.1-of-2", "rmsnorm.2-of-2"):
        (run / "verdicts" / f"{name}.jsonl").unlink()
    reported({"rmsnorm": norms})
    entry.write_text("findings: []", encoding="utf-8")
    assert reported()["findings"]["known"] == []


@pytest.mark.parametrize(
    ("grade", "about", "verdict"),
    [("scaled_down", {"scaled_down": "n 2 -> 1"}, "scaled_down"), ("consistent", {"constants": "eps"}, "pass")],
)
def test_a_wrong_reference_has_no_grade_whatever_else_passed(
    grade: str, about: dict[str, str], verdict: str
) -> None:
    right, wrong = row(case="small-1", grade=grade, **about), row(verdict="fail", reason="nan")
    graded, ungraded = (summarise(rows, Known()) for rows in ([right], [right, wrong]))
    [found], [none] = (told(one, "grade").values() for one in (graded, ungraded))
    assert (found, none, *told(graded, "verdict").values()) == (grade, None, verdict)


def test_the_last_line_reads_right_to_a_stranger() -> None:
    rows = [row(definition=f"right_{number}") for number in range(41)]
    rows += [row(case="small-1"), row(verdict="fail", reason="nan")]
    rows += [row(definition="large", output="*", verdict="skip", reason="does_not_fit")]
    rows += [row(definition="large", implementation="flashinfer", output="*", verdict="skip", reason="no_cuda")]
    told = "43 definitions, 41 right, 1 with known findings, 1 not runnable here"
    summary = summarise(rows, known())
    assert f"\nVERIFIED: {told}\n" in table(summary)
    assert summary["verified"]
    rows += [row(definition="broken", verdict="error", reason="crash")]
    rows += [row(definition="own", verdict="skip", reason="no_oracle"), row(definition="own", case="small-1")]
    told = "45 definitions, 41 right, 1 with known findings, 1 with new findings, 1 not verified: no oracle"
    assert f"NOT VERIFIED: {told}" in table(summarise(rows, known()))


@pytest.mark.parametrize("reason", ["does_not_fit", "blob_missing", "no_oracle"])
def test_a_run_of_skips_alone_is_no_success(reason: str) -> None:
    summary = summarise(
        [row(verdict="skip", reason=reason), row(implementation="torch", output="*", verdict="skip", reason="x")],
        Known(),
    )
    assert not summary["verified"]
    assert "NOT VERIFIED: 1 definition, 1 not " in table(summary)
    assert f"; nothing was compared: {reason} 1\n" in table(summary)


def test_what_a_users_tolerance_accepts_is_neither_right_nor_proved_nor_known() -> None:
    accepted = row(tolerance=0.1)
    summary = summarise([accepted, row(implementation="torch", tolerance=0.1)], known())
    assert summary["verified"]
    text = table(summary)
    assert "VERIFIED: 1 definition, 1 accepted by your tolerance, not proved" in text
    assert "0 of 1 definitions against a ground truth; not proved: 1 accepted by your tolerance." in text
    assert not summary["findings"]["unexpected"]
    refused = summarise([row(tolerance=0.1, verdict="fail", reason="nan")], known())
    assert not refused["verified"]
    assert len(refused["findings"]["new"]) == 1


DATASET = str(ROOT / "tests" / "dataset")


def test_a_row_names_its_definition_case_and_seed() -> None:
    start = "traceproof verify --definition-name rmsnorm_h8 --case small-0 --seed 7"
    (one,) = typed([row(repeat="--seed 7")])
    assert one.command("") == start
    assert one.command("--tolerance 0.1") == f"{start} --tolerance 0.1"


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, []),
        ({"selection": {"op_type": ["gemm"]}, "seed": 3, "force": True}, []),
        ({"test_sizes": ["large", "small"]}, ["--test-sizes", "small", "large"]),
        ({"tolerance": 0.00123456789}, ["--tolerance", "0.00123456789"]),
        ({"dataset": {"path": DATASET, "pypi": None}}, ["--dataset", DATASET]),
        ({"known": None, "workloads": True}, ["--", "--config", "workloads=true", "known=null"]),
        ({"limits": {"wall_s": 5}}, ["--", "--config", 'limits={"wall_s": 5.0']),
    ],
)
def test_what_config_yaml_says_otherwise_is_an_option(changes: dict[str, Any], expected: list[str]) -> None:
    given = shlex.split(repeat_options(config_of(ROOT, changes), ROOT))
    assert len(given) == len(expected)
    assert all(one.startswith(other) for one, other in zip(given, expected, strict=True))


GPU = {"device_type": "cuda", "device": "NVIDIA H200", "capability": "9.0"}
ON_GPU: Sequence[Mapping[str, Any]] = (
    {"stack": "torch", "versions": {"torch": "2.14.1"}, **GPU},
    {"stack": "flashinfer", "versions": {"flashinfer-python": "0.7.2.post1", "torch": "2.14.1"}, **GPU},
)


def result(definition: str, implementation: str, verdict: str = "pass", **more: Any) -> dict[str, Any]:  # noqa: ANN401
    of = {"definition": definition, "op_type": definition.partition("_")[0], "implementation": implementation}
    return row(**of, verdict=verdict, **more)


def ending(*rows: dict[str, Any], stacks: Sequence[Mapping[str, Any]] = ON_GPU) -> list[str]:
    lines = table(summarise(rows, Known(), stacks)).splitlines()
    start = next(number for number, line in enumerate(lines) if "VERIFIED" in line)
    return lines[start + 1 :]


def test_a_gpu_and_the_ground_truths_are_named_with_their_versions() -> None:
    rows = [result("gqa_a", implementation) for implementation in ("reference", "flashinfer")]
    assert ending(*rows) == [
        "Proved on SM 9.0 (NVIDIA H200) with FlashInfer 0.7.2.post1: 1 of 1 definitions against a ground truth."
    ]


def test_what_had_no_ground_truth_here_is_named_with_the_reason() -> None:
    rows = [result("norm_a", "reference"), result("norm_a", "torch")]
    for name in ("gdn_a", "gdn_b", "gdn_c"):
        rows += [result(name, "reference"), result(name, "flashinfer", "skip", reason=Skip.NO_CUDA)]
    rows += [result("moe_a", one, "skip", reason=Skip.DOES_NOT_FIT) for one in ("reference", "flashinfer")]
    stacks = [{"stack": "torch", "versions": {"torch": "2"}, "device_type": "cpu", "capability": None}]
    proved, unreached = ending(*rows, stacks=stacks)
    start, _, counts = proved.partition(": ")
    assert start == "Proved on the CPU with PyTorch 2"
    assert counts == (
        "1 of 5 definitions against a ground truth, 3 against the float64 oracle alone; not proved: 1 not run."
    )
    assert unreached == (
        "Without a ground truth here: moe_a (larger than limits.memory_gb); all 3 of gdn (needs a GPU)."
    )


def test_a_reference_with_a_finding_is_not_proved_one_whose_ground_truth_has_it_is() -> None:
    rows = [result("gqa_a", "reference", "fail", reason="nan"), result("gqa_a", "flashinfer")]
    rows += [result("gqa_b", "reference"), result("gqa_b", "flashinfer", "fail", reason="nan")]
    (line,) = ending(*rows)
    assert line.endswith(": 1 of 2 definitions against a ground truth; not proved: 1 with findings.")


@pytest.mark.parametrize(
    ("rows", "reason"),
    [
        ([result("a_a", "reference"), result("a_a", "fla", "error", reason="timeout")], ERROR),
        ([result("a_a", "reference", "error", reason="crash"), result("a_a", "fla")], ERROR),
        ([result("a_a", "reference")], NO_TRUTH),
        ([result("a_a", "reference") | {"case": None, "verdict": "error"}], UNREADABLE),
        (
            [
                result("a_a", "reference", "skip", reason=Skip.NO_REFERENCE),
                result("a_a", "torch"),
                result("a_a", "torch") | {"output": "*", "message": "a second run gave the same bits"},
                result("a_a", "flashinfer", "skip", reason=Skip.NO_CUDA),
            ],
            Skip.NO_REFERENCE,
        ),
        (
            [
                result("a_a", "reference"),
                result("a_a", "fla", "skip", reason=Skip.NO_ADAPTER),
                result("a_a", "flashinfer", "skip", reason=Skip.NEEDS_SM),
            ],
            Skip.NEEDS_SM,
        ),
    ],
)
def test_the_reason_that_is_told_is_the_one_nearest_to_a_verdict(rows: list[dict[str, Any]], reason: str) -> None:
    assert told(summarise(rows, Known(), ON_GPU), "unmet") == {"a_a": reason}


def test_every_reason_to_skip_has_words() -> None:
    assert set(Skip) <= WORDS_OF_SKIPS.keys()
