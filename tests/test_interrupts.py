"""Runs that are interrupted or killed, or whose reader goes away, by the commands that people type."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from repository import Ran, Repository, own_dataset

from traceproof.run.entry import FINDINGS, FOUND, INTERRUPTED, UNFINISHED

pytestmark = pytest.mark.slow

GEMM, NORM = "gemm/gemm_n96_k160", "rmsnorm/rmsnorm_h96"
ENDLESS = """
import torch


def run(A, B):
    torch.futures.Future().wait()
    return A
"""
ROOT = Path(__file__).resolve().parent.parent
SOON = 10.0  # seconds in which everything ends, or as many as it took to begin, on a busy machine; mostly 1
LONGEST = 600.0  # seconds for a run to get to its references on a busy machine
# An import that gets an interrupt and catches it, as a module does that takes any failure for a no.
CATCHING = """
import os, signal, sys

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "traceproof.cli":
            try:
                os.kill(os.getpid(), signal.SIGINT)
            except BaseException:
                pass

sys.meta_path.insert(0, Finder())
"""
JOB = """
import sys
from pathlib import Path
from traceproof.errors import TraceproofError
from traceproof.run import entry

def main():
    {work}

entry.run(main, log=Path(sys.argv[1]))
"""


@dataclass
class Started:
    """A command in a process group of its own, as a terminal starts one."""

    process: subprocess.Popen[str]
    out: Path
    seen: set[tuple[int, str]] = field(default_factory=set)  # processes that it started, and when each began
    soon: float = SOON

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

    def wait_for(self, what: Callable[[list[str]], bool]) -> None:
        """Wait until its processes are so; it must not end before."""
        begun = time.monotonic()
        deadline = begun + LONGEST
        while not what(self.look()):
            assert self.process.poll() is None, self.out.read_text()
            assert time.monotonic() < deadline, self.out.read_text()
            time.sleep(0.1)
        self.soon = max(SOON, time.monotonic() - begun)

    def look(self) -> list[str]:
        """Command lines of the processes that it started, and those that they did."""
        numbers = [int(path.name) for path in Path("/proc").glob("[0-9]*")]
        stats = {one: stat for one in numbers if (stat := stat_of(one))}
        found = {self.process.pid}
        while more := {one for one, stat in stats.items() if int(stat[PARENT]) in found} - found:
            found |= more
        self.seen |= {(one, stats[one][BEGIN]) for one in found & stats.keys()}
        return [command_of(one) for one in found]

    def left(self) -> list[str]:
        """Those of the processes seen that are there still, after a moment."""
        deadline = time.monotonic() + self.soon
        while True:
            there = [one for one, begin in self.seen if stat_of(one)[BEGIN:][:1] == [begin]]
            if not (found := [*filter(None, map(command_of, there))]) or time.monotonic() > deadline:
                return found
            time.sleep(0.2)

    def end(self) -> tuple[int, float, str]:
        """Its exit code, the seconds that it took from now, and what it printed."""
        started = time.monotonic()
        try:
            code = self.process.wait(timeout=LONGEST)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)  # one left behind would fail every test after this one
            self.process.wait()
            pytest.fail(f"it did not end:\n{self.out.read_text()}")
        return code, time.monotonic() - started, self.out.read_text()


PARENT, BEGIN = 1, 19  # places in the fields below: whose child it is, and when it began


def stat_of(process: int) -> list[str]:
    """The fields behind its name in /proc; none: it has ended."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def command_of(process: int) -> str:
    """Its command line; empty: it has ended."""
    try:
        return Path(f"/proc/{process}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except OSError:
        return ""


def runs_reference(commands: list[str]) -> bool:
    """Whether a job has an interpreter for references, and more than one process of it."""
    return sum("traceproof.run.runner" in one for one in commands) > 3


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
    started = Started.of(repository, "traceproof", "verify", "--cores", "2", "--op-type", "gemm")
    started.wait_for(runs_reference)
    yield started
    if started.process.poll() is None:
        started.process.kill()
        started.process.wait()


@pytest.mark.parametrize("how", ["Ctrl-C", "SIGTERM"])
def test_an_interrupted_run_ends_at_once_and_leaves_nothing(endless: Started, how: str) -> None:
    if how == "Ctrl-C":
        os.killpg(endless.process.pid, signal.SIGINT)
    else:
        endless.process.send_signal(signal.Signals[how])
    code, seconds, out = endless.end()
    assert code == INTERRUPTED, out
    assert seconds < endless.soon
    assert "Traceback" not in out
    assert "What is finished is kept; the same command goes on from there." in out
    assert "FAILED" not in out
    assert endless.left() == []


def test_a_killed_run_leaves_no_process_and_another_one_goes_on(repository: Repository, endless: Started) -> None:
    endless.process.kill()
    endless.process.wait()
    assert endless.left() == []
    again = repository.verify("--op-type", "rmsnorm", "--case", "small-0")
    assert again.code == 0, again.out
    assert [*Path(tempfile.gettempdir()).glob(f"traceproof-{endless.process.pid}.*")] == []


def test_snakemake_itself_can_be_interrupted(repository: Repository) -> None:
    started = Started.of(repository, "snakemake", "--cores", "2", "--config", "selection={op_type: [gemm]}")
    started.wait_for(runs_reference)
    os.killpg(started.process.pid, signal.SIGINT)
    code, seconds, out = started.end()
    assert code == INTERRUPTED
    assert seconds < started.soon
    assert "Traceback" not in out
    assert "What is finished is kept" in out
    assert started.left() == []


def test_a_run_ends_with_its_reader(repository: Repository) -> None:
    selected = "selection={op_type: [gemm]}"
    with subprocess.Popen(
        [sys.executable, "-m", "snakemake", "--cores", "2", "--config", selected, "run=reader"],
        cwd=repository.root,
        env=repository.environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.stdout.close()
        assert process.wait(timeout=LONGEST) != 0


def test_an_interrupt_that_what_is_imported_catches_is_not_lost(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(CATCHING)
    done = subprocess.run(
        [sys.executable, "-m", "traceproof", "--help"],
        env={**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT / 'src'}"},
        check=False,
        capture_output=True,
        text=True,
        timeout=LONGEST,
    )
    assert (done.returncode, done.stdout, done.stderr) == (INTERRUPTED, "", "Stopped.\n")


@pytest.mark.parametrize("script", ["job", "stack_job"])
def test_an_interrupt_while_a_job_imports_is_no_traceback(script: str) -> None:
    program = (
        f"{CATCHING.replace('traceproof.cli', 'pydantic')}\nimport runpy\nrunpy.run_path('scripts/{script}.py')"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (-signal.SIGINT, "")


def test_snakemake_of_another_environment_says_what_to_do(repository: Repository) -> None:
    program = "import sys; sys.modules['traceproof'] = None; from snakemake.cli import main; main(sys.argv[1:])"
    command = (sys.executable, "-c", program, "--cores", "1", "--dry-run")
    ran = Ran.of(*command, cwd=repository.root, env=os.environ)
    assert ran.code != 0
    assert "`source .venv/bin/activate` first" in ran.out
    assert "usage:" not in ran.out
    assert len(ran.out.splitlines()) < 6, ran.out


@pytest.mark.parametrize(
    ("work", "code", "said", "logged"),
    [
        ("pass", 0, "", ""),
        ("return True", FINDINGS, "", FOUND),
        ("raise TraceproofError('no room')", UNFINISHED, "no room\n", "no room\n"),
        ("sys.stderr.write('\\rlive'); sys.stderr.write('done\\n')", 0, "\nlivedone\n", "done\n"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGTERM); signal.pause()", INTERRUPTED, "", ""),
    ],
)
def test_a_job_ends_as_its_work_and_logs(tmp_path: Path, work: str, code: int, said: str, logged: str) -> None:
    log = tmp_path / "logs" / "job.log"
    done = subprocess.run(
        [sys.executable, "-c", JOB.format(work=work), str(log)], check=False, text=True, capture_output=True
    )
    assert (done.returncode, done.stderr, log.read_text()) == (code, said, logged)


def test_a_job_tells_of_a_path_that_can_not_be_used_and_logs_where(tmp_path: Path) -> None:
    log, missing = tmp_path / "job.log", tmp_path / "missing"
    work = f"Path({str(missing)!r}).read_text()"
    done = subprocess.run(
        [sys.executable, "-c", JOB.format(work=work), str(log)], check=False, text=True, capture_output=True
    )
    assert done.returncode == UNFINISHED
    assert done.stderr.startswith(f"{missing}: no such file or directory\nGive a path")
    assert log.read_text().startswith("Traceback")
    assert log.read_text().endswith(done.stderr)
