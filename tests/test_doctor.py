"""The doctor on machines that lack things."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from doctor_machine import HOLDS, TORCH, Machine, program
from repository import Repository

from traceproof.config import Config
from traceproof.doctor import advice, diagnosis, facts
from traceproof.doctor.advice import WIDTH, screen
from traceproof.doctor.diagnosis import diagnose
from traceproof.doctor.model import Diagnosis, Disk, Layer, Memory, StackFound
from traceproof.environments import building as environments
from traceproof.environments.building import built
from traceproof.ops import registry
from traceproof.sandbox.isolation import LAYERS
from traceproof.stacks import STACKS


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    found = Machine(tmp_path)
    monkeypatch.setattr(environments, "CUDA_DRIVER", (tmp_path / "nvidiactl",))
    monkeypatch.setattr(diagnosis, "layers", lambda **_: HOLDS)
    monkeypatch.setenv("PATH", str(found.path))
    for name in ("CUDA_HOME", "CUDA_PATH", "CXX"):
        monkeypatch.delenv(name, raising=False)
    return found


def states(found: Diagnosis) -> dict[str, str]:
    return {one.name: one.state for one in found.stacks}


def files(root: Path) -> dict[str, int]:
    return {str(path): path.stat().st_mtime_ns for path in root.rglob("*") if not path.is_symlink()}


def test_a_machine_without_a_driver_can_prove_what_its_cpu_computes(machine: Machine) -> None:
    machine.environment("cpu")
    found = machine.ask()
    assert states(found) == {"torch": "ready"} | dict.fromkeys(
        ("flashinfer", "sglang", "fla", "liger"), "needs a GPU"
    )
    assert found.able
    assert found.proves.startswith("on the CPU, references against the float64 oracle and PyTorch ")
    assert found.proves.endswith("; with an NVIDIA GPU FlashInfer, SGLang, FLA, Liger-Kernel too")
    text = screen(found)
    assert "no driver" in text
    assert text.endswith("Nothing is missing.\n")


def test_nothing_is_changed_by_asking(machine: Machine) -> None:
    machine.gpu()
    for name in ("torch", "flashinfer"):
        machine.environment(name)
    machine.package("flashinfer", "")
    before = files(machine.root)
    machine.ask()
    assert files(machine.root) == before


def test_a_gpu_machine_is_described_with_its_compilers_and_versions(machine: Machine) -> None:
    machine.gpu()
    names = {"flashinfer": "flashinfer-python", "sglang": "sglang", "fla": "fla-core", "liger": "liger-kernel"}
    for name, distribution in names.items():
        machine.environment(name)
        machine.package(STACKS[name].package, "", distribution=distribution, version="1.2.3")
    machine.environment("torch")
    program(machine.root / "cuda" / "bin" / "nvcc", "echo Cuda compilation tools, release 13.0, V13.0.88")
    found = machine.ask(stacks={"flashinfer": {"cuda_home": str(machine.root / "cuda")}})
    assert found.able, found.problems
    (gpu,) = found.driver.gpus
    assert (gpu.name, gpu.sm, gpu.memory_gib, found.driver.version) == ("NVIDIA H200", "9.0", 140.4, "580.159.04")
    flashinfer = found.stacks[1]
    assert flashinfer.versions["flashinfer-python"] == "1.2.3"
    assert flashinfer.compiler is not None
    assert flashinfer.compiler.path == f"{machine.root}/cuda/bin/nvcc"
    assert flashinfer.compiler.version == "13.0.88"
    assert found.proves.startswith(
        "on SM 9.0, references against the float64 oracle, FlashInfer 1.2.3, SGLang 1.2.3"
    )
    assert "0: NVIDIA H200, SM 9.0, 140.4 GiB" in screen(found)


@pytest.mark.parametrize(
    ("make", "state", "said"),
    [
        (lambda _: None, "not built", "is not built"),
        (lambda machine: machine.environment("cpu", pins=None), "half-built", "is half-built"),
        (lambda machine: machine.environment("cpu", pins="0"), "stale pins", "was built of other pins"),
        (
            lambda machine: (machine.environment("cpu"), machine.package("torch", "import no_such_module")),
            "import fails",
            "torch can not be imported: ModuleNotFoundError: No module named 'no_such_module'",
        ),
        (
            lambda machine: (
                machine.environment("cpu"),
                program(machine.root / ".venvs" / "cpu" / "bin" / "python", "echo broken >&2; exit 3"),
            ),
            "no answer",
            "broken",
        ),
    ],
)
def test_an_environment_that_is_not_whole_is_named_with_the_command_that_builds_it(
    machine: Machine, make: Callable[[Machine], object], state: str, said: str
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


def test_an_interpreter_that_lacks_a_package_is_told_what_to_install(machine: Machine) -> None:
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


def test_an_interpreter_that_hangs_is_not_waited_for(machine: Machine) -> None:
    machine.environment("cpu")
    machine.package("torch", "import time\ntime.sleep(600)")
    found = diagnose(Config.model_validate({"dataset": "anywhere"}), root=machine.root, seconds=1.0)
    assert found.stacks[0].problem == "no answer within 1 s"


def test_a_driver_that_gives_no_gpu_is_broken(machine: Machine) -> None:
    machine.gpu()
    program(machine.path / "nvidia-smi", "echo NVIDIA-SMI has failed; exit 9")
    machine.package("torch", TORCH.format(cuda="13.0", init='raise RuntimeError("Found no NVIDIA driver")'))
    machine.environment("torch")
    found = machine.ask(truths=["torch"])
    assert found.driver.problem == "nvidia-smi: NVIDIA-SMI has failed"
    assert not found.able
    assert "torch: PyTorch finds no GPU: Found no NVIDIA driver" in found.problems[0].what


def test_compilers_are_missed_where_there_is_a_gpu_only(machine: Machine) -> None:
    (machine.path / "g++").unlink()
    program(machine.path / "apt-get", "")
    machine.environment("cpu")
    assert machine.ask().able
    machine.gpu()
    for name in ("torch", "flashinfer"):
        machine.environment(name)
    machine.package("flashinfer", "")
    found = machine.ask(truths=["flashinfer"], stacks={"flashinfer": {"cuda_home": "/nowhere"}})
    host, cuda = found.problems
    assert host.command == "sudo apt-get install --yes g++"
    assert cuda.what.startswith("flashinfer: no CUDA compiler: /nowhere is no CUDA toolkit")
    assert "stacks.flashinfer.cuda_home" in cuda.todo


def test_adapters_say_which_op_types_have_a_ground_truth_where() -> None:
    told = facts.facts("", "torch")["adapters"]
    assert set(told) == set(registry.known())
    on_a_cpu = diagnosis.reach(told, [], {"flashinfer", "torch"})
    assert on_a_cpu["gemm"] == on_a_cpu["gqa_paged"] == ("torch",)
    assert on_a_cpu["sampling"] == ()
    on_a_gpu = diagnosis.reach(told, ["9.0"], {"flashinfer", "torch"})
    assert on_a_gpu["sampling"] == ("flashinfer",)
    assert on_a_gpu["moe"] == ()  # its kernel is for SM 10.x
    assert diagnosis.reach(told, ["9.0", "10.0"], {"flashinfer"})["moe"] == ("flashinfer",)


def test_the_screen_tells_op_types_with_a_ground_truth_from_those_without(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine.environment("cpu")
    told = {"gemm": {"torch": None}, "moe": {"flashinfer": [((10, 0), (10, 3))]}}
    examine = diagnosis.examine
    monkeypatch.setattr(diagnosis, "examine", lambda *given: (examine(*given)[0], told))
    found = machine.ask()
    assert found.reach == {"gemm": ("torch",), "moe": ()}
    assert "with a ground truth: gemm; by the oracle alone: moe" in screen(found)


def test_room_is_weighed_against_what_is_still_to_be_installed() -> None:
    memory = Memory(total=8.0, available=7.0, limit=10.0)
    found = list(advice.of_room(memory, Disk(free=5.0, missing=26.0, writable=False), root=Path("/r")))
    assert [problem.fatal for problem in found] == [False, True, True]
    assert "limits.memory_gb" in found[0].todo
    assert found[2].what == "5 GB are free at /r; about 28 are needed"
    enough = Memory(total=64.0, available=60.0, limit=10.0)
    assert not list(advice.of_room(enough, Disk(free=50.0, missing=0.0, writable=True), root=Path("/r")))


def test_a_checkout_that_is_not_there_is_named(machine: Machine) -> None:
    machine.environment("cpu")
    found = machine.ask(stacks={"sglang": {"source": "elsewhere"}})
    assert [problem.what for problem in found.problems] == ["sglang: its source elsewhere is no folder"]


def test_isolation_is_tried_in_earnest() -> None:
    alone, beside = diagnosis.layers(gpu=False), diagnosis.layers(gpu=True)
    for found in (alone, beside):
        assert [layer.name for layer in found] == list(LAYERS)
        assert all(layer.holds or (layer.why and "not tried" not in layer.why) for layer in found)
    assert [layer.why for layer in beside if layer.name == "landlock"] == [diagnosis.BESIDE_A_GPU]


def test_an_interrupt_waits_for_nothing() -> None:
    begun = time.monotonic()
    with ThreadPoolExecutor() as threads:
        asked = threads.submit(diagnosis.ask, ["sleep", "600"], seconds=600.0)
        while not diagnosis._RUNNING:
            time.sleep(0.01)
        diagnosis.stop()
        assert asked.result().problem
    assert time.monotonic() - begun < 60
    assert not diagnosis._RUNNING


def test_what_references_could_reach_is_a_note_with_the_setting_that_forbids_namespaces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(advice, "SYSCTL", tmp_path)
    refused = tuple(Layer(name=name, text=name, holds=False, why="refused") for name in LAYERS)
    (bare,) = advice.of_isolation(refused)
    assert (bare.fatal, bare.command) == (False, "")
    assert "reach the network and read and write this user's files" in bare.what
    (tmp_path / "kernel").mkdir()
    (tmp_path / "kernel" / "unprivileged_userns_clone").write_text("0\n")
    (told,) = advice.of_isolation(refused)
    assert told.command == "sudo sysctl -w kernel.unprivileged_userns_clone=1"
    assert not list(advice.of_isolation(HOLDS))


def test_a_screen_fits_a_screen(machine: Machine) -> None:
    machine.gpu()
    found = machine.ask()
    lines = screen(found).splitlines()
    assert len(lines) <= 40
    assert all(len(line) <= WIDTH for line in lines if "$ " not in line)
    assert {one.state for one in found.stacks} == {"not built"}
    assert found.disk.missing == 32.5  # one folder of 6.5 GB per stack
    assert isinstance(found.stacks[0], StackFound)


def follow(found: Diagnosis, root: Path) -> None:
    """Run the one command that a diagnosis names."""
    (command,) = [one.command for one in found.problems if one.command]
    environment = {**os.environ, "PYTHONPATH": str(root / "src")}
    done = subprocess.run(["sh", "-c", command], cwd=root, env=environment, check=False, capture_output=True)
    assert done.returncode == 0, done.stderr.decode()


@pytest.mark.slow
def test_the_command_that_is_named_works_as_written(tmp_path: Path) -> None:
    """The pins are emptied, so that building takes seconds and no index."""
    repository = Repository.copy(tmp_path, truths=["torch"], stacks={"torch": {"env": "cpu"}})
    for name in ("cpu", "torch"):
        (tmp_path / "envs" / f"{name}.txt").write_text("# nothing\n")
    (tmp_path / ".venvs" / "cpu").mkdir(parents=True)
    ran = repository.run("traceproof", "doctor", "--json", "found.json")
    assert ran.code == 1, ran.out
    found = Diagnosis.model_validate_json((tmp_path / "found.json").read_text())
    torch = found.stacks[0]
    assert torch.state == "half-built", ran.out
    follow(found, tmp_path)
    assert built("cpu", root=tmp_path)
    made = (tmp_path / ".venvs" / "cpu" / "bin").stat().st_ctime_ns
    assert "torch can not be imported" in repository.run("traceproof", "doctor", "--json", "found.json").out
    follow(Diagnosis.model_validate_json((tmp_path / "found.json").read_text()), tmp_path)
    assert built("cpu", root=tmp_path)
    assert (tmp_path / ".venvs" / "cpu" / "bin").stat().st_ctime_ns > made
