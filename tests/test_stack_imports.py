"""What runs in a stack's environment needs nothing but what that environment's pins give."""

from __future__ import annotations

import ast
import json
import re
import sys
from collections.abc import Iterator
from functools import cache
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from stacks import READS_MODELS, check

from traceproof.stacks import KERNELS, READER, STACKS

ROOT = Path(__file__).resolve().parent.parent
SRC = ROOT / "src"
RULES = "\n".join(path.read_text(encoding="utf-8") for path in sorted((ROOT / "rules").glob("*.smk")))
# The scripts that rules run in a stack's interpreter, and what else is started there.
SCRIPTS = tuple(sorted(set(re.findall(r"\{params\.python:q\} -P scripts/(\w+)\.py", RULES))))
MODULES = (
    "traceproof.publish.solutions",
    "traceproof.coverage",
    "traceproof.environments.inside",
    "traceproof.run.trusted",
    "traceproof.run.workers",
    "traceproof.sandbox.worker",
)
STARTED = (*SCRIPTS, *MODULES)
RUN = {name: STARTED for stack in KERNELS for name in STACKS[stack].environments} | {READER: (READS_MODELS,)}
BY_NAME = ("traceproof.ops", "traceproof.stacks")  # their modules are found by listing the folder
NAMED = re.compile(r"(traceproof(?:\.\w+)+)(?::\w+)?")  # how a worker is told what to import
# Asked for by TRITON_INTERPRET=1 alone, where Triton is installed.
ONLY_WHERE_INSTALLED = {("traceproof.environments.interpreted", "triton")}


def source(module: str) -> Path | None:
    """The file of a module of ours or of a script."""
    folder = SRC if module.startswith("traceproof") else ROOT / "scripts"
    path = folder.joinpath(*module.split("."))
    return next((one for one in (path.with_suffix(".py"), path / "__init__.py") if one.is_file()), None)


def imported(node: ast.AST) -> Iterator[str]:
    """What the code below `node` imports, whenever it does; what is for type checkers alone is not."""
    for child in ast.iter_child_nodes(node):
        match child:
            case ast.If(test=ast.Name(id="TYPE_CHECKING")):
                continue
            case ast.Import():
                yield from (alias.name for alias in child.names)
            case ast.ImportFrom(module=str() as name):
                yield from (name, *(f"{name}.{alias.name}" for alias in child.names))
            case ast.Constant(value=str() as text):
                if found := NAMED.fullmatch(text):
                    yield found[1]
        yield from imported(child)


@cache
def needs(module: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Modules of ours that a module imports, and the names of packages that it does."""
    path = source(module)
    if path is None:
        return (), ()
    names = set(imported(ast.parse(path.read_text(encoding="utf-8"))))
    ours = {name for name in names if name.startswith("traceproof.")}
    for folder in ours & set(BY_NAME) | {module} & set(BY_NAME):
        found = SRC.joinpath(*folder.split(".")).rglob("*.py")
        ours |= {".".join(one.relative_to(SRC).with_suffix("").parts) for one in found}
    parents = {name.rpartition(".")[0] for name in ours}
    others = {name.partition(".")[0] for name in names - ours}
    return tuple(ours | parents), tuple(others - sys.stdlib_module_names - {"traceproof"})


providers = cache(packages_distributions)


def missing(module: str, environment: str) -> list[str]:
    """What a module's imports, and theirs, need that an environment's pins do not give."""
    pins = (ROOT / "envs" / f"{environment}.txt").read_text(encoding="utf-8")
    pinned = {normal(name) for name in re.findall(r"^([\w.-]+)==", pins, re.MULTILINE)}
    ways, todo, found = {module: module}, [module], []
    while todo:
        current = todo.pop()
        ours, packages = needs(current)
        for name in packages:
            given = {normal(one) for one in providers().get(name, [name])}
            if not given & pinned and (current, name) not in ONLY_WHERE_INSTALLED:
                found.append(f"{ways[current]} imports {name}, which envs/{environment}.txt does not pin")
        for name in ours:
            if name not in ways:
                ways[name] = f"{ways[current]} > {name}"
                todo.append(name)
    return found


def normal(distribution: str) -> str:
    """A distribution's name as indexes compare it."""
    return re.sub(r"[-_.]+", "-", distribution).lower()


def test_every_rule_with_a_stacks_interpreter_is_found() -> None:
    assert set(SCRIPTS) == {"stack_job"}


@pytest.mark.parametrize("environment", RUN)
def test_what_runs_in_an_environment_needs_only_its_pins(environment: str) -> None:
    problems = [problem for module in RUN[environment] for problem in missing(module, environment)]
    assert not problems, "\n".join(problems)


@pytest.mark.parametrize(
    ("module", "package"), [("traceproof.testgen.summary", "rich"), ("traceproof.run.known", "ruamel")]
)
def test_a_package_of_the_driver_alone_is_missing_there(module: str, package: str) -> None:
    assert [line for line in missing(module, "cpu") if f"imports {package}," in line]


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
