"""A finished run over a small dataset, for the tests of publishing. As a program: push a pickled bundle."""

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
from traceproof.publish.bundle import Bundle, Piece
from traceproof.publish.prepare import Prepared, Source, prepare
from traceproof.publish.push import Hub
from traceproof.testgen import generate

REPOSITORY = "owner/trace"
ROOT = Path(__file__).resolve().parent.parent
VERSIONS = {"torch": "2.13.0"}
IMPLEMENTATIONS = ("reference", "torch")
CASES = ("small-0", "small-1")
BATCH = {"small-0": 1, "small-1": 2}


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
        "digests": {
            "definition": digest,
            "case": "1" * 32,
            "inputs": "2" * 32,
            "outputs": "3" * 32,
            "code": "4" * 32,
            "environment": "5" * 32,
        },
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
    return Source(
        root=ROOT,
        dataset=root,
        run=folder,
        results=folder,
        python=sys.executable,
        provenance={"dataset": "made for tests"},
        tests=False,
    )


@contextmanager
def parts_made_here() -> Iterator[None]:
    """Make the parts of bundles in this process, which has torch."""
    import pytest  # not in a process that pushes

    from traceproof.publish import parts  # imports torch

    def here(command: Sequence[str], *, environment: object) -> subprocess.CompletedProcess[str]:
        assert environment
        if command[3] == generate.__name__:
            request = generate.TextRequest(**json.loads(Path(command[4]).read_text()))
            write_json(Path(command[5]), generate.texts(request))
            return subprocess.CompletedProcess(command, 0, "", "")
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "argv", list(command[3:]))
            parts.main()
        return subprocess.CompletedProcess(command, 0, "", "")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(programs, "run", here)
        yield


def bundles(source: Source, *names: str) -> list[Prepared]:
    """The bundles of some definitions."""
    with parts_made_here():
        return prepare(source, definitions=names, op_types=[], per="definition")


def of_alpha(folder: Path, *names: str) -> Prepared:
    """The bundle of `alpha`, of a dataset of these definitions of which every case passed."""
    root = dataset(folder / "dataset", *names)
    digests = {name: entry.digest for name, entry in read_tree(root).definitions.items()}
    rows = [
        row(name, digests[name], case, implementation)
        for name in digests
        for case in CASES
        for implementation in IMPLEMENTATIONS
    ]
    return bundles(finished(folder / "run", root, rows), "alpha")[0]


def with_piece(prepared: Prepared, path: str, data: bytes) -> Prepared:
    """The same bundle with a file replaced or added."""
    pieces = {piece.path: piece for piece in prepared.bundle.pieces} | {path: Piece(path, data)}
    return replace(prepared, bundle=_with(prepared.bundle, pieces=tuple(pieces[key] for key in sorted(pieces))))


def _with(bundle: Bundle, **changes: Any) -> Bundle:  # noqa: ANN401 - its fields
    return replace(bundle, **changes)


def path_of(prepared: Prepared, start: str) -> str:
    """The first of the bundle's paths that starts so."""
    return next(piece.path for piece in prepared.bundle.pieces if piece.path.startswith(start))


def start_push(prepared: Prepared, hub: HubServer, folder: Path, token: str) -> subprocess.Popen[bytes]:
    """Push in a process of its own, which can be killed."""
    file = folder / "prepared.pickle"
    # Fresh definitions: what they have worked out about themselves can not be pickled.
    found = prepared.bundle.definitions
    fresh = {name: Definition.model_validate(item.as_json()) for name, item in found.items()}
    file.write_bytes(pickle.dumps(replace(prepared, bundle=_with(prepared.bundle, definitions=fresh))))
    environment = {"PATH": "/usr/bin:/bin", "HOME": str(folder), "HF_TOKEN": token, "HF_HUB_DISABLE_XET": "1"}
    environment["PYTHONPATH"] = f"{ROOT / 'src'}:{Path(__file__).parent}"
    command = [sys.executable, __file__, str(file), hub.endpoint]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


if __name__ == "__main__":
    MADE: Prepared = pickle.loads(Path(sys.argv[1]).read_bytes())  # noqa: S301 - written by the test
    OUTCOME = Hub(REPOSITORY, endpoint=sys.argv[2]).push(MADE.bundle, MADE.describe, allow_changes=False)
    sys.stdout.write(f"{OUTCOME}\n")
