"""Commands that run other people's tests take the interpreter that a run would take."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from traceproof.cli import run
from traceproof.environments import building as environments
from traceproof.environments.building import Installation
from traceproof.errors import TraceproofError


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
def test_an_interpreter_that_will_not_do_says_so_before_anything_runs(
    given: Path | None, needs: str, said: str, todo: str
) -> None:
    with pytest.raises(TraceproofError, match=said) as caught:
        found(given, needs)
    assert todo in caught.value.todo
