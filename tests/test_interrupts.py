"""Runs that are interrupted or killed, and runs side by side, by the commands that people type."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from repository import Repository, own_dataset

from traceproof.pipeline.entry import BAD_INPUT
from traceproof.pipeline.interrupts import INTERRUPTED, MARK, UNHEARD

pytestmark = pytest.mark.slow

GEMM, NORM = "gemm/gemm_n96_k160", "rmsnorm/rmsnorm_h96"
ENDLESS = """
import torch


def run(A, B):
    torch.futures.Future().wait()
    return A
"""
ROOT = Path(__file__).resolve().parent.parent
SOON = 10.0  # seconds in which everything ends on a busy machine; on a quiet one it takes 1 to 3
# An import that gets an interrupt and catches it, as a module does that takes any failure for a no.
CATCHING = """
import os, signal, sys

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == {name!r}:
            try:
                os.kill(os.getpid(), signal.SIGINT)
            except BaseException:
                pass

sys.meta_path.insert(0, Finder())
"""
# A command's Snakemake that has the command interrupted while Python starts.
INTERRUPTING = """
import os, signal, sys, time

if "traceproof.pipeline.engine" in sys.orig_argv:
    os.kill(os.getppid(), signal.SIGINT)
    time.sleep(1)
"""
# Snakemake's pool of threads, of which one is being started when an interrupt comes.
STARTING = """
import logging, os, signal, threading, time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
import snakemake_logger_plugin_traceproof as output

settings = SimpleNamespace(verbose=False)
manager = SimpleNamespace(plugin_handlers=[], settings=settings, logger=logging.getLogger())
output.install(manager, lambda: print("told", flush=True))
start = threading.Thread.start

def interrupted(thread):
    os.kill(os.getpid(), signal.SIGINT)
    start(thread)

threading.Thread.start = interrupted
with ThreadPoolExecutor() as pool:
    try:
        job = pool.submit(time.sleep, 0.3)
        time.sleep(60)
    except KeyboardInterrupt:
        pool.shutdown()
        print(job.done())
"""
LONGEST = 120.0  # seconds for a run to get to its references on a busy machine


@dataclass
class Started:
    """A command in a process group of its own, as a terminal starts one."""

    process: subprocess.Popen[str]
    out: Path

    @classmethod
    def of(cls, repository: Repository, *command: str) -> Started:
        out = repository.root / "out.txt"
        with out.open("w") as file:
            process = subprocess.Popen(
                [sys.executable, "-m", *command],
                cwd=repository.root,
                env=repository.environment,
                stdout=file,
                stderr=file,
                start_new_session=True,
                text=True,
            )
        return cls(process, out)

    def wait_for(self, what: Callable[[], bool]) -> None:
        """Wait until something is so; the command must not end before."""
        deadline = time.monotonic() + LONGEST
        while not what():
            assert self.process.poll() is None, self.out.read_text()
            assert time.monotonic() < deadline, self.out.read_text()
            time.sleep(0.1)

    def end(self) -> tuple[int, float, str]:
        """Its exit code, the seconds that it took from now, and what it printed."""
        started = time.monotonic()
        try:
            code = self.process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)  # one left behind would fail every test after this one
            self.process.wait()
            pytest.fail(f"it did not end:\n{self.out.read_text()}")
        return code, time.monotonic() - started, self.out.read_text()


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Repository:
    """A copy with a definition whose reference does not end."""
    dataset = own_dataset(tmp_path_factory.mktemp("dataset"), GEMM, NORM)
    file = dataset / "definitions" / f"{GEMM}.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"reference": ENDLESS}))
    return Repository.copy(tmp_path_factory.mktemp("repository"), dataset={"path": str(dataset)})


@pytest.fixture
def endless(repository: Repository) -> Iterator[Started]:
    """`traceproof verify` at a reference that does not end."""
    before = scratch(repository)
    started = Started.of(repository, "traceproof", "verify", "--cores", "2", "--op-type", "gemm")
    started.wait_for(lambda: bool(scratch(repository) - before))
    yield started
    if started.process.poll() is None:
        started.process.kill()
        started.process.wait()


def scratch(repository: Repository) -> set[Path]:
    """Scratch folders of jobs: one is there while a reference is being run."""
    return set(repository.root.glob("results/store/scratch-*"))


def workers(repository: Repository) -> list[str]:
    """Processes of the copy."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            environment, command = ((process / name).read_bytes() for name in ("environ", "cmdline"))
        except OSError:  # it ended meanwhile, or is somebody else's
            continue
        if str(repository.root).encode() in environment and int(process.name) != os.getpid():
            found.append(command.replace(b"\0", b" ").decode())
    return found


def settled(repository: Repository, seconds: float = SOON) -> list[str]:
    """Processes that are left after a moment."""
    deadline = time.monotonic() + seconds
    while workers(repository) and time.monotonic() < deadline:
        time.sleep(0.2)
    return workers(repository)


@pytest.mark.parametrize("how", ["Ctrl-C", "SIGTERM"])
def test_an_interrupted_run_ends_at_once_and_leaves_nothing(
    repository: Repository, endless: Started, how: str
) -> None:
    if how == "Ctrl-C":
        os.killpg(endless.process.pid, signal.SIGINT)
    else:
        endless.process.send_signal(signal.Signals[how])
    ends_at_once(repository, endless)


def ends_at_once(repository: Repository, interrupted: Started) -> None:
    code, seconds, out = interrupted.end()
    assert code == 130, out
    assert seconds < SOON
    assert "Traceback" not in out
    assert "What is finished is kept; the same command goes on from there." in out
    assert "FAILED" not in out
    assert settled(repository) == []


def test_beside_a_run_another_selection_runs_and_the_same_one_is_refused(
    repository: Repository, endless: Started
) -> None:
    second = repository.verify("--op-type", "gemm")
    assert second.code == 2
    assert f"a run of this selection is under way (process {endless.process.pid}, since " in second.out
    assert "Traceback" not in second.out
    beside = repository.verify("--op-type", "rmsnorm")
    assert beside.code == 0, beside.out
    assert endless.process.poll() is None
    endless.process.send_signal(signal.SIGINT)
    ends_at_once(repository, endless)


def test_a_killed_run_leaves_no_lock_and_no_process(repository: Repository, endless: Started) -> None:
    endless.process.kill()
    endless.process.wait()
    assert settled(repository, seconds=15.0) == []  # they find out by themselves
    shown = repository.verify("--op-type", "gemm", "--", "--dry-run")
    assert shown.code == 0, shown.out
    assert "actor gemm reference" in shown.jobs
    again = repository.verify("--op-type", "rmsnorm")
    assert again.code == 0, again.out


@pytest.mark.parametrize("when", ["a reference runs", "its job starts"])
def test_snakemake_itself_can_be_interrupted(repository: Repository, when: str) -> None:
    before = scratch(repository)
    started = Started.of(repository, "snakemake", "--cores", "2", "--config", "selection={op_type: [gemm]}")
    if when == "a reference runs":
        started.wait_for(lambda: bool(scratch(repository) - before))
    else:
        started.wait_for(lambda: any("job_client scripts/actor.py" in one for one in workers(repository)))
    os.killpg(started.process.pid, signal.SIGINT)
    code, seconds, out = started.end()
    assert code != 0
    assert seconds < SOON
    assert "Traceback" not in out
    assert "What is finished is kept" in out
    assert settled(repository) == []


def test_an_interrupt_while_a_command_loads_shows_no_traceback(repository: Repository) -> None:
    for seconds in (0.1, 0.5, 1.0, 2.0):
        started = Started.of(repository, "traceproof", "verify", "--cores", "2", "--op-type", "gemm")
        time.sleep(seconds)
        os.killpg(started.process.pid, signal.SIGINT)
        code, _, out = started.end()
        assert code in {130, -signal.SIGINT}, out
        starting = "site.py" in out or "Fatal Python error: init_import_site" in out  # Python itself was
        assert "Traceback" not in out or starting


def test_an_interrupt_while_a_command_starts_snakemake_shows_one_line(
    repository: Repository, tmp_path: Path
) -> None:
    (tmp_path / "sitecustomize.py").write_text(INTERRUPTING)
    path = f"{tmp_path}{os.pathsep}{repository.environment['PYTHONPATH']}"
    done = subprocess.run(
        [sys.executable, "-m", "traceproof", "verify", "--cores", "2", "--op-type", "gemm"],
        cwd=repository.root,
        env={**repository.environment, "PYTHONPATH": path},
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stderr) == (130, "Stopped.\n")


@pytest.mark.parametrize("name", ["traceproof.cli", "snakemake.cli"])
def test_an_interrupt_that_what_is_imported_catches_is_not_lost(name: str, tmp_path: Path) -> None:
    program = "traceproof" if name == "traceproof.cli" else "traceproof.pipeline.engine"
    (tmp_path / "sitecustomize.py").write_text(CATCHING.format(name=name))
    done = subprocess.run(
        [sys.executable, "-m", program, "--help"],
        env={**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT / 'src'}"},
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "Stopped.\n")


def test_an_interrupt_while_a_pool_starts_a_thread_comes_after_that() -> None:
    done = subprocess.run(
        [sys.executable, "-c", STARTING], check=False, capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout) == (0, "told\nTrue\n"), done.stderr


def test_snakemake_of_another_environment_says_what_to_do(repository: Repository) -> None:
    program = "import sys; sys.modules['traceproof'] = None; from snakemake.cli import main; main(sys.argv[1:])"
    done = subprocess.run(
        [sys.executable, "-c", program, "--cores", "1", "--dry-run"],
        cwd=repository.root,
        check=False,
        text=True,
        capture_output=True,
    )
    out = done.stdout + done.stderr
    assert done.returncode != 0
    assert "`source .venv/bin/activate` first" in out
    assert "usage:" not in out
    assert len(out.splitlines()) < 6, out


@pytest.mark.parametrize(
    ("script", "mark", "code"),
    [(script, "interrupted", INTERRUPTED) for script in ("actor", "cases", "judge", "report")]
    + [("report", "not there", BAD_INPUT)],
)
def test_a_job_that_was_starting_when_its_run_was_interrupted_says_nothing(
    tmp_path: Path, script: str, mark: str, code: int
) -> None:
    (tmp_path / "interrupted").touch()
    done = subprocess.run(
        ["bash", "-c", f"{UNHEARD} {sys.executable} {ROOT}/scripts/{script}.py"],
        env=os.environ | {"PYTHONPATH": str(ROOT / "src"), MARK: str(tmp_path / mark)},
        check=False,
        text=True,
        stderr=subprocess.PIPE,
    )
    assert done.returncode == code
    assert bool(done.stderr) is (code == BAD_INPUT)


def test_a_job_that_is_starting_does_not_hear_an_interrupt(tmp_path: Path) -> None:
    program = "print('up', flush=True); import time; time.sleep(1); from traceproof.pipeline import entry"
    command = ["bash", "-c", f'{UNHEARD} {sys.executable} -c "{program}"']
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src"), MARK: str(tmp_path / "interrupted")}
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as job:
        assert job.stdout is not None
        assert job.stdout.readline() == "up\n"
        (tmp_path / "interrupted").touch()
        os.killpg(job.pid, signal.SIGINT)
        assert job.communicate()[1] == ""
    assert job.returncode == INTERRUPTED
