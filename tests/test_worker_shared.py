"""Interpreters that the jobs of a run share: workers are lent, come back, are replaced, and end with the run."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from worker_pools import SOURCES, TESTS

from traceproof.errors import TraceproofError
from traceproof.owner import Owner
from traceproof.worker import Isolation, ItemOutcome, Limits, Pool, Status
from traceproof.worker.shared import COMMANDED, RUN, Host, announce, commanding

ENVIRONMENT = {"PYTHONPATH": os.pathsep.join([str(SOURCES), str(TESTS)]), "OMP_NUM_THREADS": "1"}
LIMITS = Limits(seconds=20)
PROCESS = {"do": "who"}


@pytest.fixture
def run(
    monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[subprocess.Popen[bytes]]:
    """A run of its own, whose owner is a process that sleeps; its folder is short, as sockets' paths must be."""
    tmp_path_factory.getbasetemp()  # made before the temporary folder is another
    with tempfile.TemporaryDirectory(prefix="tp") as folder:
        monkeypatch.setattr(tempfile, "tempdir", folder)
        owner = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        monkeypatch.setenv(RUN, Owner.of(owner.pid).text)
        try:
            yield owner
        finally:
            owner.kill()
            owner.wait()
            until(lambda: not hosts(Path(folder)))


def hosts(folder: Path) -> list[Path]:
    """Their sockets."""
    found = list[Path]()
    for run in folder.glob("traceproof-*"):
        with contextlib.suppress(FileNotFoundError):  # the last host has just removed it
            found += run.glob("*/socket")
    return found


def until(true: Callable[[], bool], seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def job(  # noqa: PLR0913 - what a pool can be told
    *items: Mapping[str, object],
    isolation: Isolation = Isolation.TRUSTED,
    preload: tuple[str, ...] = (),
    most: int | None = None,
    lasting: bool = True,
    limits: Limits = LIMITS,
    scratch: Path | None = None,
) -> list[ItemOutcome]:
    """What one job of the run does: a pool of its own, used once."""
    with Pool(preload=preload, env=ENVIRONMENT, shared=True, most=most, lasting=lasting) as pool:
        return list(
            pool.run_items(
                setup="worker_misdeeds:setup",
                payload=None,
                items=items,
                limits=limits,
                isolation=isolation,
                scratch=scratch,
            )
        )


def who(**options: object) -> int:
    (outcome,) = job(PROCESS, **options)  # type: ignore[arg-type]
    assert outcome.status is Status.OK, outcome
    return int(outcome.value)


@pytest.mark.usefixtures("run")
def test_a_trusted_worker_serves_one_job_after_another() -> None:
    assert who() == who() == who()


@pytest.mark.usefixtures("run")
def test_an_interpreter_is_started_ahead_and_serves_the_job_that_comes() -> None:
    with Pool(preload=(), env=ENVIRONMENT, shared=True) as pool:
        for isolation in Isolation:
            pool.start(isolation)
        until(lambda: len(zygotes()) == len(Isolation))
        ahead = zygotes()
    assert who()
    assert zygotes() == ahead


@pytest.mark.usefixtures("run")
def test_one_that_can_not_be_started_ahead_is_told_of_to_who_needs_it() -> None:
    with Pool(preload=("no_such_module",), env=ENVIRONMENT, shared=True) as pool:
        pool.start(Isolation.TRUSTED)
    with pytest.raises(TraceproofError, match="can not be used"):
        job(PROCESS, preload=("no_such_module",))


def zygotes() -> set[int]:
    """Zygotes of this test's run that have said that they are ready: workers can be forked off them."""
    hosts_here = {path.parent.name for path in hosts(Path(tempfile.gettempdir()))}
    found = set()
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, IndexError):
            words = (entry / "cmdline").read_bytes().split(b"\0")
            if b"traceproof.worker.zygote" in words and parent_host(entry) in hosts_here:
                found.add(int(entry.name))
    return found


def parent_host(entry: Path) -> str:
    """Name of the folder of the host that a process is a child of; empty: of none."""
    parent = (entry / "stat").read_text().rpartition(")")[2].split()[1]
    words = Path(f"/proc/{parent}/cmdline").read_bytes().split(b"\0")
    return Path(os.fsdecode(words[5])).name if b"traceproof.worker.host" in words else ""


@pytest.mark.usefixtures("run")
def test_a_worker_that_does_not_last_is_a_new_one_of_the_same_interpreter_and_serves_nobody_else() -> None:
    first = who()
    apart = [who(lasting=False) for _ in range(2)]
    assert len({first, *apart}) == 3
    assert who() == first
    assert len(hosts(Path(tempfile.gettempdir()))) == 1


BORROWING = f"""
from traceproof.worker import Limits, Pool
from traceproof.worker.shared import run_of_workers
with run_of_workers() as variables, Pool(preload=(), env={ENVIRONMENT!r}) as pool:
    for _ in range(2):
        (one,) = pool.run_items(setup='worker_misdeeds:setup', payload=None, isolation='trusted',
            items=[{{'do': 'borrow', 'variables': variables, 'env': {ENVIRONMENT!r}}}], limits=Limits(seconds=60))
        print(one.value, flush=True)
"""


@pytest.mark.parametrize("within", ["", "a run"])
def test_a_host_that_a_worker_asked_for_outlives_it_and_ends_with_the_run_or_else_the_process_that_started_it(
    within: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker ends with all that it started, so somebody else has to start what others go on with."""
    with tempfile.TemporaryDirectory(prefix="tp") as folder, subprocess.Popen(["sleep", "60"]) as run:
        monkeypatch.setenv("TMPDIR", folder)
        monkeypatch.setenv(RUN, Owner.of(run.pid).text if within else "")
        said = [
            subprocess.run(
                [sys.executable, "-c", BORROWING],
                env=os.environ | ENVIRONMENT,
                check=True,
                capture_output=True,
                text=True,
            ).stdout.split()
            for _ in range(2)
        ]
        assert all(first == second != "None" for first, second in said)
        assert (said[0] == said[1]) is bool(within)
        assert len(list(Path(folder).glob("traceproof-*"))) >= len(within[:1])
        run.kill()
        until(lambda: not list(Path(folder).glob("traceproof-*")))


@pytest.mark.usefixtures("run")
def test_strangers_code_gets_a_new_worker_every_time() -> None:
    first, second = (job({"do": "remember"}, isolation=Isolation.UNTRUSTED)[0] for _ in range(2))
    assert (first.value, second.value) == (1, 1)


@pytest.mark.usefixtures("run")
def test_jobs_at_once_have_workers_of_their_own() -> None:
    with ThreadPoolExecutor(3) as threads:
        seen = list(threads.map(lambda _: job({"do": "nap", "seconds": 0.5}, PROCESS)[1].value, range(3)))
    assert len(set(seen)) == 3


@pytest.mark.usefixtures("run")
def test_more_jobs_than_workers_wait_for_one() -> None:
    with ThreadPoolExecutor(4) as threads:
        nap = {"do": "nap", "seconds": 0.2}
        seen = list(threads.map(lambda _: job(nap, PROCESS, most=2)[1].value, range(4)))
    assert len(set(seen)) == 2


@pytest.mark.usefixtures("run")
def test_jobs_that_may_have_any_number_keep_nobody_waiting() -> None:
    with ThreadPoolExecutor(1) as threads:
        long = threads.submit(job, {"do": "nap", "seconds": 3}, PROCESS)
        time.sleep(0.5)
        assert who(most=1)
        assert not long.done()


@pytest.mark.usefixtures("run")
def test_thread_numbers_of_a_job_make_no_other_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    first = who()
    monkeypatch.setenv("OMP_NUM_THREADS", "4")  # Snakemake sets it to a job's threads; ENVIRONMENT says 1
    assert who() == first
    assert len(hosts(Path(tempfile.gettempdir()))) == 1


@pytest.mark.usefixtures("run")
@pytest.mark.parametrize(
    ("deed", "status"),
    [
        ({"do": "leave", "code": 7}, Status.CRASH),
        ({"do": "loop"}, Status.TIMEOUT),
        ({"do": "flood"}, Status.OUTPUT),
    ],
    ids=lambda value: value["do"] if isinstance(value, dict) else "",
)
def test_a_worker_that_failed_its_job_is_not_lent_again(deed: Mapping[str, object], status: Status) -> None:
    before = who()
    (outcome,) = job(deed, limits=Limits(seconds=1))
    assert outcome.status is status
    after = who()
    assert after == before or not Path(f"/proc/{before}").exists()
    (outcome,) = job({"do": "echo", "value": 1})
    assert outcome.value == 1


@pytest.mark.usefixtures("run")
def test_a_free_worker_that_is_killed_is_replaced() -> None:
    before = who()
    os.kill(before, signal.SIGKILL)
    assert who() != before


@pytest.mark.usefixtures("run")
def test_other_limits_mean_another_worker() -> None:
    assert who() != who(limits=Limits(seconds=20, memory_bytes=1 << 30))


@pytest.mark.usefixtures("run")
def test_a_worker_that_does_not_fit_makes_room() -> None:
    first = who(most=1)
    assert who(most=1, limits=Limits(seconds=20, memory_bytes=1 << 30)) != first
    until(lambda: not Path(f"/proc/{first}").exists())


@pytest.mark.usefixtures("run")
def test_a_worker_works_in_the_folder_of_its_present_job(tmp_path: Path) -> None:
    for name in ("one", "two"):
        folder = tmp_path / name
        folder.mkdir()
        (outcome,) = job({"do": "where"}, scratch=folder)
        assert outcome.value == [str(folder), str(folder), str(folder)]


@pytest.mark.usefixtures("run")
def test_the_scratch_limit_holds_in_the_second_jobs_folder(tmp_path: Path) -> None:
    limits = Limits(seconds=20, file_bytes=1 << 20)
    much = {"do": "write_here", "name": "much", "count": 8 << 20}
    one, two = tmp_path / "one", tmp_path / "two"
    one.mkdir()
    two.mkdir()
    (first,) = job(PROCESS, scratch=one, limits=limits)
    second, outcome = job(PROCESS, much, scratch=two, limits=limits)
    assert second.value == first.value
    assert outcome.status is Status.OUTPUT


@pytest.mark.usefixtures("run")
def test_what_does_not_import_is_said_to_every_job() -> None:
    for _ in range(2):
        with pytest.raises(TraceproofError, match="can not be used") as caught:
            job(PROCESS, preload=("there_is_no_such_module",))
        assert any("there_is_no_such_module" in problem for problem in caught.value.problems)


def test_nothing_outlives_the_run(run: subprocess.Popen[bytes]) -> None:
    worker = who()
    assert hosts(Path(tempfile.gettempdir()))
    run.kill()
    run.wait()
    until(lambda: not Path(f"/proc/{worker}").exists())
    until(lambda: not list(Path(tempfile.gettempdir()).glob("traceproof-*")))


@pytest.mark.usefixtures("run")
def test_a_killed_job_frees_its_worker() -> None:
    program = (
        "import test_worker_shared as t, sys\n"
        "print('up', flush=True)\n"
        "t.job({'do': 'loop'}, most=1, limits=t.Limits(seconds=600))\n"
    )
    environment = {**os.environ, **ENVIRONMENT, "TMPDIR": tempfile.gettempdir()}
    with subprocess.Popen([sys.executable, "-c", program], env=environment, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"up\n"
        time.sleep(0.5)
        other.kill()
    assert who(most=1, limits=Limits(seconds=600)) > 0


def test_outside_a_run_nothing_is_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(RUN, raising=False)
    assert who() != who()


@pytest.mark.parametrize("text", ["", "nonsense", "1.2.3", "{own}.1.0"])
def test_a_run_that_is_not_here_counts_as_none(text: str) -> None:
    assert not Owner(text.format(own=os.getpid())).alive


def test_announcing_names_this_process_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(RUN, "gone")
    announce()
    assert os.environ[RUN] == Owner.of(os.getpid()).text
    assert Owner(os.environ[RUN]).alive
    program = "import os; from traceproof.worker import shared; shared.announce(); print(os.environ[shared.RUN])"
    said = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    assert said.stdout.strip() == os.environ[RUN]


def test_a_command_within_a_run_keeps_it_and_is_followed_itself() -> None:
    own = Owner.of(os.getpid()).text
    outer = Owner.of(os.getppid()).text
    assert commanding({RUN: outer}) == {RUN: outer, COMMANDED: own}
    assert commanding({RUN: "gone"}) == commanding({}) == {RUN: own, COMMANDED: own}


@pytest.mark.parametrize("part_of", ["itself", "another run"])
def test_a_run_whose_command_was_killed_before_it_had_loaded_ends(part_of: str) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as command:
        owner = Owner.of(command.pid).text
        command.kill()
    program = """
import signal, time
from traceproof.worker import shared
assert shared.announce()
shared.follow(signal.SIGINT)
time.sleep(60)
"""
    run = owner if part_of == "itself" else Owner.of(os.getpid()).text
    environment = os.environ | {RUN: run, COMMANDED: owner}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, check=False, capture_output=True, timeout=50
    )
    assert b"KeyboardInterrupt" in done.stderr


@pytest.mark.usefixtures("run")
def test_somebody_elses_folder_is_not_trusted() -> None:
    with Pool(preload=(), env=ENVIRONMENT, shared=True) as pool:
        host = pool._hosts[Isolation.TRUSTED]
        assert isinstance(host, Host)
        host.folder.parent.mkdir(mode=0o755)
        with pytest.raises(TraceproofError, match="own folder"):
            host.borrow(LIMITS, Path.cwd())
        host.folder.parent.rmdir()


def test_a_recipe_survives_the_wire() -> None:
    recipe = Pool(preload=("json",), env={"A": "b"}, gpu=True)._recipes[Isolation.UNTRUSTED]
    assert type(recipe).of_json(json.loads(json.dumps(recipe.as_json()))) == recipe
