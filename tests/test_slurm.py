"""A run on a real Slurm cluster of four nodes on this machine; docs/slurm.md says what has to be installed."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from repository import Ran, Repository, own_dataset

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "squeue", "scancel")
ETC = Path("/etc/slurm")
NODES = ("gpu1", "gpu2", "cpu1", "cpu2")
START_SECONDS = 120.0
CONFIG = """
ClusterName=here
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort=27017
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdLogFile={folder}/slurmd-%n.log
SlurmctldLogFile={folder}/slurmctld.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
JobAcctGatherType=jobacct_gather/linux
JobAcctGatherFrequency=task=2
JobAcctGatherParams=OverMemoryKill
ReturnToService=2
SlurmdTimeout=20
KillWait=5
MinJobAge=600
GresTypes=gpu
SlurmdParameters=config_overrides
NodeName=gpu[1-2] NodeAddr=127.0.0.1 NodeHostname=localhost Port=27101-27102 CPUs=8 RealMemory=16000 Gres=gpu:1
NodeName=cpu[1-2] NodeAddr=127.0.0.1 NodeHostname=localhost Port=27103-27104 CPUs=8 RealMemory=16000
PartitionName=cpu Nodes=cpu[1-2] Default=YES
PartitionName=gpu Nodes=gpu[1-2]
"""
# A GPU that is counted and nothing more: this version of Slurm wants a file for one.
GRES = "AutoDetect=off\nNodeName=gpu[1-2] Name=gpu File=/dev/null\n"


def missing() -> str:
    """What this machine lacks for a cluster; empty: nothing."""
    absent = [name for name in PROGRAMS if shutil.which(name, path=_path()) is None]
    if absent:
        return f"no_slurm: {', '.join(absent)} not installed (Debian: slurm-wlm, munge)"
    if (ETC / "slurm.conf").exists():
        return "no_slurm: this machine belongs to a cluster"
    if os.geteuid() != 0 or not os.access(ETC if ETC.exists() else ETC.parent, os.W_OK):
        return f"no_slurm: only root may write {ETC}"
    return ""


def _path() -> str:
    return f"{os.environ['PATH']}:/usr/sbin"


@dataclass(frozen=True, slots=True)
class SlurmJob:
    """A job as Slurm has it."""

    number: str
    state: str
    nodes: str
    comment: str


@dataclass(slots=True)
class Cluster:
    """The daemons that run."""

    folder: Path
    daemons: dict[str, subprocess.Popen[bytes]]

    def ask(self, *command: str) -> str:
        """What a Slurm command says."""
        return subprocess.run(command, check=True, text=True, capture_output=True).stdout

    def jobs(self) -> list[SlurmJob]:
        """All jobs since the cluster was started, by number."""
        lines = self.ask("squeue", "--states=all", "--noheader", "--format=%i|%T|%N|%k").splitlines()
        rows = sorted((line.split("|") for line in lines), key=lambda row: int(row[0]))
        return [SlurmJob(number, state, nodes, comment) for number, state, nodes, comment in rows]

    def running(self, comment: str, *, seconds: float) -> SlurmJob:
        """The first running job whose comment holds a text; waits for one.

        Raises:
            TimeoutError: there is none.
        """
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            for job in self.jobs():
                if job.state == "RUNNING" and comment in job.comment:
                    return job
            time.sleep(0.5)
        raise TimeoutError(f"no job {comment} is running: {self.jobs()}")

    def kill_node(self, name: str) -> None:
        """End a node's daemon and its jobs' processes, as a power failure does."""
        for step in self._processes(f"slurmstepd: [{name}"):
            os.kill(step, signal.SIGKILL)
        self.daemons[name].kill()
        self.daemons[name].wait()

    @staticmethod
    def _processes(title: str) -> list[int]:
        found = []
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                if path.read_bytes().decode(errors="replace").startswith(title):
                    found.append(int(path.parent.name))
            except OSError:  # it has ended
                continue
        return found

    def start_node(self, name: str) -> None:
        """Start a node's daemon."""
        self.daemons[name] = _started("slurmd", "-D", "-c", "-N", name)


def _started(*command: str) -> subprocess.Popen[bytes]:
    program = shutil.which(command[0], path=_path())
    assert program is not None
    return subprocess.Popen([program, *command[1:]], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


@contextmanager
def cluster(folder: Path) -> Iterator[Cluster]:
    """A running cluster; its daemons end with the block."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("state", *(f"spool-{node}" for node in NODES)):
        (folder / name).mkdir()
    etc_was_there = ETC.is_dir()
    ETC.mkdir(exist_ok=True)
    written = {ETC / "slurm.conf": CONFIG.format(folder=folder, user="root"), ETC / "gres.conf": GRES}
    key = folder / "munge.key"
    key.write_bytes(os.urandom(1024))
    key.chmod(0o400)
    one = Cluster(folder, {})
    try:
        for path, text in written.items():
            path.write_text(text)
        files = {"socket": "munge.socket", "key-file": "munge.key", "pid-file": "munged.pid"}
        files |= {"log-file": "munged.log", "seed-file": "munged.seed"}
        options = [f"--{option}={folder / name}" for option, name in files.items()]
        one.daemons["munged"] = _started("munged", "--foreground", "--force", *options)
        _wait((folder / "munge.socket").exists, "munged")
        one.daemons["slurmctld"] = _started("slurmctld", "-D", "-c")
        for node in NODES:
            one.start_node(node)
        _wait(lambda: one.ask("sinfo", "-h", "-N", "-o", "%T").split() == ["idle"] * len(NODES), "the nodes")
        yield one
    finally:
        for daemon in reversed(one.daemons.values()):
            daemon.terminate()
        for daemon in one.daemons.values():
            try:
                daemon.wait(timeout=10)
            except subprocess.TimeoutExpired:
                daemon.kill()
        for path in written:
            path.unlink(missing_ok=True)
        if not etc_was_there:
            ETC.rmdir()


def _wait(ready: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + START_SECONDS
    while time.monotonic() < end:
        try:
            if ready():
                return
        except subprocess.CalledProcessError:  # the controller is starting
            pass
        time.sleep(0.2)
    raise TimeoutError(f"{what} did not start within {START_SECONDS:g} s")


try:
    import snakemake_executor_plugin_slurm  # type: ignore[import-not-found,import-untyped,unused-ignore]  # noqa: F401

    LACKING = missing()
except ImportError:
    LACKING = "no_slurm: snakemake-executor-plugin-slurm is not installed"

pytestmark = pytest.mark.skipif(bool(LACKING), reason=LACKING)
NAMES = ("rmsnorm/rmsnorm_h96", "gemm/gemm_n96_k160")
WAIT_SECONDS = 600.0  # on a busy machine; seconds else


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with cluster(tmp_path_factory.mktemp("cluster")) as one:
        yield one


@pytest.fixture
def repository(tmp_path: Path) -> Repository:
    dataset = own_dataset(tmp_path / "dataset", *NAMES)
    copy = Repository.copy(tmp_path, dataset={"path": str(dataset)}, truths=["torch"], hidden_seed=1)
    copy.executors = True
    return copy


def on_slurm(repository: Repository) -> Ran:
    """Run with the profile, as documented; this cluster keeps no accounts."""
    own = ["--slurm-no-account", "--slurm-status-command", "squeue"]
    own += ["--slurm-init-seconds-before-status-checks", "2"]
    return repository.run("snakemake", "--workflow-profile", "profiles/slurm", *own, "--", "verify_all")


def rows(repository: Repository) -> dict[str, str]:
    """The verdict files by name."""
    return {path.name: path.read_text() for path in (repository.root / "results" / "verdicts").glob("*.jsonl")}


def verdicts(repository: Repository) -> dict[str, str]:
    """What the summary says of each definition."""
    return repository.verdicts()


def test_four_nodes_give_the_verdicts_of_one_machine(slurm: Cluster, repository: Repository) -> None:
    ran = on_slurm(repository)
    assert ran.code == 0, ran.out
    distributed = rows(repository)
    jobs = slurm.jobs()
    assert {job.state for job in jobs} == {"COMPLETED"}
    assert len([job for job in jobs if "verify" in job.comment]) == len(NAMES)
    shutil.rmtree(repository.root / "results")
    assert repository.verify().code == 0
    assert rows(repository) == distributed


def test_a_cancelled_job_and_a_lost_node_cost_nothing_but_time(slurm: Cluster, repository: Repository) -> None:
    done: list[Ran] = []
    run = threading.Thread(target=lambda: done.append(on_slurm(repository)), daemon=True)
    run.start()
    slurm.ask("scancel", slurm.running("gemm", seconds=WAIT_SECONDS).number)
    node = slurm.running("rmsnorm", seconds=WAIT_SECONDS).nodes
    slurm.kill_node(node)
    slurm.start_node(node)
    run.join()
    assert done[0].code == 0, done[0].out
    assert set(verdicts(repository).values()) == {"pass"}
    assert "FAILED verify gemm" in done[0].out
