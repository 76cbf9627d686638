"""The doctor on machines that lack things: drivers, compilers, interpreters and packages are made for a test."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from repository import ROOT, Repository

from traceproof import doctor as diagnosis
from traceproof.config import Config
from traceproof.doctor import WIDTH, Diagnosis, Disk, Driver, FoundProgram, Layer, Memory, diagnose, screen
from traceproof.environments import building as environments
from traceproof.environments.building import PINS, built
from traceproof.environments.inside import facts
from traceproof.ops import registry
from traceproof.sandbox.isolation import LAYERS
from traceproof.stacks import STACKS

TORCH = """
class version:
    cuda = {cuda!r}

class cuda:
    @staticmethod
    def init():
        {init}
"""
SMI = "0, NVIDIA H200, 9.0, 143771, 580.159.04"
HOLDS = tuple(Layer(name=name, text=name, holds=True) for name in ("network", "files"))


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

    def ask(self, seconds: float = 30.0, **config: Any) -> Diagnosis:  # noqa: ANN401 - values of config.yaml
        """The diagnosis."""
        return diagnose(Config.model_validate({"dataset": "anywhere"} | config), root=self.root, seconds=seconds)


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Made:
    found = Made(tmp_path)
    monkeypatch.setattr(environments, "CUDA_DRIVER", (tmp_path / "nvidiactl",))
    monkeypatch.setattr(diagnosis, "asked_layers", lambda *_, **__: lambda: HOLDS)
    monkeypatch.setenv("PATH", str(found.path))
    for name in ("CUDA_HOME", "CUDA_PATH", "CXX"):
        monkeypatch.delenv(name, raising=False)
    return found


def states(found: Diagnosis) -> dict[str, str]:
    return {one.name: one.state for one in found.stacks}


def test_a_machine_without_a_driver_can_prove_what_its_cpu_computes(machine: Made) -> None:
    machine.environment("cpu")
    found = machine.ask()
    others = ("flashinfer", "sglang", "fla", "liger")
    assert states(found) == {"torch": "ready"} | dict.fromkeys(others, "needs a GPU")
    assert found.able
    assert found.proves.startswith("on the CPU, references against the float64 oracle and PyTorch ")
    assert found.proves.endswith("; with an NVIDIA GPU FlashInfer, SGLang, FLA, Liger-Kernel too")
    text = screen(found)
    assert "no driver" in text
    assert text.endswith("Nothing is missing.\n")


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
    assert found.able, found.problems
    (gpu,) = found.driver.gpus
    assert (gpu.name, gpu.sm, gpu.memory_gib, found.driver.version) == ("NVIDIA H200", "9.0", 140.4, "580.159.04")
    flashinfer = found.stacks[1]
    assert flashinfer.versions["flashinfer-python"] == "1.2.3"
    assert flashinfer.compiler == FoundProgram(path=f"{machine.root}/cuda/bin/nvcc", version="13.0.88")
    against = "on SM 9.0, references against the float64 oracle, FlashInfer 1.2.3, SGLang 1.2.3"
    assert found.proves.startswith(against)
    assert "0: NVIDIA H200, SM 9.0, 140.4 GiB" in screen(found)


def broken_package(machine: Made) -> None:
    machine.environment("cpu")
    machine.package("torch", "import no_such_module")


def broken_python(machine: Made) -> None:
    machine.environment("cpu")
    program(machine.root / ".venvs" / "cpu" / "bin" / "python", "echo broken >&2; exit 3")


@pytest.mark.parametrize(
    ("make", "state", "said"),
    [
        (lambda _: None, "not built", "is not built"),
        (lambda machine: machine.environment("cpu", pins=None), "half-built", "is half-built"),
        (lambda machine: machine.environment("cpu", pins="0"), "stale pins", "was built of other pins"),
        (broken_package, "import fails", "torch can not be imported: ModuleNotFoundError: No module named"),
        (broken_python, "no answer", "broken"),
    ],
)
def test_an_environment_that_is_not_whole_is_named_with_the_command_that_builds_it(
    machine: Made, make: Callable[[Made], object], state: str, said: str
) -> None:
    make(machine)
    found = machine.ask()
    assert states(found)["torch"] == state
    assert not found.able
    (problem,) = found.problems
    assert said in problem.what
    assert problem.command.endswith("--force .venvs/cpu/installed.json")
    assert found.proves == "nothing before the torch stack can be used"
    assert f"$ {problem.command}" in screen(found)


def test_an_interpreter_that_lacks_a_package_is_told_what_to_install(machine: Made) -> None:
    machine.gpu()
    machine.environment("torch")
    python = str(machine.python(machine.root / "own" / "python"))
    machine.package("fla", "import packaging_that_nobody_declared")
    found = machine.ask(truths=["fla"], stacks={"fla": {"python": python}})
    assert states(found) == {"torch": "ready", "fla": "import fails"}
    (problem,) = found.problems
    assert "No module named 'packaging_that_nobody_declared'" in problem.what
    assert problem.command.startswith(f"{python} -m pip install torch==2.")
    assert " fla-core==0." in problem.command


def test_an_interpreter_that_hangs_is_not_waited_for(machine: Made) -> None:
    machine.environment("cpu")
    machine.package("torch", "import time\ntime.sleep(600)")
    assert machine.ask(seconds=1.0).stacks[0].problem == "no answer within 1 s"


def test_a_driver_that_gives_no_gpu_is_broken(machine: Made) -> None:
    machine.gpu(init='raise RuntimeError("Found no NVIDIA driver")')
    program(machine.path / "nvidia-smi", "echo NVIDIA-SMI has failed; exit 9")
    machine.environment("torch")
    found = machine.ask(truths=["torch"])
    assert found.driver.problem == "nvidia-smi: NVIDIA-SMI has failed"
    assert not found.able
    assert "torch: PyTorch finds no GPU: Found no NVIDIA driver" in found.problems[0].what


def test_compilers_are_missed_where_there_is_a_gpu_only(machine: Made) -> None:
    (machine.path / "g++").unlink()
    program(machine.path / "apt-get", "")
    machine.environment("cpu")
    assert machine.ask().able
    machine.gpu()
    machine.environment("torch", "flashinfer")
    machine.package("flashinfer", "")
    found = machine.ask(truths=["flashinfer"], stacks={"flashinfer": {"cuda_home": "/nowhere"}})
    host, cuda = found.problems
    assert host.command == "sudo apt-get install --yes g++"
    assert cuda.what.startswith("flashinfer: no CUDA compiler: /nowhere is no CUDA toolkit")
    assert "stacks.flashinfer.cuda_home" in cuda.todo


def test_adapters_say_which_op_types_have_a_ground_truth_where() -> None:
    told = facts("", "torch")["adapters"]
    assert set(told) == set(registry.known())
    on_a_cpu = diagnosis.reach(told, [], {"flashinfer", "torch"})
    assert on_a_cpu["gemm"] == on_a_cpu["gqa_paged"] == ("torch",)
    assert on_a_cpu["sampling"] == ()
    on_a_gpu = diagnosis.reach(told, ["9.0"], {"flashinfer", "torch"})
    assert on_a_gpu["sampling"] == ("flashinfer",)
    assert on_a_gpu["moe"] == ()  # its kernel is for SM 10.x
    assert diagnosis.reach(told, ["9.0", "10.0"], {"flashinfer"})["moe"] == ("flashinfer",)


def test_a_checkout_that_is_not_there_is_named(machine: Made) -> None:
    machine.environment("cpu")
    found = machine.ask(stacks={"sglang": {"source": "elsewhere"}})
    assert [problem.what for problem in found.problems] == ["sglang: its source elsewhere is no folder"]


def checked(check: str, **found: Any) -> list[diagnosis.Problem]:  # noqa: ANN401 - whatever a machine has
    """What a check of the table says of a machine that is otherwise in order."""
    whole: dict[str, Any] = {
        "driver": Driver(present=False),
        "host_compiler": FoundProgram(path="g++"),
        "memory": Memory(total=64.0, available=60.0, limit=10.0),
        "disk": Disk(free=50.0, missing=0.0, writable=True),
        "isolation": HOLDS,
        "stacks": (),
    }
    made = diagnosis.Machine(**{**whole, **found})
    config = Config.model_validate({"dataset": "anywhere"})
    (chosen,) = (one for one in diagnosis.CHECKS if one.__name__ == check)
    return list(chosen(made, config, Path("/r")))


def test_room_is_weighed_against_what_is_still_to_be_installed() -> None:
    memory = Memory(total=8.0, available=7.0, limit=10.0)
    found = checked("check_room", memory=memory, disk=Disk(free=5.0, missing=26.0, writable=False))
    assert [problem.fatal for problem in found] == [False, True, True]
    assert "limits.memory_gb" in found[0].todo
    assert found[2].what == "5 GB are free at /r; about 28 are needed"
    assert not checked("check_room")


def test_isolation_is_tried_in_earnest() -> None:
    with ExitStack() as end:
        alone, beside = (diagnosis.asked_layers(end, gpu=gpu)() for gpu in (False, True))
    for found in (alone, beside):
        assert [layer.name for layer in found] == list(LAYERS)
        assert all(layer.holds or (layer.why and "not tried" not in layer.why) for layer in found)
    assert [layer.why for layer in beside if layer.name == "landlock"] == [diagnosis.BESIDE_A_GPU]


def test_an_interrupt_waits_for_nothing() -> None:
    begun = time.monotonic()
    with pytest.raises(KeyboardInterrupt), diagnosis.question(["sleep", "600"], seconds=600.0):
        raise KeyboardInterrupt
    assert time.monotonic() - begun < 60


def test_what_references_could_reach_is_a_note_with_the_setting_that_forbids_namespaces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(diagnosis, "SYSCTL", tmp_path)
    refused = tuple(Layer(name=name, text=name, holds=False, why="refused") for name in LAYERS)
    (bare,) = checked("check_isolation", isolation=refused)
    assert (bare.fatal, bare.command) == (False, "")
    assert "reach the network and read and write this user's files" in bare.what
    (tmp_path / "kernel").mkdir()
    (tmp_path / "kernel" / "unprivileged_userns_clone").write_text("0\n")
    (told,) = checked("check_isolation", isolation=refused)
    assert told.command == "sudo sysctl -w kernel.unprivileged_userns_clone=1"
    assert not checked("check_isolation")


def test_a_screen_fits_a_screen(machine: Made) -> None:
    machine.gpu()
    found = machine.ask()
    lines = screen(found).splitlines()
    assert len(lines) <= 40
    assert all(len(line) <= WIDTH for line in lines if "$ " not in line)
    assert set(states(found).values()) == {"not built"}
    assert found.disk.missing == 32.5  # one folder of 6.5 GB per stack
    reached = screen(found.model_copy(update={"reach": {"gemm": ("torch",), "moe": ()}}))
    assert "with a ground truth: gemm; by the oracle alone: moe" in reached


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
        (command,) = [one.command for one in found.problems if one.command]
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
