"""Judging solutions one after the other by one configuration, without torch.

Finds their definitions, starts the judging process, makes certificates.
"""

import json
import secrets
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

from traceproof.config import Config
from traceproof.dataset.definition import Definition
from traceproof.dataset.fetch import fetch
from traceproof.dataset.tree import find, read_file, read_tree
from traceproof.digests import code_digest, digest_json, verdict_code
from traceproof.environments.building import has_driver, probe, ready, resolve
from traceproof.errors import TraceproofError
from traceproof.files import own_folder, write_text
from traceproof.names import path_part
from traceproof.ops import registry
from traceproof.reasons import Error, Failure, Verdict
from traceproof.run.schema import ORACLE, SHADOW
from traceproof.run.workers import Environment, Worker
from traceproof.sandbox import GIB, Limits, Status
from traceproof.solutions.reading import ON_CPU, Candidate
from traceproof.solutions.records import (
    Certificate,
    Digests,
    JudgeSettings,
    SolutionRow,
    SolutionTrial,
    objections,
)
from traceproof.solutions.render import as_json, page, trace_lines
from traceproof.stacks import MAIN, PACKAGES, STACKS

SETUP = "traceproof.solutions.trial:setup"
SEED_BITS = 30  # cases take seeds up to 2**31
OVERALL = Limits(seconds=6 * 3600.0, memory_bytes=None)
TRACES = ".traces.jsonl"  # beside a certificate that has times
JUDGED = "judged"  # below the results folder
PART = r"[A-Za-z0-9_][A-Za-z0-9_.-]*"


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
def target_of(name: str, dataset: Path | None) -> Iterator[Target]:
    """The definition of a name in a dataset, or in a file of its own. Raises TraceproofError: there is none."""
    if name.endswith(".json"):
        file = Path(name).expanduser()
        definition = read_file(file)
        with own_folder() as root:
            folder = root / "definitions" / definition.op_type
            folder.mkdir(parents=True)
            (folder / f"{definition.name}.json").write_text(json.dumps(definition.as_json()), encoding="utf-8")
            yield Target(definition=definition, path=str(file), dataset=root)
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


@dataclass(frozen=True, kw_only=True, eq=False)
class Session:
    """How solutions are judged."""

    root: Path  # the repository
    config: Config  # sizes, seed, limits, stacks, properties that are demanded
    out: Path  # folder of the certificates
    say: Callable[[str], None]  # tells how far it is
    hidden_seed: int = field(default_factory=new_hidden_seed)  # what the hidden cases follow from
    definition: str | None = None  # name or file of the definition; None: as a solution says
    # the folder that holds definitions; None: the configured one, fetched where it is absent
    dataset: Path | None = None
    stack: str | None = None  # the environment that all run in; None: that of the package that one imports
    timed: bool = False  # whether what passes is timed
    whole: bool = False  # whether a wrong answer does not end it

    def judge(self, candidate: Candidate, repeat: str) -> Certificate:
        """Judge one solution, and write its certificate. Raises TraceproofError: why it can not be judged here."""
        name = self.definition or candidate.definition
        if not name:
            todo = "Give --definition NAME, as it stands in the dataset, or --definition FILE.json."
            raise TraceproofError(f"{candidate.path} does not say which definition it implements", todo=todo)
        why = blocked(candidate, gpu=has_driver())
        if why is not None:  # found out before an environment is built
            raise TraceproofError(why)
        environment = self._environment(self.stack or _stack_of(candidate))
        why = blocked(candidate, gpu=environment.gpu)
        if why is not None:
            raise TraceproofError(why)
        folder = None
        if not name.endswith(".json"):
            folder = self.dataset or fetch(self.config.dataset, root=self.root / self.config.results / "dataset")
        with target_of(name, folder) as target:
            self.say(f"judging {candidate.name} for {target.definition.name}")
            certificate = judge(candidate, target, environment, repeat=repeat)
        for suffix, text in ((".json", as_json(certificate)), (".html", page(certificate))):
            write_text(self.place(certificate).with_suffix(suffix), text)
        if certificate.accepted and certificate.speed:
            write_text(self.place(certificate).with_suffix(TRACES), "".join(trace_lines(certificate)))
        return certificate

    def place(self, certificate: Certificate) -> Path:
        """Where a certificate's files lie, less what they end with."""
        name = f"{path_part(certificate.solution, PART)}-{path_part(certificate.definition, PART)}"
        return self.out / f"{name}.json"

    @cache  # noqa: B019 - a session lives as long as its command
    def _environment(self, stack: str) -> JudgeEnvironment:
        if stack not in STACKS:
            raise TraceproofError(f"--stack {stack}: there is no such stack; known: {', '.join(STACKS)}")
        installation = resolve(self.config, stack)
        python = str(ready(installation, root=self.root, say=self.say))
        results, limits = self.root / self.config.results, self.config.limits
        return JudgeEnvironment(
            python=python,
            record=probe(installation, root=self.root),
            caches=results / "compiled",
            settings=JudgeSettings(
                conceal=(str(results), str(self.out)),
                sizes=self.config.test_sizes,
                seed=self.config.seed,
                hidden_seed=self.hidden_seed,
                memory_limit=int(limits.memory_gb * GIB),
                tolerance=self.config.tolerance,
                limits=replace(limits.of_call(), setup_seconds=limits.build_s).as_json(),
                demanded=self.config.solutions.demanded,
                timed=self.timed,
                whole=self.whole,
                weak=self.config.allow_weak_isolation,
            ),
        )


def _stack_of(candidate: Candidate) -> str:
    """The stack whose package a solution imports, one that has a CUDA compiler if it needs that, or the main."""
    imported = candidate.imported
    own = [name for name, package in PACKAGES.items() if package in imported]
    compilers = [name for name, stack in STACKS.items() if stack.toolkit and candidate.is_compiled]
    return [*own, *compilers, MAIN][0]
