"""A finished run over a small dataset, for the tests of publishing. As a program: push a pickled pull request."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from definitions import rmsnorm, write
from hub_server import HubServer

from traceproof import programs
from traceproof.dataset.definition import Definition
from traceproof.dataset.tree import read_tree
from traceproof.files import write_json
from traceproof.publish.pull_request import PullRequest, Source, prepare
from traceproof.publish.push import Hub
from traceproof.testgen import generate

REPOSITORY = "owner/trace"
ROOT = Path(__file__).resolve().parent.parent
VERSIONS = {"torch": "2.13.0"}
IMPLEMENTATIONS = ("reference", "torch")
CASES = ("small-0", "small-1")
BATCH = {"small-0": 1, "small-1": 2}
DIGESTS = ("case", "inputs", "outputs", "code", "environment")


def dataset(root: Path, *names: str) -> Path:
    """A dataset whose files look as the public one's do."""
    for name in names:
        path = write(root, rmsnorm(name, tags=["model:tiny", "status:verified"]))
        path.write_text(json.dumps(json.loads(path.read_text()), indent=2) + "\n")
    return root


def row(name: str, digest: str, case: str, implementation: str, /, **changes: Any) -> dict[str, Any]:  # noqa: ANN401 - JSON
    """A verdict row that passed."""
    plain = {
        "definition": name,
        "op_type": "rmsnorm",
        "case": case,
        "size": "small",
        "seed": 0,
        "axes": {"batch_size": BATCH[case]},
        "implementation": implementation,
        "against": "oracle",
        "output": "output",
        "verdict": "pass",
        "reason": None,
        "message": "fine",
        "gate": {"kind": "baseline", "margin": 0.25},
        "digests": {"definition": digest} | {name: str(number) * 32 for number, name in enumerate(DIGESTS)},
        "versions": VERSIONS,
        "device": "NVIDIA TEST",
        "repeat": f"traceproof verify --definition-name {name} --case {case}",
    }
    return plain | changes


def finished(folder: Path, root: Path, rows: list[dict[str, Any]]) -> Source:
    """A run's folder with these verdicts, and cases planned for the dataset's definitions."""
    from traceproof.run.plan import PlanSelection, plan

    plan(root, folder / "cases", PlanSelection(sizes=("small",)))
    (folder / "verdicts").mkdir()
    text = "".join(json.dumps(item) + "\n" for item in rows)
    (folder / "verdicts" / "rmsnorm.jsonl").write_text(text)
    provenance = {"dataset": "made for tests"}
    return Source(root=ROOT, dataset=root, run=folder, python=sys.executable, provenance=provenance)


@contextmanager
def made_here() -> Iterator[None]:
    """Make solutions and tests in this process, which has torch."""
    import pytest  # not in a process that pushes

    from traceproof.publish import solutions  # imports torch

    def here(command: Sequence[str], *, environment: object) -> subprocess.CompletedProcess[str]:
        assert environment
        request = json.loads(Path(command[4]).read_text())
        if command[3] == generate.__name__:
            write_json(Path(command[5]), generate.texts(**request))
        else:
            solutions.write_solutions(request, Path(command[5]))
        return subprocess.CompletedProcess(command, 0, "", "")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(programs, "run", here)
        yield


def pull_requests(source: Source, *names: str) -> list[PullRequest]:
    """The pull requests of some definitions."""
    with made_here():
        return prepare(source, definitions=names, op_types=[], per="definition")


def run_of(folder: Path, *names: str, verified: Sequence[str] | None = None) -> Source:
    """A run over a dataset of these definitions; of the verified ones (None: all) every case passed."""
    root = dataset(folder / "dataset", *names)
    digests = {name: entry.definition.digest for name, entry in read_tree(root).definitions.items()}
    rows = [
        row(name, digests[name], case, implementation)
        for name in (names if verified is None else verified)
        for case in CASES
        for implementation in IMPLEMENTATIONS
    ]
    return finished(folder / "run", root, rows)


def with_file(made: PullRequest, path: str, data: bytes) -> PullRequest:
    """The same pull request with a file replaced or added."""
    return replace(made, files={**made.files, path: data})


def path_of(made: PullRequest, start: str) -> str:
    """The first of its paths that starts so."""
    return next(path for path in made.files if path.startswith(start))


def start_push(made: PullRequest, hub: HubServer, folder: Path, token: str) -> subprocess.Popen[bytes]:
    """Push in a process of its own, which can be killed."""
    file = folder / "pull_request.pickle"
    # Fresh definitions: what they have worked out about themselves can not be pickled.
    fresh = {name: Definition.model_validate(item.as_json()) for name, item in made.definitions.items()}
    file.write_bytes(pickle.dumps(replace(made, definitions=fresh)))
    environment = {"PATH": "/usr/bin:/bin", "HOME": str(folder), "HF_TOKEN": token, "HF_HUB_DISABLE_XET": "1"}
    environment["PYTHONPATH"] = f"{ROOT / 'src'}:{Path(__file__).parent}"
    command = [sys.executable, __file__, str(file), hub.endpoint]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


if __name__ == "__main__":
    MADE: PullRequest = pickle.loads(Path(sys.argv[1]).read_bytes())  # noqa: S301 - written by the test
    sys.stdout.write(f"{Hub(REPOSITORY, endpoint=sys.argv[2]).push(MADE, allow_changes=False)}\n")
