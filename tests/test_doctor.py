"""The doctor on machines that lack things: drivers, compilers, interpreters and packages are made for a test."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from repository import ROOT, Repository

from traceproof import doctor as diagnosis
from traceproof.config import Config
from traceproof.doctor import LABEL, WIDTH, CheckRow, Diagnosis, Look, diagnose, screen
from traceproof.environments import building as environments
from traceproof.environments.building import PINS, built
from traceproof.sandbox.isolation import HOLDS, LAYERS
from traceproof.stacks import STACKS

TORCH = """
class version:
    cuda = {cuda!r}

class cuda:
    @staticmethod
    def init():
        {init}
"""
SMI = "0, NVIDIA H200, 9.0, 143771 MiB, 580.159.04"


def program(path: Path, text: str) -> Path:
    """A shell script."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


class Made:
    """A repository's folder, and a PATH, on a machine of which everything else is made up."""

    def __init__(self, root: Path) -> None:
        self.root, self.path, self.packages = root, root / "bin", root / "packages"
        self.path.mkdir()
        (root / "src").symlink_to(ROOT / "src")
        (root / PINS).symlink_to(ROOT / PINS)
        self.package("torch", TORCH.format(cuda=None, init="pass"))
        program(self.path / "g++", "echo g++ 13.2")

    def package(self, name: str, text: str, *, distribution: str = "", version: str = "") -> None:
        """A package that every interpreter here finds first."""
        folder = self.packages / name
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "__init__.py").write_text(text)
        if distribution:
            about = self.packages / f"{distribution.replace('-', '_')}-{version}.dist-info"
            about.mkdir()
            (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n")

    def python(self, path: Path) -> Path:
        """An interpreter."""
        return program(path, f'PYTHONPATH={self.packages}:"$PYTHONPATH" exec {sys.executable} "$@"')

    def environment(self, *names: str, pins: str | None = "") -> None:
        """Built environments; `pins` other than those there now, or None: no stamp."""
        for name in names:
            folder = self.root / ".venvs" / name
            self.python(folder / "bin" / "python")
            if pins is not None:
                stamp = {"environment": name, "pins": pins or environments._pins(self.root, name)}
                (folder / environments.WHOLE).write_text(json.dumps(stamp))

    def gpu(self, init: str = "pass") -> None:
        """A GPU: the driver's file, nvidia-smi, and a torch that finds it."""
        (self.root / "nvidiactl").touch()
        program(self.path / "nvidia-smi", f"echo '{SMI}'")
        self.package("torch", TORCH.format(cuda="13.0", init=init))

    def ask(self, seconds: float = 300.0, **config: Any) -> Diagnosis:  # noqa: ANN401 - values of config.yaml
        """The diagnosis."""
        return diagnose(Config.model_validate({"dataset": "anywhere"} | config), root=self.root, seconds=seconds)


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Made:
    found = Made(tmp_path)
    monkeypatch.setattr(environments, "CUDA_DRIVER", (tmp_path / "nvidiactl",))
    monkeypatch.setattr(diagnosis, "TRY_LAYERS", f"print({json.dumps(json.dumps(dict.fromkeys(LAYERS, HOLDS)))})")
    monkeypatch.setenv("PATH", str(found.path))
    for name in ("CUDA_HOME", "CUDA_PATH", "CXX"):
        monkeypatch.delenv(name, raising=False)
    return found


def found_of(found: Diagnosis, name: str) -> CheckRow:
    """The row of that name."""
    return next(row for row in found.checks if row.name == name)


def problems(found: Diagnosis) -> list[CheckRow]:
    return [row for row in found.checks if row.problem]


def test_a_machine_without_a_driver_can_prove_what_its_cpu_computes(machine: Made) -> None:
    machine.environment("cpu")
    found = machine.ask()
    assert {found_of(found, name).found for name in ("flashinfer", "sglang", "fla", "liger")} == {"needs a GPU"}
    assert found.able
    assert found.proves.endswith("; with an NVIDIA GPU FlashInfer, SGLang, FLA, Liger-Kernel too")
    assert screen(found).endswith("Nothing is missing.\n")
    assert all(len(line) <= WIDTH for line in screen(found).splitlines())


def test_a_gpu_machine_is_described_with_its_compilers_and_versions_and_left_as_it_is(machine: Made) -> None:
    machine.gpu()
    names = {"flashinfer": "flashinfer-python", "sglang": "sglang", "fla": "fla-core", "liger": "liger-kernel"}
    machine.environment("torch", *names)
    for name, distribution in names.items():
        machine.package(STACKS[name].package, "", distribution=distribution, version="1.2.3")
    program(machine.root / "cuda" / "bin" / "nvcc", "echo Cuda compilation tools, release 13.0, V13.0.88")
    before = {path: path.stat().st_mtime_ns for path in machine.root.rglob("*") if not path.is_symlink()}
    found = machine.ask(stacks={"flashinfer": {"cuda_home": str(machine.root / "cuda")}})
    after = {path: path.stat().st_mtime_ns for path in machine.root.rglob("*") if not path.is_symlink()}
    assert after == before
    assert found.able, problems(found)
    assert found_of(found, "NVIDIA").found == "driver 580.159.04; 0: NVIDIA H200, SM 9.0, 143771 MiB"
    assert found_of(found, "flashinfer").found.endswith(f"nvcc 13.0.88 of {machine.root}/cuda")
    assert "references against the float64 oracle, FlashInfer 1.2.3, SGLang 1.2.3" in found.proves


def broken_package(machine: Made) -> None:
    machine.environment("cpu")
    machine.package("torch", "import no_such_module")


def broken_python(machine: Made) -> None:
    machine.environment("cpu")
    program(machine.root / ".venvs" / "cpu" / "bin" / "python", "echo broken >&2; exit 3")


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda _: None, "is not built"),
        (lambda machine: machine.environment("cpu", pins=None), "is half-built"),
        (lambda machine: machine.environment("cpu", pins="0"), "was built of other pins"),
        (broken_package, "torch can not be imported: ModuleNotFoundError: No module named"),
        (broken_python, "broken"),
    ],
)
def test_an_environment_that_is_not_whole_is_told(
    machine: Made, make: Callable[[Made], object], said: str
) -> None:
    make(machine)
    found = machine.ask()
    assert not found.able
    (row,) = problems(found)
    assert row.name == "torch"
    assert said in row.problem
    assert row.advice.endswith("--force .venvs/cpu/installed.json")
    assert found.proves == "nothing before the torch stack can be used"
    assert f"\n{'':{LABEL}}{row.advice}\n" in screen(found)


def test_an_interpreter_that_lacks_a_package_is_told_what_to_install(machine: Made) -> None:
    machine.gpu()
    machine.environment("torch")
    python = str(machine.python(machine.root / "own" / "python"))
    machine.package("fla", "import packaging_that_nobody_declared")
    (row,) = problems(machine.ask(truths=["fla"], stacks={"fla": {"python": python}}))
    assert "No module named 'packaging_that_nobody_declared'" in row.problem
    assert row.advice.startswith(f"$ {python} -m pip install torch==2.")
    assert " fla-core==0." in row.advice


def test_an_interpreter_that_hangs_and_a_driver_that_gives_no_gpu_are_broken(machine: Made) -> None:
    machine.environment("cpu")
    machine.package("torch", "import time\ntime.sleep(600)")
    assert found_of(machine.ask(seconds=1.0), "torch").problem.endswith("no answer within 1 s")
    machine.gpu(init='raise RuntimeError("Found no NVIDIA driver")')
    program(machine.path / "nvidia-smi", "echo NVIDIA-SMI has failed; exit 9")
    machine.environment("torch")
    found = machine.ask(truths=["torch"])
    told = {row.name: (row.problem, row.fatal) for row in problems(found)}
    assert told == {
        "NVIDIA": ("nvidia-smi: NVIDIA-SMI has failed", False),
        "torch": ("PyTorch finds no GPU: Found no NVIDIA driver", True),
    }
    assert not found.able


def test_compilers_are_missed_where_there_is_a_gpu_only(machine: Made) -> None:
    (machine.path / "g++").unlink()
    program(machine.path / "apt-get", "")
    machine.environment("cpu")
    assert machine.ask().able
    machine.gpu()
    machine.environment("torch", "flashinfer")
    machine.package("flashinfer", "")
    found = machine.ask(truths=["flashinfer"], stacks={"flashinfer": {"cuda_home": "/nowhere"}})
    host, cuda = problems(found)
    assert host.advice == "$ sudo apt-get install --yes g++"
    assert cuda.problem.startswith("no CUDA compiler: /nowhere is no CUDA toolkit")
    assert "stacks.flashinfer.cuda_home" in cuda.advice


def test_a_checkout_that_is_not_there_is_named(machine: Made) -> None:
    machine.gpu()
    machine.environment("torch", "sglang")
    machine.package("sglang", "")
    (row,) = problems(machine.ask(truths=["sglang"], stacks={"sglang": {"source": "elsewhere"}}))
    assert (row.name, row.problem) == ("sglang", "its source elsewhere is no folder")


def test_room_is_weighed_against_what_is_to_be_installed(machine: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    free = diagnosis.LEAST_GB + 0.5
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=free * diagnosis.GB))
    machine.environment("cpu")
    found = machine.ask(limits={"memory_gb": 1e6})
    (row,) = problems(found)
    assert (row.name, row.fatal, found.able) == ("memory", False, True)
    assert "limits.memory_gb" in row.advice
    machine.gpu()
    disk = found_of(machine.ask(), "disk")
    assert disk.found == "2.5 GB free; about 32.5 GB are still to be installed"  # 6.5 per stack
    assert disk.problem.endswith("; about 34.5 are needed")


def test_isolation_is_tried_in_earnest(monkeypatch: pytest.MonkeyPatch) -> None:
    look = Look(Config.model_validate({"dataset": "anywhere"}), ROOT, 300.0, ())
    for gpu in (False, True):
        monkeypatch.setattr(diagnosis, "has_driver", lambda gpu=gpu: gpu)
        found = diagnosis.check_isolation(look).found
        assert "not tried" not in found
        assert ("Landlock (left out where there is a GPU" in found) == gpu


def test_what_references_could_reach_is_a_note_with_advice(machine: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    machine.environment("cpu")
    refused = json.dumps(dict.fromkeys(LAYERS, "absent: refused"))
    monkeypatch.setattr(diagnosis, "TRY_LAYERS", f"print({json.dumps(refused)})")
    monkeypatch.setattr(diagnosis, "SYSCTL", machine.root)
    (bare,) = problems(machine.ask())
    assert (bare.fatal, bare.advice[:2]) == (False, "Ru")
    assert "reach the network and read and write this user's files" in bare.problem
    (machine.root / "kernel").mkdir()
    (machine.root / "kernel" / "unprivileged_userns_clone").write_text("0\n")
    (told,) = problems(machine.ask())
    assert told.advice == "$ sudo sysctl -w kernel.unprivileged_userns_clone=1"


@pytest.mark.slow
def test_the_command_that_is_named_works_as_written(tmp_path: Path) -> None:
    """The pins are emptied, so that building takes seconds and no index."""
    repository = Repository.copy(tmp_path, truths=["torch"], stacks={"torch": {"env": "cpu"}})
    for name in ("cpu", "torch"):
        (tmp_path / "envs" / f"{name}.txt").write_text("# nothing\n")
    (tmp_path / ".venvs" / "cpu").mkdir(parents=True)

    def follow() -> None:
        """Run the one command that a diagnosis names."""
        found = Diagnosis.model_validate_json((tmp_path / "found.json").read_text())
        (command,) = [row.advice[2:] for row in problems(found) if row.fatal]
        variables = {**os.environ, "PYTHONPATH": str(tmp_path / "src")}
        done = subprocess.run(["sh", "-c", command], cwd=tmp_path, env=variables, check=False, capture_output=True)
        assert done.returncode == 0, done.stderr.decode()
        assert built("cpu", root=tmp_path)

    ran = repository.run("traceproof", "doctor", "--json", "found.json")
    assert ran.code == 1, ran.out
    assert "half-built" in ran.out
    follow()
    made = (tmp_path / ".venvs" / "cpu" / "bin").stat().st_ctime_ns
    assert "torch can not be imported" in repository.run("traceproof", "doctor", "--json", "found.json").out
    follow()
    assert (tmp_path / ".venvs" / "cpu" / "bin").stat().st_ctime_ns > made


def test_programs_that_are_asked_get_no_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    command = [sys.executable, "-c", "import os; print(sorted({'HF_TOKEN', 'MORE'} & set(os.environ)))"]
    assert diagnosis.ask(command, seconds=60.0, MORE="1") == ("['MORE']", "")
