"""What runs in a stack's environment needs nothing that the driver alone has."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

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
    "traceproof.pipeline.stages.op_type_judge",
    "traceproof.environments.toolkit",
    "traceproof.worker.host",
    "traceproof.worker.zygote",
)


def imported(statement: str) -> subprocess.CompletedProcess[str]:
    """Run a statement where the driver's packages can not be imported."""
    blocked = (
        f"import sys; sys.modules.update(dict.fromkeys({DRIVERS!r}, None)); sys.path[:0] = ['src', 'scripts']"
    )
    return subprocess.run(
        [sys.executable, "-c", f"{blocked}; {statement}"], cwd=ROOT, check=False, text=True, capture_output=True
    )


@pytest.mark.parametrize("name", MODULES)
def test_a_module_of_workers_is_imported_without_the_drivers_packages(name: str) -> None:
    done = imported(f"import {name}")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_of_a_stack_is_imported_without_the_drivers_packages(name: str) -> None:
    done = imported(f"import importlib; importlib.import_module({name!r})")
    assert done.returncode == 0, done.stderr


def test_a_drivers_package_is_really_missing_there() -> None:
    assert "ruamel" in imported("import traceproof.pipeline.known").stderr
