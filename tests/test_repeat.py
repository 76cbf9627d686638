"""The command that repeats a case works as it is printed."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
from repository import Repository, own_dataset

from traceproof.config import config_of, repeat_options
from traceproof.reasons import Verdict
from traceproof.run.schema import VerdictRow

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parent.parent
DATASET = str(ROOT / "tests" / "dataset")
ROW = VerdictRow(
    definition="rmsnorm_h96",
    op_type="rmsnorm",
    case="medium-1",
    implementation="reference",
    output="output",
    verdict=Verdict.PASS,
    repeat="--seed 7",
)


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Repository:
    return Repository.copy(tmp_path_factory.mktemp("repository"))


def test_a_row_names_its_definition_case_and_seed() -> None:
    start = "traceproof verify --definition-name rmsnorm_h96 --case medium-1 --seed 7"
    assert ROW.command("") == start
    assert ROW.command("--tolerance 0.1") == f"{start} --tolerance 0.1"


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, []),
        ({"selection": {"op_type": ["gemm"]}, "seed": 3, "force": True}, []),
        ({"test_sizes": ["large", "small"]}, ["--test-sizes", "small", "large"]),
        ({"tolerance": 0.1}, ["--tolerance", "0.1"]),
        ({"dataset": {"path": DATASET, "pypi": None}}, ["--dataset", DATASET]),
        ({"known": None, "workloads": True}, ["--", "--config", "workloads=true", "known=null"]),
        ({"limits": {"wall_s": 5}}, ["--", "--config", 'limits={"wall_s": 5.0']),
    ],
)
def test_what_config_yaml_says_otherwise_is_an_option(changes: dict[str, Any], expected: list[str]) -> None:
    given = shlex.split(repeat_options(config_of(ROOT, changes), ROOT))
    assert len(given) == len(expected)
    assert all(one.startswith(other) for one, other in zip(given, expected, strict=True))


def test_a_printed_command_runs_and_finds_the_same(repository: Repository, tmp_path: Path) -> None:
    dataset = own_dataset(tmp_path / "a dataset", "rmsnorm/rmsnorm_h96")
    file = dataset / "definitions" / "rmsnorm" / "rmsnorm_h96.json"
    definition = json.loads(file.read_text())
    wrong = "\n\nright = run\n\n\ndef run(*tensors):\n    return right(*tensors) * 1.01\n"
    file.write_text(json.dumps(definition | {"reference": definition["reference"] + wrong}))
    ran = repository.verify("--dataset", str(dataset), "--seed", "3", "--case", "small-0")
    assert ran.code == 1, ran.out
    (printed,) = {line.partition("repeat  ")[2] for line in ran.out.splitlines() if "repeat  " in line}
    program, *arguments = shlex.split(printed)
    again = repository.run(program, *arguments)
    assert again.code == 1, again.out
    assert printed in again.out
    accepted = repository.run(program, *arguments, "--tolerance", "0.1")
    assert accepted.code == 0, accepted.out
    assert "VERIFIED: 1 definition, 1 accepted by your tolerance, not proved" in accepted.out


def test_a_case_that_no_definition_has_is_told_with_those_close_to_it(
    repository: Repository, tmp_path: Path
) -> None:
    dataset = own_dataset(tmp_path / "dataset", "rmsnorm/rmsnorm_h96")
    ran = repository.verify("--dataset", str(dataset), "--case", "smal-0")
    assert ran.code == 2
    assert "case 'smal-0' is in none of the selected definitions; close to it: small-0" in ran.out
    assert "Traceback" not in ran.out
