"""An environment that lacks something says what; modules are imported by the stacks that have what they need."""

from __future__ import annotations

import ast
import json
import os
import re
import sys
from collections.abc import Iterator
from functools import cache
from importlib.metadata import packages_distributions
from pathlib import Path

import forked
import pytest
import stacks as script
from definitions import write_files
from stacks import READS_MODELS, Imports, check

from traceproof.checkouts.pins import Pin, write_lock
from traceproof.checkouts.sources import LOCKED, FolderTree, pins_of, scan, source_state
from traceproof.cli import run
from traceproof.environments import building as environments
from traceproof.environments.building import Installation, importable, record_stack, stack_of
from traceproof.errors import TraceproofError
from traceproof.stacks import KERNELS, READER, STACKS

ROOT = Path(__file__).resolve().parent.parent
RULES = "def chunk_gated_delta_rule(): ...\ndef fused_recurrent_gated_delta_rule(): ...\n"
OPENS_DRIVER = "import ctypes\nctypes.CDLL('libcuda.so.1').cuInit\n"
without_driver = pytest.mark.skipif(environments.has_driver(), reason="needs a machine without an NVIDIA driver")


def environment(root: Path, code: str, *, installed: bool = True) -> None:
    """An FLA environment below `root` whose package runs `code` when it is imported."""
    packages = root / ".venvs" / "fla" / "lib" / "python3" / "site-packages"
    files = {"nvidia/cu13/include/cuda.h": "#define CUDA_VERSION 13000\nCUresult cuInit(unsigned int Flags);\n"}
    if installed:
        files |= {
            "fla_core-1.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: fla-core\nVersion: 1.0\n",
            "fla/ops/gated_delta_rule.py": code + RULES,
            "fla/ops/kda.py": code + "def fused_recurrent_kda(): ...\ndef chunk_kda(): ...\n",
        }
    write_files(packages, files)
    python = root / ".venvs" / "fla" / "bin" / "python"
    python.parent.mkdir()
    python.write_text(f'#!/bin/sh\nPYTHONPATH="$PYTHONPATH:{packages}" exec {sys.executable} "$@"\n')
    python.chmod(0o755)


@pytest.mark.slow
def test_a_whole_environment_lacks_nothing_and_a_package_that_is_not_installed_is_named(tmp_path: Path) -> None:
    environment(tmp_path / "whole", "")
    found = check("fla", root=tmp_path / "whole")
    assert {name.partition(" ")[0] for name in found.names} > {"chunk", "recurrent"}
    assert found == Imports(names=found.names, behind_driver=(), problems={})
    environment(tmp_path / "none", "", installed=False)
    assert check("fla", root=tmp_path / "none").problems == {"fla-core": "is not installed"}


@pytest.mark.slow
@without_driver
def test_a_missing_driver_is_no_problem_and_a_missing_package_behind_it_is(tmp_path: Path) -> None:
    environment(tmp_path / "driver", OPENS_DRIVER)
    found = check("fla", root=tmp_path / "driver")
    assert found == Imports(names=found.names, behind_driver=found.names, problems={})
    environment(tmp_path / "package", OPENS_DRIVER + "import undeclared\n")
    found = check("fla", root=tmp_path / "package")
    assert (found.behind_driver, list(found.problems)) == ((), list(found.names))
    assert all("No module named 'undeclared'" in problem for problem in found.problems.values())


@pytest.mark.parametrize(("problems", "status"), [({}, 0), ({"chunk": "No module named 'undeclared'"}, 1)])
def test_the_command_fails_with_what_is_absent(
    problems: dict[str, str],
    status: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    asked = Imports(names=("chunk", "recurrent"), behind_driver=("recurrent",), problems=problems)
    told: dict[str, str | None] = {}

    def ready(*_: object, **__: object) -> None:
        told.update({name: os.environ.get(name) for name in ("PIP_NO_INDEX", "PIP_FIND_LINKS")})

    for name in ("PIP_NO_INDEX", "PIP_FIND_LINKS"):
        monkeypatch.setenv(name, "")  # the command's own settings end with the test
    monkeypatch.setattr(script, "ready", ready)
    monkeypatch.setattr(script, "check", lambda *_, **__: asked)
    monkeypatch.setattr(sys, "argv", ["stacks.py", "--stack", "fla", "--no-index", "--find-links", str(tmp_path)])
    assert script.main() == status
    said = capsys.readouterr().out
    assert f"fla         {2 - status} of 2 imported" in said
    assert f"library ({script.DRIVER}) alone:\n    recurrent" in said
    assert ("chunk: No module named 'undeclared'" in said) is bool(status)
    assert told == {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(tmp_path)}


def test_a_stack_is_known_by_its_package(tmp_path: Path) -> None:
    assert stack_of(FolderTree(write_files(tmp_path / "a", {"python/sglang/__init__.py": ""}))) == "sglang"
    assert stack_of(FolderTree(write_files(tmp_path / "b", {"numpy/__init__.py": ""}))) is None


def test_a_checkout_is_imported_with_its_kernels(tmp_path: Path) -> None:
    checkout = write_files(
        tmp_path / "checkout", {"flashinfer/__init__.py": "x = 1\n", "csrc/norm.cu": "//\n", "include/a.h": "//\n"}
    )
    linked = importable(checkout, "flashinfer", tmp_path / "linked")
    assert (linked / "flashinfer" / "__init__.py").read_text() == "x = 1\n"
    assert (linked / "flashinfer" / "data" / "csrc" / "norm.cu").is_file()
    assert (linked / "traceproof" / "errors.py").is_file()
    assert "Version: 0+edited" in (linked / "flashinfer_python-0+edited.dist-info" / "METADATA").read_text()
    with pytest.raises(TraceproofError, match="holds no package fla"):
        importable(checkout, "fla", tmp_path / "other")


def test_a_locked_source_needs_a_pin(tmp_path: Path) -> None:
    taken = {"fla": LOCKED, "sglang": None}
    with pytest.raises(TraceproofError, match="no pin of fla"):
        pins_of(taken, root=tmp_path)
    write_lock(tmp_path / "sources.lock", {"fla": Pin(url="x", commit="1" * 40, ref="refs/heads/main")})
    assert pins_of(taken, root=tmp_path) == {"fla": {"url": "x", "commit": "1" * 40}}


def test_an_edit_of_what_was_cloned_is_seen(tmp_path: Path) -> None:
    folder = write_files(tmp_path / "sources" / "fla", {"fla/__init__.py": "1"})
    cloned = tmp_path / "sources.json"
    cloned.write_text(json.dumps({"scans": {"fla": scan(folder)}}))
    assert source_state("fla", LOCKED, root=tmp_path, cloned=cloned) == "as cloned"
    write_files(folder, {"fla/__init__.py": "12"})
    assert source_state("fla", LOCKED, root=tmp_path, cloned=cloned) == scan(folder) != "as cloned"


@pytest.mark.slow
def test_the_record_goes_by_what_the_package_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkout = write_files(
        tmp_path / "checkout", {"sglang/__init__.py": "", "sglang/srt/norm.py": "EPS = 1\n", "README.md": "a"}
    )
    stack = Installation.at("sglang", forked.interpreter())
    monkeypatch.chdir(ROOT)

    def digest(**files: str) -> str:
        write_files(checkout, files)
        record_stack(stack, checkout, linked=tmp_path / "linked", out=tmp_path / "sglang.json")
        record = json.loads((tmp_path / "sglang.json").read_text())
        assert record["versions"]["sglang"] == "0+edited"
        return str(record["digest"])

    first = digest()
    assert digest(**{"README.md": "b"}) == first
    assert digest(**{"sglang/srt/norm.py": "EPS = 2\n"}) != first


def found(given: Path | None, *needs: str, stack: str = "torch") -> str:
    return run.interpreter(given, stack=stack, needs=needs or ("json",), option="--torch-python")


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Installation]:
    """Stacks that were made ready, each by this interpreter; the machine has no driver."""
    stacks_made: list[Installation] = []

    def ready(stack: Installation, **_: object) -> Path:
        stacks_made.append(stack)
        return Path(sys.executable)

    monkeypatch.setattr(run, "ready", ready)
    monkeypatch.setattr(environments, "CUDA_DRIVER", ())
    return stacks_made


@pytest.mark.parametrize("stack", ["torch", "fla"])
def test_a_machine_without_a_gpu_takes_its_cpu_environment(made: list[Installation], stack: str) -> None:
    assert found(None, stack=stack) == sys.executable
    assert made == [Installation(stack, "cpu", ".venvs/cpu/bin/python")]


def test_a_given_interpreter_may_be_a_path_or_a_program(made: list[Installation]) -> None:
    assert found(Path(sys.executable)) == sys.executable
    assert Path(found(Path(Path(sys.executable).name))).name == Path(sys.executable).name
    assert not made


@pytest.mark.parametrize(
    ("given", "needs", "said", "todo"),
    [
        (Path("/nowhere/python"), "json", "there is no interpreter /nowhere/python", "--torch-python"),
        (Path("/bin/false"), "json", "/bin/false is no interpreter that can be used", "--torch-python"),
        (Path(sys.executable), "no_such_package", "has no no_such_package", "--torch-python"),
        (None, "no_such_package", "has no no_such_package", "stacks.torch.python"),
    ],
)
@pytest.mark.usefixtures("made")
def test_an_interpreter_that_will_not_do_is_said(given: Path | None, needs: str, said: str, todo: str) -> None:
    with pytest.raises(TraceproofError, match=said) as caught:
        found(given, needs)
    assert todo in caught.value.todo


SRC = ROOT / "src"
RULES_TRACED = "\n".join(path.read_text(encoding="utf-8") for path in sorted((ROOT / "rules").glob("*.smk")))
# The scripts that rules run in a stack's interpreter, and what else is started there.
SCRIPTS = tuple(sorted(set(re.findall(r"\{params\.python:q\} -P scripts/(\w+)\.py", RULES_TRACED))))
MODULES = (
    "traceproof.publish.solutions", "traceproof.coverage", "traceproof.environments.inside",
    "traceproof.run.trusted", "traceproof.run.workers", "traceproof.sandbox.worker",
)  # fmt: skip
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
