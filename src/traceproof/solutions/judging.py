"""Finds solutions' definitions, starts the judging process, makes certificates; without torch."""

import json
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from traceproof.dataset.definition import Definition
from traceproof.dataset.tree import find, read_file, read_tree
from traceproof.digests import code_digest, digest_json, verdict_code
from traceproof.errors import TraceproofError
from traceproof.files import own_folder
from traceproof.ops import registry
from traceproof.reasons import Error, Failure, Verdict
from traceproof.run.schema import ORACLE, SHADOW
from traceproof.run.workers import Environment, Worker
from traceproof.sandbox import Limits, Status
from traceproof.solutions.reading import ON_CPU, Candidate
from traceproof.solutions.records import (
    Certificate,
    Digests,
    JudgeSettings,
    SolutionRow,
    SolutionTrial,
    objections,
)
from traceproof.stacks import MAIN

SETUP = "traceproof.solutions.trial:setup"
SEED_BITS = 30  # cases take seeds up to 2**31
OVERALL = Limits(seconds=6 * 3600.0, memory_bytes=None)


def new_hidden_seed() -> int:
    """A number that nobody could know when the solution was written."""
    return secrets.randbits(SEED_BITS) + 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A definition that a solution is held against, and where it was found."""

    definition: Definition
    path: str
    dataset: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgeEnvironment:
    """What judges: an interpreter with torch, its stack's record, and how it judges."""

    python: str  # the interpreter
    record: Mapping[str, Any]  # of its stack: versions, device
    caches: Path  # folder for what is compiled on the way
    settings: JudgeSettings  # all but the dataset, the device and variables

    @property
    def gpu(self) -> bool:
        """Whether there is a GPU."""
        return str(self.record["device_type"]) == "cuda"


@contextmanager
def alone(definition: Definition, path: str) -> Iterator[Target]:
    """A definition that no dataset holds, in one of its own; `path` says where it is from."""
    with own_folder() as root:
        folder = root / "definitions" / definition.op_type
        folder.mkdir(parents=True)
        (folder / f"{definition.name}.json").write_text(json.dumps(definition.as_json()), encoding="utf-8")
        yield Target(definition=definition, path=path, dataset=root)


@contextmanager
def target_of(name: str, dataset: Path | None) -> Iterator[Target]:
    """The definition of a name in a dataset, or in a file of its own. Raises TraceproofError: there is none."""
    if name.endswith(".json"):
        file = Path(name).expanduser()
        with alone(read_file(file), str(file)) as found:
            yield found
        return
    if dataset is None:
        raise TraceproofError(f"there is no dataset to find {name} in", todo="Give one with --dataset.")
    tree = read_tree(dataset)
    entry = find(tree, name)
    yield Target(definition=entry.definition, path=str(tree.root / entry.path), dataset=tree.root)


def blocked(candidate: Candidate, *, gpu: bool) -> str | None:
    """Why a solution can not be run on this machine; None: it can."""
    if candidate.language in ON_CPU or gpu:
        return None
    return f"{candidate.path} is a {candidate.language} kernel, which needs a GPU, and this machine has none"


def judge(candidate: Candidate, target: Target, environment: JudgeEnvironment, *, repeat: str) -> Certificate:
    """Judge one solution. Raises TraceproofError: it can not be called or isolated, or judging broke off."""
    settled = candidate.settled(target.definition)
    refusals = settled.refusals
    if refusals:
        rows = tuple(_not_run(f"{path}, {refusal}") for path, refusal in refusals)
        trial = SolutionTrial(rows=rows, properties=(), precision=())
    else:
        trial = _tried(settled, target, environment)
    against = ORACLE if target.definition.op_type in registry.known() else SHADOW
    constants = target.definition.constants
    reasons = (
        *(f"{Failure.CONSTANTS}: the definition is at fault: {conflict}" for conflict in constants.conflicts),
        *objections(trial, len([one for one in target.definition.outputs.values() if not one.optional])),
    )
    return Certificate(
        solution=candidate.name,
        path=candidate.path,
        language=candidate.language,
        entry=candidate.entry,
        definition=target.definition.name,
        op_type=target.definition.op_type,
        definition_path=target.path,
        verdict="refused" if reasons else "accepted",
        reasons=reasons,
        against=against,
        constants="; ".join(constants.alone) if against == ORACLE else "",
        rows=trial.rows,
        properties=trial.properties,
        precision=trial.precision,
        speed=trial.speed,
        digests=Digests(
            definition=target.definition.digest, solution=candidate.digest, code=_code(target.definition.op_type)
        ),
        hidden_seed=environment.settings.hidden_seed,
        tolerance=environment.settings.tolerance,
        isolation=trial.isolation,
        device=str(environment.record["device"]),
        versions=dict(environment.record["versions"]),
        repeat=f"{repeat} --hidden-seed {environment.settings.hidden_seed}",
        judged_at=datetime.now(UTC).isoformat(timespec="seconds"),
    )


def _code(op_type: str) -> str:
    """Digest of the code that a verdict depends on."""
    return digest_json([code_digest("solutions"), verdict_code(registry.file_of(op_type))])


def _not_run(message: str) -> SolutionRow:
    return SolutionRow(
        case="none",
        size="none",
        seed=0,
        axes={},
        output="*",
        verdict=Verdict.ERROR,
        reason=Error.REFUSED,
        message=message,
    )


def _tried(candidate: Candidate, target: Target, environment: JudgeEnvironment) -> SolutionTrial:
    here = Environment(name=MAIN, python=environment.python, record=environment.record)
    # Our own code, which has the solution called in workers that are shut in.
    with Worker(here, SETUP, {}, OVERALL, environment.caches) as worker:
        given = environment.settings
        settings = given.model_copy(
            update={
                "dataset": str(target.dataset),
                "conceal": (*given.conceal, str(target.dataset)),
                "gpu": environment.gpu,
                "environment": dict(here.told(environment.caches)),
            }
        )
        order = {
            "settings": settings.model_dump(mode="json"),
            "solution": candidate.as_json(),
            "definition": target.definition.name,
        }
        outcome = worker.ask(order)
    if outcome.status is not Status.OK:
        lines = outcome.message.strip().splitlines() or [str(outcome.status)]
        raise TraceproofError(f"judging {candidate.path} broke off ({outcome.status})", problems=lines[-8:])
    trial = SolutionTrial.model_validate(outcome.value)
    shut_out = next((row for row in trial.rows if row.reason == Error.ISOLATION), None)
    if shut_out is not None:
        raise TraceproofError(f"{candidate.path} was not run", problems=[shut_out.message])
    return trial
