"""Jobs of a run are forks of one process that has imported what they need, and end as their scripts would."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from worker_pools import SOURCES

from traceproof.owner import Owner
from traceproof.pipeline.interrupts import INTERRUPTED, MARK
from traceproof.worker.shared import RUN

CLIENT = (sys.executable, "-P", "-m", "traceproof.pipeline.job_client")
SECONDS = 30.0
WHO = """
import os, sys
print(os.getpid(), os.getppid(), os.getcwd(), sys.argv[1:], 'traceproof.store' in sys.modules)
"""


class Jobs:
    """Starts jobs of one run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.owner = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        self.environment = {**os.environ, "PYTHONPATH": str(SOURCES), "TMPDIR": str(folder)}
        self.environment[RUN] = Owner.of(self.owner.pid).text

    def start(self, code: str, *arguments: str) -> subprocess.Popen[str]:
        """Start a script."""
        script = self.folder / f"script-{abs(hash(code))}.py"
        script.write_text(code)
        return subprocess.Popen(
            [*CLIENT, str(script), *arguments],
            cwd=self.folder,
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def run(self, code: str, *arguments: str) -> tuple[int, str]:
        """Exit code of a script, and what it said."""
        with self.start(code, *arguments) as job:
            said, _ = job.communicate(timeout=SECONDS)
        return job.returncode, said

    def end(self) -> None:
        """End the run."""
        self.owner.kill()
        self.owner.wait()


@pytest.fixture
def jobs() -> Iterator[Jobs]:
    """A run of its own; its folder is short, as sockets' paths must be."""
    with tempfile.TemporaryDirectory(prefix="tp") as folder:
        found = Jobs(Path(folder).resolve())
        try:
            yield found
        finally:
            found.end()
            until(lambda: not list(found.folder.glob("traceproof-*")))


def until(holds: Callable[[], bool]) -> None:
    """Wait until something holds."""
    deadline = time.monotonic() + SECONDS
    while not holds():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.05)


def is_there(pid: int) -> bool:
    """Whether a process runs."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def words(said: str) -> Sequence[str]:
    """What WHO printed."""
    return said.split(maxsplit=3)


def test_jobs_of_a_run_are_forks_of_one_process(jobs: Jobs) -> None:
    found = [jobs.run(WHO, "--name", "a b") for _ in range(2)]
    assert [code for code, _ in found] == [0, 0]
    (first, parent, folder, rest), (second, other, _, _) = (words(said) for _, said in found)
    assert parent == other != str(os.getpid())
    assert first != second
    assert folder == str(jobs.folder)
    assert rest.strip() == "['--name', 'a b'] True"


def test_without_a_run_a_script_runs_in_the_process_that_was_started(jobs: Jobs) -> None:
    del jobs.environment[RUN]
    with jobs.start(WHO) as job:
        said, _ = job.communicate(timeout=SECONDS)
    assert job.returncode == 0
    assert words(said)[:2] == [str(job.pid), str(os.getpid())]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("code", "status", "text"),
    [
        ("import sys; sys.exit(2)", 2, ""),
        ("raise SystemExit", 0, ""),
        ("raise ValueError('odd')", 1, "ValueError: odd"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL, ""),
        ("import os; print(os.environ['OWN'])", 0, "mine"),
    ],
    ids=["exit code", "no exit code", "crash", "killed", "environment"],
)
def test_a_job_ends_as_its_script_does(jobs: Jobs, code: str, status: int, text: str) -> None:
    jobs.run("pass")  # the server's own environment is another
    jobs.environment["OWN"] = "mine"
    found, said = jobs.run(code)
    assert (found, text in said) == (status, True), said


def waiting(jobs: Jobs) -> tuple[subprocess.Popen[str], int]:
    """A job that waits, and its process id."""
    job = jobs.start("import os, time; print(os.getpid(), flush=True); time.sleep(600)")
    assert job.stdout is not None
    return job, int(job.stdout.readline())


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_job_ends_with_the_process_that_was_started(jobs: Jobs, number: signal.Signals) -> None:
    job, pid = waiting(jobs)
    with job:
        job.send_signal(number)
        job.wait(SECONDS)
    until(lambda: not is_there(pid))


def test_a_job_that_did_not_hear_the_first_signal_hears_the_next(jobs: Jobs) -> None:
    """Python hears no signal that comes between its last look and a call that waits; here the first is lost so."""
    deaf = "import signal, time, os; heard = signal.getsignal(signal.SIGTERM)\n"
    deaf += "signal.signal(signal.SIGTERM, lambda *_: signal.signal(signal.SIGTERM, heard))\n"
    job = jobs.start(f"{deaf}print(os.getpid(), flush=True); time.sleep(600)")
    assert job.stdout is not None
    pid = int(job.stdout.readline())
    with job:
        job.send_signal(signal.SIGTERM)
        job.wait(SECONDS)
    until(lambda: not is_there(pid))


def test_a_job_that_was_starting_when_its_run_was_interrupted_ends(jobs: Jobs) -> None:
    jobs.environment[MARK] = str(jobs.folder / "interrupted")
    job, pid = waiting(jobs)
    (jobs.folder / "interrupted").touch()
    with job:
        assert job.wait(SECONDS) == INTERRUPTED
    until(lambda: not is_there(pid))


def test_a_job_whose_server_is_killed_fails(jobs: Jobs) -> None:
    server = int(words(jobs.run(WHO)[1])[1])
    job, pid = waiting(jobs)
    with job:
        os.kill(server, signal.SIGKILL)
        assert job.wait(SECONDS) == 1
    until(lambda: not is_there(pid))
    code, said = jobs.run(WHO)  # the next one starts another
    assert (code, words(said)[1] != str(server)) == (0, True)


def test_the_server_ends_with_the_run(jobs: Jobs) -> None:
    server = int(words(jobs.run(WHO)[1])[1])
    jobs.end()
    until(lambda: not is_there(server))
