"""What runs in a stack's environment needs nothing that the driver alone has."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from traceproof.environments.imports import READS_MODELS, check
from traceproof.stacks import READER

ROOT = Path(__file__).resolve().parent.parent
# Packages of the driver that no stack pins.
DRIVERS = (
    "filelock",
    "git",
    "huggingface_hub",
    "nox",
    "requests",
    "rich",
    "ruamel",
    "snakemake",
    "tenacity",
    "typer",
)
SCRIPTS = ("actor", "cases", "jit", "judge")  # of the rules that start a stack's interpreter
MODULES = (
    "traceproof.actors.execute",
    "traceproof.actors.measure",
    "traceproof.actors.preload",
    "traceproof.pipeline.jit",
    "traceproof.environments.probe",
    "traceproof.execution.runner",
    "traceproof.pipeline.stages.definition_judge",
    "traceproof.pipeline.stages.plan",
    "traceproof.pipeline.stages.plan_job",
    "traceproof.environments.toolkit",
    "traceproof.worker.host",
    "traceproof.worker.zygote",
)


PROGRAM = """
import importlib, json, sys, traceback
sys.modules.update(dict.fromkeys(json.loads(sys.argv[1])))  # what is None there can not be imported
sys.path[:0] = ["src", "scripts"]
found = {}
for name in sys.argv[2:]:
    try:
        importlib.import_module(name)
    except BaseException:
        found[name] = traceback.format_exc()
print(json.dumps(found))
"""


def imported(*names: str) -> dict[str, str]:
    """Modules that can not be imported where the driver's packages are absent, and why."""
    command = [sys.executable, "-c", PROGRAM, json.dumps(DRIVERS), *names]
    done = subprocess.run(command, cwd=ROOT, check=True, text=True, capture_output=True)
    found: dict[str, str] = json.loads(done.stdout)
    return found


@pytest.fixture(scope="module")
def problems() -> dict[str, str]:
    """Those of all modules and scripts, which one interpreter imports."""
    return imported(*MODULES, *SCRIPTS)


@pytest.mark.parametrize("name", [*MODULES, *SCRIPTS])
def test_what_runs_in_a_stack_is_imported_without_the_drivers_packages(
    name: str, problems: dict[str, str]
) -> None:
    assert name not in problems, problems[name]


def test_a_drivers_package_is_really_missing_there() -> None:
    assert "ruamel" in imported("traceproof.pipeline.known")["traceproof.pipeline.known"]


@pytest.mark.parametrize(
    ("answer", "problem"), [({"models": []}, None), ({"error": {"reason": "no sglang"}}, "no sglang")]
)
def test_the_environment_that_reads_models_is_asked_as_its_program_wants_it(
    tmp_path: Path, answer: dict[str, object], problem: str | None
) -> None:
    program = (ROOT / "src/traceproof/extract/bootstrap/__main__.py").read_text(encoding="utf-8")
    required = re.findall(r'add_argument\(\s*"(--[a-z]+)"[^)]*required=True', program)
    assert required
    python = tmp_path / ".venvs" / READER / "bin" / "python"
    python.parent.mkdir(parents=True)
    (tmp_path / "0.json").write_text(json.dumps(answer), encoding="utf-8")
    script = f'echo "$@" > {tmp_path}/asked\nwhile [ "$1" != --out ]; do shift; done\ncp {tmp_path}/0.json "$2"\n'
    python.write_text(f"#!/bin/sh\n{script}", encoding="utf-8")
    python.chmod(0o755)
    found = check(READER, root=tmp_path)
    asked = (tmp_path / "asked").read_text(encoding="utf-8").split()
    assert READS_MODELS in asked
    assert set(required) <= set(asked)
    assert found.names == (READS_MODELS,)
    assert (problem in found.problems[READS_MODELS]) if problem else not found.problems
