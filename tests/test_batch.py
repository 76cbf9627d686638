"""What differs where a batch system runs the jobs; tests/test_slurm.py has one run them."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest
from definitions import rmsnorm, write
from ruamel.yaml import YAML

from traceproof import runs
from traceproof.config.reading import read_config
from traceproof.environments.building import has_driver, on_gpu
from traceproof.owner import Owner
from traceproof.pipeline.flow import Pipeline
from traceproof.pipeline.load import SHARED, Load
from traceproof.pipeline.stages.plan import plan
from traceproof.pipeline.stages.plan_selection import Selection
from traceproof.worker import shared, starter

HERE = Owner.of(os.getppid()).text  # a run that lives


def announced(monkeypatch: pytest.MonkeyPatch, *, before: str | None, now: str) -> bool:
    """Whether a process of a run becomes one of its own, by the allocations of both."""
    monkeypatch.setenv(shared.RUN, HERE)
    monkeypatch.delenv(shared.ALLOCATION, raising=False)
    if before is not None:
        monkeypatch.setenv(shared.ALLOCATION, before)
    monkeypatch.setenv(shared.BATCH_JOB, now)
    return shared.announce()


def test_a_job_of_another_allocation_is_a_run_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    assert announced(monkeypatch, before="", now="17")
    assert os.environ[shared.RUN] == Owner.of(os.getpid()).text


def test_a_step_of_the_same_allocation_shares_with_its_run(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not announced(monkeypatch, before="17", now="17")
    assert os.environ[shared.RUN] == HERE


def test_a_run_inside_an_allocation_shares_with_its_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not announced(monkeypatch, before=None, now="17")


def test_a_starter_runs_a_host_with_the_descriptors_of_who_asks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "host.py").write_text(
        "import os, socket, sys\nprint(os.getppid(), os.environ['WORD'], *sys.argv[2:])\n"
        "assert socket.socket(fileno=int(sys.argv[1])).getsockname()\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    environment = {**os.environ, "WORD": "word"}
    with socket.socket(socket.AF_UNIX) as listener, (tmp_path / "log").open("wb") as log:
        listener.bind(str(tmp_path / "socket"))
        descriptors = [listener.fileno(), log.fileno()]
        assert not starter.ask(tmp_path, ["host", "a"], descriptors, environment)
        starter.serve(tmp_path)
        assert starter.ask(tmp_path, ["host", "a", "b"], descriptors, environment)
        assert not starter.ask(tmp_path, ["no_such_module"], descriptors, environment)
    assert (tmp_path / "log").read_text().splitlines()[0] == f"{os.getpid()} word a b"


def test_a_scheduled_job_takes_no_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(runs.SCHEDULED, "1")
    with runs.alone(Path("made"), root=tmp_path) as needed:
        assert needed
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("gpu", ["auto", "true", "false", "h200"])
def test_whether_jobs_find_a_gpu_is_configured(tmp_path: Path, gpu: str) -> None:
    write(tmp_path / "dataset", rmsnorm("alpha"))
    value = {"true": True, "false": False}.get(gpu, gpu)
    config = read_config({"dataset": {"path": str(tmp_path / "dataset")}, "gpu": value}, root=tmp_path)
    assert on_gpu(config) is {"auto": has_driver(), "false": False}.get(gpu, True)


def test_jobs_state_a_gpu_only_if_they_open_one(tmp_path: Path) -> None:
    write(tmp_path / "dataset", rmsnorm("alpha"))
    plan(tmp_path / "dataset", tmp_path / "results" / "cases", Selection(sizes=("small",)))
    raw = {"dataset": {"path": str(tmp_path / "dataset")}}
    flow = Pipeline.of(raw | {"gpu": "h200"}, root=tmp_path)
    assert [flow.gpus("rmsnorm", actor) for actor in ("reference", "torch", "oracle", "")] == [1, 1, None, None]
    assert (flow.gpu_model, flow.one_gpu) == ("h200", 1)
    without = Pipeline.of(raw | {"gpu": False}, root=tmp_path)
    assert (without.gpus("rmsnorm", "reference"), without.gpu_model, without.one_gpu) == (None, None, None)


class Planned(Load):
    """Of a plan whose op_types open a GPU if their number is odd."""

    def opens_gpu(self, op_type: str, actor: str = "") -> bool:
        del actor
        return bool(int(op_type) % 2)


def test_op_types_share_allocations_in_parts_that_all_open_a_gpu_or_none_does(tmp_path: Path) -> None:
    names = [f"{number:02}" for number in range(3 * SHARED)]
    for name in names:
        (tmp_path / f"{name}.json").touch()
    load = Planned(tmp_path, side_by_side=True)
    parts: dict[int, list[str]] = {}
    for name in names:
        parts.setdefault(load.allocation(name, "oracle"), []).append(name)
    assert sorted(map(len, parts.values())) == [SHARED // 2, SHARED // 2, SHARED, SHARED]
    assert all(len({load.opens_gpu(name, "oracle") for name in part}) == 1 for part in parts.values())


def test_profiles_let_snakemake_put_all_jobs_of_a_part_into_one_allocation() -> None:
    profiles = Path(__file__).parents[1].glob("profiles/*/config.yaml")
    given = [YAML(typ="safe").load(path.read_text()).get("group-components") for path in profiles]
    assert [value for value in given if value] == [[f"actors={SHARED}"]] * 2
