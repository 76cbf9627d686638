"""The rules, run for real on a small dataset of our own."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import time
from pathlib import Path

import forked
import pytest
from repository import PROGRAMS, Ran, Repository, changed, own_dataset

pytestmark = pytest.mark.slow

NORM, OTHER_NORM, GEMM = "rmsnorm/rmsnorm_h96", "rmsnorm/fused_add_rmsnorm_h96", "gemm/gemm_n96_k160"
PLANS = "    plan = OpTypePlan.read(cases)"
KILLS = f"    raise SystemExit(3)\n{PLANS}"
WRONG = ("return (x * ", "return 1.01 * (x * ")
AHEAD = 7 * 24 * 3600.0
SELECTED = ("gemm_n96_k160", "--test-sizes", "small")


@pytest.fixture(scope="module")
def fresh(tmp_path_factory: pytest.TempPathFactory) -> Repository:
    """A copy in which nothing was run, with the shipped dataset source."""
    return Repository.copy(tmp_path_factory.mktemp("fresh"))


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Repository:
    """A copy that was run once on a dataset of our own."""
    dataset = own_dataset(tmp_path_factory.mktemp("dataset"), NORM, OTHER_NORM, GEMM)
    root, python = tmp_path_factory.mktemp("repository"), forked.interpreter()
    copy = Repository.copy(root, python=python, dataset={"path": str(dataset)})
    ran = copy.verify()
    assert ran.code == 0, ran.out
    return copy


@pytest.fixture
def own(repository: Repository, tmp_path: Path) -> Repository:
    """A copy of that one, which a test may change."""
    return repository.again(tmp_path / "own")


def definition(repository: Repository, name: str) -> Path:
    """A definition's file, in the dataset as planned."""
    planned = json.loads((repository.root / "results" / "cases" / "rmsnorm.json").read_text())
    return Path(planned["dataset"]) / "definitions" / f"{name}.json"


def counts(ran: Ran, job: str) -> str:
    """The last progress line of an op_type's job."""
    lines = [line for line in ran.out.splitlines() if line.startswith(job)]
    assert lines, ran.out
    return lines[-1]


def test_a_fresh_clone_plans_the_whole_way_from_the_source_to_the_table(fresh: Repository) -> None:
    ran = fresh.dry()
    assert ran.code == 0, ran.out
    jobs = [job.split()[0] for job in ran.jobs]
    assert sorted(jobs[:2]) == ["dataset", "stack"]  # in either order
    assert jobs[2:] == ["cases", "report", "verify_all"]


def test_every_family_is_a_target_and_an_environment_of_ours_is_built_first(fresh: Repository) -> None:
    chosen = ("mla", "rmsnorm", "dsa")
    ours = 'stacks={"torch": {"python": null, "env": "cpu"}}'
    ran = fresh.dry(*(f"verify_{family}" for family in chosen), "--config", ours)
    assert ran.code == 0, ran.out
    assert "environment cpu" in ran.jobs
    last = ran.jobs[-2 * len(chosen) :]
    assert sorted(last) == sorted([f"{job}{name}" for name in chosen for job in ("report_family ", "verify_")])
    assert all(last.index(f"report_family {name}") < last.index(f"verify_{name}") for name in chosen)


def test_a_bad_configuration_is_told_in_full_without_a_traceback(fresh: Repository) -> None:
    ran = fresh.dry("--config", "seed=x", "sizes=1")
    assert ran.code == 2
    assert "config.yaml cannot be used:\n  - seed: 'x'" in ran.out
    assert "  - sizes: unknown key" in ran.out
    assert "Traceback" not in ran.out


def test_a_run_gives_every_definition_a_verdict_and_a_second_one_prints_the_table(repository: Repository) -> None:
    summary = repository.summary()
    assert summary["verified"]
    assert repository.verdicts() == dict.fromkeys(
        ["fused_add_rmsnorm_h96", "gemm_n96_k160", "rmsnorm_h96"], "pass"
    )
    ran = repository.verify()
    assert ran.code == 0
    assert "VERIFIED: 3 definitions, 3 right" in ran.out
    assert ran.jobs == []


def test_the_tests_of_every_op_type_are_run_and_what_is_verified_is_not_again(repository: Repository) -> None:
    ran = repository.dry("run_tests", "verify_all")
    assert ran.code == 0, ran.out
    jobs = {"run_tests_of gemm torch", "run_tests_of rmsnorm torch", "tests_report", "run_tests", "verify_all"}
    assert set(ran.jobs) == jobs


def test_the_code_of_one_op_concerns_its_op_type_alone(own: Repository) -> None:
    own.edit("src/traceproof/ops/families/product.py", "import math", "import math\n\nMORE = math.pi")
    ran = own.verify()
    assert ran.code == 0, ran.out
    assert {"verify gemm", "report"} <= set(ran.jobs)
    assert not [job for job in ran.jobs if "rmsnorm" in job]


def test_a_failed_job_never_shows_the_table_of_the_run_before(own: Repository) -> None:
    own.edit("scripts/stack_job.py", PLANS, KILLS)
    with changed(definition(own, NORM), *WRONG):
        ran = own.verify()
        assert ran.code == 2, ran.out
        assert ran.out.splitlines()[-1].startswith("The run could not finish: verify rmsnorm failed.")
        assert not [job for job in ran.jobs if "gemm" in job]
        again = own.verify()
        assert again.code == 2, again.out
        assert "VERIFIED:" not in again.out


def test_what_ran_into_a_limit_is_computed_again_by_the_next_run_and_nothing_else(own: Repository) -> None:
    hurried = f"    limits = replace(limits, seconds=1e-3)\n{PLANS}"
    own.edit("scripts/stack_job.py", PLANS, f"    from dataclasses import replace\n\n{hurried}")
    with changed(definition(own, NORM), WRONG[0], "return 1.0 * (x * "):
        ran = own.verify()
        assert ran.code == 1, ran.out
        assert "again by the next run alone: rmsnorm_h96.\n" in ran.out
        assert own.verdicts()["rmsnorm_h96"] == "error"
        own.edit("scripts/stack_job.py", hurried, PLANS)
        again = own.verify()
        assert again.code == 0, again.out
        assert again.jobs == ["verify rmsnorm", "report"]
        planned = json.loads((own.root / "results/cases/rmsnorm.json").read_text())["definitions"]
        count = len(planned["rmsnorm_h96"]["cases"])  # the other definition's rows are kept
        assert f" {count}/{count} calls, pass {count}" in counts(again, "rmsnorm")
        assert own.verify().jobs == []


def test_a_wrong_reference_is_a_finding_of_that_definition_alone_until_it_is_put_right(own: Repository) -> None:
    with changed(definition(own, NORM), *WRONG):
        ran = own.verify("--json", str(own.root / "out.json"))
        assert ran.code == 1
        assert "NOT VERIFIED" in ran.out
        assert "RuleException" not in ran.out
        assert json.loads((own.root / "out.json").read_text())["exit_code"] == 1
        assert own.verdicts() == {"fused_add_rmsnorm_h96": "pass", "gemm_n96_k160": "pass", "rmsnorm_h96": "fail"}
        assert not [job for job in ran.jobs if "gemm" in job]
        shown = own.run("traceproof", "show", "rmsnorm_h96", "--case", "small-0")
        assert shown.code == 1
        assert "FAIL" in shown.out
        assert "max_abs" in shown.out
        printed = next(line.partition("repeat  ")[2] for line in ran.out.splitlines() if "repeat  " in line)
        accepted = own.run(*shlex.split(printed), "--tolerance", "0.1")
        assert accepted.code == 0, accepted.out
        assert "VERIFIED: 1 definition, 1 accepted by your tolerance, not proved" in accepted.out
    ahead = time.time() + AHEAD  # whatever the dates of files
    for path in (own.root / "results").rglob("*"):
        if path.suffix in {".json", ".jsonl"}:
            os.utime(path, (ahead, ahead))
    righted = own.verify()
    assert righted.code == 0, righted.out
    assert "VERIFIED: 3 definitions, 3 right" in righted.out


def test_a_name_as_an_argument_has_its_own_folder_and_json_is_alone_on_stdout_and_force_runs_it_again(
    own: Repository,
) -> None:
    command = [forked.interpreter(PROGRAMS), "-m", "traceproof", "verify", "--cores", "1", *SELECTED]
    command += ["--json", "-", "--", "--quiet"]
    done = subprocess.run(command, cwd=own.root, env=own.environment, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert set(json.loads(done.stdout)["definitions"]) == {"gemm_n96_k160"}
    assert "VERIFIED: 1 definition, 1 right" in done.stderr
    (folder,) = (own.root / "results" / "selections").glob("*gemm*")
    assert list(own.summary(f"results/selections/{folder.name}")["definitions"]) == ["gemm_n96_k160"]
    ran = own.verify(*SELECTED, "--force")
    assert ran.code == 0, ran.out
    assert "verify gemm" in ran.jobs
    assert "kept" not in counts(ran, "gemm")
    shown = own.verify(*SELECTED, "--force", "--", "--dry-run")
    assert "verify gemm" in shown.jobs, shown.out
    assert own.verify(*SELECTED).jobs == []  # nor has the run that was forced left anything to do


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--case", "smal-0"), "case 'smal-0' is in none of the selected definitions; close to it: small-0"),
        (("--", "--no-such-option"), "snakemake: error: "),
    ],
)
def test_what_does_not_exist_is_bad_use(repository: Repository, options: tuple[str, ...], said: str) -> None:
    ran = repository.verify(*options)
    assert ran.code == 2
    assert said in ran.out
    assert "Traceback" not in ran.out
    assert "engine.py" not in ran.out


def test_a_definition_that_can_not_be_used_says_what_is_wrong_with_its_file(repository: Repository) -> None:
    with changed(definition(repository, OTHER_NORM), '"axes": {', ""):
        ran = repository.verify("--definition-name", "fused_add_rmsnorm_h96")
    assert ran.code == 2
    said = "'fused_add_rmsnorm_h96' can not be used: definitions/rmsnorm/fused_add_rmsnorm_h96.json: not JSON"
    assert said in ran.out
    assert "close to it" not in ran.out


def test_a_failed_job_leaves_no_record_of_an_environment_as_it_was(own: Repository) -> None:
    records = "    from traceproof.environments.building import record_stack\n"
    own.edit("scripts/job.py", records, f"    raise SystemExit(2)\n{records}")
    for options in (("--", "--forcerun", "stack"), ()):
        ran = own.verify(*options)
        assert (ran.code, ran.jobs) == (2, []), ran.out
