"""A reference sees nothing of this project, its cases or its results, and runs only where it is isolated."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from definitions import rmsnorm, write, write_files
from pipeline import Rows, Run, verdicts
from test_hostile import RIGHT, reference
from worker_pools import NOTHING

import traceproof
from traceproof.run.plan import PlanSelection
from traceproof.run.workers import untrusted_pool
from traceproof.sandbox import Limits, Pool, Status, policy
from traceproof.sandbox.isolation import lacking

LIMITS = Limits(seconds=300.0, memory_bytes=1 << 30)
SELECTION = PlanSelection(sizes=("small",), cases=("small-0",))
SOURCE = Path(traceproof.__file__).parent
# Each looks for something; what it finds must be nothing.
IMPORTS = "try:\n    {}\nexcept ImportError:\n    found = None"
LOOKS = {
    "imports_the_project": IMPORTS.format("import traceproof.ops.families.norm as found"),
    "imports_the_registry": IMPORTS.format("from traceproof.ops import registry as found"),
    "finds_the_oracle_in_memory": """
ours = ('traceproof.ops', 'traceproof.judge', 'traceproof.dataset')
found = [one for one in object.__subclasses__() if one.__module__.startswith(ours)]
found += [one for one in list(__import__('sys').modules) if one.startswith('traceproof')]""",
    "finds_the_oracle_by_its_text": """
import gc
names = {'oracle', 'tells_apart', 'baseline', 'comparisons'}
found = [one for one in gc.get_objects() if isinstance(one, type) and names <= set(vars(one))]""",
    "reads_files": """
import os
places = ('SOURCE', 'SOURCE/ops/families/norm.py', 'SOURCE/ops', 'DATASET/definitions', 'RESULTS/cases',
          'RESULTS/verdicts', 'RESULTS/cache.sqlite')
found = [path for path in places if os.path.exists(path)]""",
    "finds_its_neighbours": """
import os
try:
    found = [name for name in os.listdir(os.path.dirname(os.getcwd())) if name != os.path.basename(os.getcwd())]
except OSError:
    found = []""",
    "reads_the_environment": """
import os
found = [name for name in os.environ if 'TOKEN' in name or 'PYTHONPATH' in name]""",
    "reads_other_environments": """
import glob
found = []
for path in glob.glob('/proc/[0-9]*/environ'):
    try:
        found += [path] if b'TOKEN' in open(path, 'rb').read() else []
    except OSError:
        pass""",
    "takes_system_v_memory": "import ctypes\nfound = ctypes.CDLL(None).shmget(0, 1 << 20, 0o1600) != -1",
    "takes_a_memfd": "import ctypes\nfound = ctypes.CDLL(None).memfd_create(b'x', 0) != -1",
}


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Rows]:
    root, out = tmp_path_factory.mktemp("dataset"), tmp_path_factory.mktemp("results")
    for name, look in LOOKS.items():
        text = look.replace("SOURCE", str(SOURCE)).replace("RESULTS", str(out)).replace("DATASET", str(root))
        write(root, rmsnorm(name, reference(f"{text}\nassert not found, found\n{RIGHT}")))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_TOKEN", "hf_secret")
        patch.setattr(policy, "check", lambda *_: [])
        return Run(root, out, selection=SELECTION, limits=LIMITS).verify()


@pytest.mark.parametrize("name", LOOKS)
def test_it_finds_nothing(name: str, rows: dict[str, Rows]) -> None:
    assert verdicts(rows[name]) == {("pass", None)}, rows[name][0]["message"]


def test_another_copy_that_the_interpreter_would_import_is_hidden_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_files(tmp_path, {"traceproof/__init__.py": ""})
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    with untrusted_pool() as pool:
        assert {SOURCE.parents[1] / "src", tmp_path / "traceproof"} <= {*pool.conceal}


def test_each_protection_needs_one_of_its_layers_of_isolation() -> None:
    assert lacking(dict.fromkeys(NOTHING, "holds")) == []
    assert "the network" in lacking(dict.fromkeys(NOTHING, "absent: left out on request"))
    gpu = dict.fromkeys(NOTHING, "holds") | {"landlock": "absent: left out on request"}
    assert lacking(gpu) == []


def test_strangers_code_does_not_run_where_it_can_not_be_isolated(tmp_path: Path) -> None:
    write(tmp_path / "dataset", rmsnorm("alpha"))
    with untrusted_pool() as bare, pytest.MonkeyPatch.context() as patch:
        bare.without = NOTHING
        patch.setattr("pipeline._interpreter", lambda: bare)
        run = Run(tmp_path / "dataset", tmp_path / "results", selection=SELECTION, limits=LIMITS)
        (row,) = run.verify()["alpha"]
        assert (row["verdict"], row["reason"]) == ("error", "weak_isolation")
        assert "--allow-weak-isolation" in row["message"]
        run.weak = True
        allowed = run.verify()["alpha"]
    assert verdicts(allowed) == {("pass", None)}
    assert {row["isolation"] for row in allowed} == {"this user's files, the network, other processes, privileges"}
    assert all("isolation was weak" in row["message"] for row in allowed)


def test_a_pool_says_of_each_outcome_what_was_lacking() -> None:
    pool = Pool(preload=(), without=tuple(NOTHING), weak=False)
    with pool, pool.session(setup="worker_misdeeds:setup", payload=None) as session:
        refused = session.ask({"do": "given"})
    assert refused.status is Status.ISOLATION
