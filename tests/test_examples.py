"""Commands of docs/tutorial.md, and examples of docs/library.md with the wheel, do as they are written."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Mapping
from pathlib import Path

import forked
import pytest
import torch
from repository import DEFINITIONS, PROGRAMS, ROOT, Ran, Repository

from traceproof.api import forms

pytestmark = pytest.mark.slow
TUTORIAL = (ROOT / "docs" / "tutorial.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```bash\n(.*?)^```", TUTORIAL, re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Repository:
    """What the first command leaves: a dataset, and an environment that has traceproof."""
    root = tmp_path_factory.mktemp("tutorial")
    place = "results/dataset/flashinfer-bench-1"
    sizes = ["small", "medium"]
    copy = Repository.copy(root, python=forked.interpreter(), dataset={"path": place}, test_sizes=sizes)
    for folder in (root / ".venv" / "bin", root / place / "definitions" / "rmsnorm"):
        folder.mkdir(parents=True)
    text = (DEFINITIONS / "rmsnorm" / "rmsnorm_h96.json").read_text(encoding="utf-8").replace("96", "4096")
    (root / place / "definitions" / "rmsnorm" / "rmsnorm_h4096.json").write_text(text)
    program = forked.interpreter(PROGRAMS)
    (root / ".venv" / "bin" / "activate").write_text(f'traceproof() {{ {program} -m traceproof "$@"; }}\n')
    return copy


def shell(repository: Repository, block: str) -> Ran:
    """A block of commands in the activated environment; the first one that fails ends it."""
    command = ("bash", "-ec", f". .venv/bin/activate\n{block}")
    return Ran.of(*command, cwd=repository.root, env=repository.environment)


def test_the_tutorials_commands_do_what_it_says(repository: Repository) -> None:
    first, look, broken, judge = BLOCKS
    assert first == "python3 scripts/verify_all.py\n"
    assert (ROOT / ".ci" / "run").read_text(encoding="utf-8").count(first) == 1
    ran = shell(repository, look)
    assert ran.code == 0, ran.out
    assert "VERIFIED: 1 definition" in ran.out
    assert "case medium-1" in ran.out
    ran = shell(repository, broken)
    assert ran.code == 2, ran.out
    assert "hidden_size + 1" in ran.out
    ran = shell(repository, judge)
    assert ran.code == 0, ran.out
    assert "ACCEPTED: my_rmsnorm for rmsnorm_h4096" in ran.out
    assert list((repository.root / "results" / "judged").glob("my_rmsnorm-rmsnorm_h4096.*"))


PAGE = (ROOT / "docs" / "library.md").read_text(encoding="utf-8")
EXAMPLES: Mapping[str, str] = dict(
    re.findall(r"^## ([^\n]+)\n(?:(?!^## ).)*?```python\n(.*?)```", PAGE, re.MULTILINE | re.DOTALL)
)
GPU = torch.cuda.is_available()
NEEDS = {"A Triton kernel": GPU, "A CUDA extension": GPU and shutil.which("nvcc") is not None}


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An interpreter with the wheel, and what is installed here beside it."""
    folder = tmp_path_factory.mktemp("wheel")
    build = ["wheel", "--no-deps", "--no-build-isolation", "--no-index", "-q", "-w", str(folder), str(ROOT)]
    subprocess.run([sys.executable, "-m", "pip", *build], check=True, capture_output=True)
    venv.create(folder / "venv", with_pip=False)
    [packages] = (folder / "venv" / "lib").glob("python*/site-packages")
    [wheel] = folder.glob("*.whl")
    shutil.unpack_archive(wheel, packages, "zip")
    (packages / "beside.pth").write_text(sysconfig.get_path("purelib") + "\n", encoding="utf-8")
    return folder / "venv" / "bin" / "python"


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_runs_as_it_is_written(name: str, python: Path, tmp_path: Path) -> None:
    text = EXAMPLES[name]
    compile(text, name, "exec")
    if not NEEDS.get(name, True):
        pytest.skip(f"no_cuda: {name} needs a GPU or its compiler")
    file = tmp_path / ("test_example.py" if "@pytest.mark" in text else "example.py")
    file.write_text(text, encoding="utf-8")
    command = ["pytest", "-q", file.name] if "@pytest.mark" in text else [str(file)]
    done = forked.run(*command, cwd=tmp_path, env={"PATH": os.environ["PATH"]}, python=str(python))
    assert done.returncode == 0, done.stdout + done.stderr
    if name == "A function":
        assert "RIGHT: rms_norm for rmsnorm_h4096" in done.stdout
    if name == "pytest":
        assert re.search(r"^\d\d? passed", done.stdout, re.MULTILINE), done.stdout


def test_the_page_has_five_examples_and_names_every_form() -> None:
    five = ["A function", "A Triton kernel", "A CUDA extension", "pytest", "Outputs alone"]
    assert [name for name in EXAMPLES if name != "Gradients"] == five
    assert set(re.findall(r"`(\w+)\([^`]*\)`", PAGE.partition("one of these forms")[2])) == set(forms())


def test_the_library_needs_pytorch_pydantic_and_safetensors_alone(python: Path) -> None:
    # What PyTorch takes along where more is installed, Triton and what it needs, is not ours.
    text = (
        "import importlib.metadata as md, sys, torch._dynamo; had = set(sys.modules);"
        "import traceproof; traceproof.check; import traceproof.solutions.trial;"
        "known = md.packages_distributions(); print({d for m in {*sys.modules} - had for d in known.get(m, ())})"
    )
    done = subprocess.run([str(python), "-c", text], check=True, capture_output=True, text=True)
    # Those of torch, of pydantic, and what an environment has on its own.
    beside = {"annotated-types", "pydantic_core", "setuptools", "tqdm", "typing-inspection", "typing_extensions"}
    needed = {"numpy", "pydantic", "safetensors", "torch", "traceproof"}
    found = set(re.findall(r"'([^']+)'", done.stdout))
    assert found <= needed | beside, found - needed - beside
