"""Finds solutions' definitions, starts the judging process, and makes certificates; without torch."""

import gc
import json
import os
import secrets
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Self

from traceproof.dataset.definition import Definition
from traceproof.dataset.tree import find, read_file, read_tree
from traceproof.digests import code_digest, digest_json, verdict_code
from traceproof.environments import inside
from traceproof.errors import TraceproofError
from traceproof.files import own_folder
from traceproof.ops import registry
from traceproof.reasons import Error, Failure, Verdict
from traceproof.run.schema import ORACLE, WHOLE
from traceproof.run.workers import Environment, Worker, tell, untrusted_pool
from traceproof.sandbox import Limits, Reply, Status
from traceproof.sandbox.model import TRITON
from traceproof.solutions.reading import ON_CPU, Candidate
from traceproof.solutions.records import (
    Certificate,
    Digests,
    JudgeSettings,
    SolutionRow,
    SolutionTrial,
    objections,
)
from traceproof.solutions.suites import ATEN, operator_definition
from traceproof.stacks import MAIN

SETUP = "traceproof.solutions.judging:setup"
SEED_BITS = 30  # cases take seeds up to 2**31
OVERALL = Limits(seconds=6 * 3600.0, memory_bytes=None)
OF_PROCESS = {"python", "caches", "cuda_home", "gpu", "weak"}  # settings for which another process is started
# Imported by the interpreter that workers are forked from, if a solution imports the key; `module:function` is
# then called there, since each worker would otherwise hash Triton's files (500 MB) again.
PRELOADED = {"triton": "triton.runtime.cache:triton_key"}
BUILD_SECONDS = 60.0  # limit on the command LAUNCHER
# compiles the module that launches Triton's kernels
LAUNCHER = "from triton.backends.nvidia.driver import CudaUtils; CudaUtils()"
IDLE_SECONDS = 60.0  # without a solution, after which a process ends that is not `lasting`


def new_hidden_seed() -> int:
    """A random number that nobody could know when the solution was written."""
    return secrets.randbits(SEED_BITS) + 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A definition that a solution is judged by, and where it was found."""

    definition: Definition
    path: str
    dataset: Path


@contextmanager
def in_own_dataset(definition: Definition, path: str) -> Iterator[Target]:
    """A temporary dataset with this definition alone, removed at exit; `path`, its origin, is only reported."""
    with own_folder() as root:
        folder = root / "definitions" / definition.op_type
        folder.mkdir(parents=True)
        (folder / f"{definition.name}.json").write_text(json.dumps(definition.as_json()), encoding="utf-8")
        yield Target(definition=definition, path=path, dataset=root)


@contextmanager
def target_of(name: str, dataset: Path | None) -> Iterator[Target]:
    """The definition with a name in a dataset, in a file (`*.json`), or of an operator of PyTorch (`aten::*`).

    Raises TraceproofError: there is none.
    """
    if name.startswith(ATEN):
        with in_own_dataset(operator_definition(name), name) as found:
            yield found
        return
    if name.endswith(".json"):
        file = Path(name).expanduser()
        with in_own_dataset(read_file(file), str(file)) as found:
            yield found
        return
    if dataset is None:
        raise TraceproofError(f"there is no dataset to find {name} in", todo="Give one with --dataset.")
    tree = read_tree(dataset, naming=[name])
    entry = find(tree, name)
    yield Target(definition=entry.definition, path=str(tree.root / entry.path), dataset=tree.root)


def blocked(candidate: Candidate, *, gpu: bool) -> str | None:
    """Why a solution can not be run on this machine; None: it can."""
    if candidate.language in ON_CPU or gpu:
        return None
    return f"{candidate.path} is a {candidate.language} kernel, which needs a GPU, and this machine has none"


class Judge:
    """Judges solutions one after the other in a trusted process with torch, which calls them in isolated workers.

    A context manager. The process starts with the first solution, and again if its settings change.
    """

    def __init__(self, told: Callable[[str], object] = lambda _: None, *, lasting: bool = True) -> None:
        """`told` is called with progress; unless `lasting`, the process ends after a minute without a solution."""
        self._told, self._lasting = told, lasting
        self._idle: threading.Timer | None = None
        self._lock = threading.RLock()
        self._worker: Worker | None = None
        self._own: dict[str, Any] = {}  # settings of the process
        self._folder = ExitStack()  # for compiled files, where the settings name no folder

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close(asking=kind is None or issubclass(kind, Exception))

    def close(self, *, asking: bool = True) -> None:
        """End the process and its workers; `asking`: let it end its workers first."""
        with self._lock:
            worker, self._worker = self._worker, None
            if worker is not None and worker.runs and asking:
                worker.ask({"end": True})
            if worker is not None:
                worker.close()
            self._folder.close()

    def judged(
        self,
        candidate: Candidate,
        target: Target,
        settings: JudgeSettings,  # `dataset` and `environment` are filled in here
        *,
        repeat: str,  # the command that repeats this judgement
    ) -> Certificate:
        """Judge one solution.

        Raises TraceproofError: it can not be called or isolated, it needs a GPU that is missing, or judging broke
        off.
        """
        settled = candidate.settled(target.definition)
        refusals = settled.refusals
        if refusals:
            row: dict[str, Any] = {"case": "none", "size": "none", "seed": 0, "axes": {}, "output": WHOLE}
            row |= {"verdict": Verdict.ERROR, "reason": Error.REFUSED}
            rows = tuple(SolutionRow(**row, message=f"{path}, {refusal}") for path, refusal in refusals)
            trial = SolutionTrial(rows=rows, properties=(), precision=())
        else:
            trial = self._tried(settled, target, settings)
        definition, constants = target.definition, target.definition.constants
        reasons = (
            *(f"{Failure.CONSTANTS}: the definition is at fault: {conflict}" for conflict in constants.conflicts),
            *objections(trial, definition),
        )
        code = digest_json([code_digest("solutions"), verdict_code(registry.file_of(definition.op_type))])
        return Certificate(
            solution=candidate.name,
            path=candidate.path,
            language=candidate.language,
            entry=candidate.entry,
            definition=definition.name,
            op_type=definition.op_type,
            definition_path=target.path,
            verdict="refused" if reasons else "accepted",
            reasons=reasons,
            constants="; ".join(constants.alone) if trial.against == ORACLE else "",
            digests=Digests(definition=definition.digest, solution=candidate.digest, code=code),
            hidden_seed=settings.hidden_seed,
            tolerance=settings.tolerance,
            repeat=repeat,
            judged_at=datetime.now(UTC).isoformat(timespec="seconds"),
            **dict(trial),
        )

    def problem(self, file: str, settings: JudgeSettings) -> AbstractContextManager[Target]:
        """The definition of one of KernelBench's problems. Raises TraceproofError: the file is no problem."""
        path = Path(file).expanduser().absolute()
        outcome = self._asked({"problem": str(path)}, settings)
        if outcome.status is not Status.OK:
            said = outcome.message.strip().rpartition(f"{TraceproofError.__name__}: ")[2]
            raise TraceproofError(said or f"{file} can not be read as a problem: {outcome.status}")
        return in_own_dataset(Definition.model_validate(outcome.value), str(path))

    def _tried(self, candidate: Candidate, target: Target, base: JudgeSettings) -> SolutionTrial:
        """Have the process judge a solution. Raises TraceproofError: it could not."""
        dataset = str(target.dataset)
        settings = base.model_copy(update={"dataset": dataset, "conceal": (*base.conceal, dataset)})
        item = {
            "settings": settings.model_dump(mode="json"),
            "solution": candidate.as_json(),
            "definition": target.definition.name,
            "begun": time.monotonic(),
        }
        outcome = self._asked(item, settings, preload=[name for name in PRELOADED if name in candidate.imported])
        if outcome.status is not Status.OK:
            lines = outcome.message.strip().splitlines() or [str(outcome.status)]
            if outcome.message.startswith("setup: "):
                todo = (
                    "In config.yaml, stacks.<name>.python names a Python with torch, numpy, safetensors, pydantic."
                )
                raise TraceproofError(f"{base.python} can not judge", problems=lines[-1:], todo=todo)
            raise TraceproofError(f"judging {candidate.path} broke off ({outcome.status})", problems=lines[-8:])
        if "blocked" in outcome.value:
            raise TraceproofError(outcome.value["blocked"])
        trial = SolutionTrial.model_validate(outcome.value)
        not_isolated = next((row for row in trial.rows if row.reason == Error.ISOLATION), None)
        if not_isolated is not None:
            raise TraceproofError(f"{candidate.path} was not run", problems=[not_isolated.message])
        return trial

    def _asked(self, item: Mapping[str, Any], settings: JudgeSettings, preload: Sequence[str] = ()) -> Reply:
        """Send the process a request and return its reply; restart the process if its settings have changed."""
        of_process = settings.model_dump(mode="json", include=OF_PROCESS)
        with self._lock:
            if self._idle is not None:
                self._idle.cancel()
            if self._worker is None or of_process != self._own:
                self.close()
                self._own = of_process
                caches = settings.caches or str(self._folder.enter_context(own_folder()))
                payload = {**of_process, "caches": caches, "preload": preload}
                record = {"device_type": "cuda" if settings.gpu else "cpu"}
                environment = Environment(name=MAIN, python=settings.python, record=record)
                # The process is trusted code, which calls the solution in isolated workers.
                self._worker = Worker(environment, SETUP, payload, OVERALL, told=self._told)
            reply = self._worker.ask(item)
            if not self._lasting:
                self._idle = threading.Timer(IDLE_SECONDS, self.close)
                self._idle.daemon = True
                self._idle.start()
            return reply


def compile_launcher(environment: Mapping[str, str]) -> None:
    """Have Triton compile its launcher module, unless it is in the cache, so that no worker has to."""
    if not any(Path(environment[TRITON]).glob("*/cuda_utils*.so")):
        command = [sys.executable, "-P", "-c", LAUNCHER]
        own = {**os.environ, **environment}
        subprocess.run(command, env=own, check=False, capture_output=True, timeout=BUILD_SECONDS)


def setup(order: Mapping[str, Any]) -> Callable[[Mapping[str, Any]], dict[str, Any]]:
    """Prepare the judging process; returns the function that judges a solution, or serves other requests.

    Torch is imported here and, in parallel, in the interpreter that solutions' workers are forked from, while
    versions of this environment are looked up.
    """
    tell("starting")
    caches, cuda_home, gpu, weak = Path(order["caches"]), order["cuda_home"], order["gpu"], order["weak"]
    main = Environment(name=MAIN, python=order["python"], record={"digest": "judged", "cuda_home": cuda_home})
    environment: dict[str, str] = {}
    if gpu:  # solutions compile in other folders; this one is empty
        main = replace(main, record={**main.record, "device_type": "cuda"})
        environment = main.told(caches)
    imported = [name for name in order["preload"] if find_spec(name) is not None]
    preload = [PRELOADED[name] for name in imported]
    pool = untrusted_pool(gpu=gpu, environment=environment, weak=weak, preload=preload)
    starting = ThreadPoolExecutor(4)
    starting.submit(pool.layers)
    if gpu and "triton" in imported:
        starting.submit(compile_launcher, environment)
    import torch

    from traceproof.solutions import trial

    if gpu and not torch.cuda.is_available():  # there is a driver but no GPU
        pool.close()
        gpu, environment = False, {}
        pool = untrusted_pool(weak=weak)
    # creates the context before it is needed
    starting.submit(lambda: torch.zeros(1, device="cuda" if gpu else "cpu"))

    gc.freeze()  # a later collection would look at all that was imported, for half a second

    def handle(item: Mapping[str, Any]) -> dict[str, Any]:
        if "end" in item:
            pool.close()
            starting.shutdown(wait=False)
            return {}
        if "problem" in item:
            from traceproof.solutions.suites import problem_definition

            return problem_definition(Path(item["problem"]), pool=pool).as_json()
        settings = JudgeSettings.model_validate({**item["settings"], "gpu": gpu, "environment": environment})
        candidate = Candidate(**item["solution"])
        problem = blocked(candidate, gpu=gpu)
        if problem is not None:
            return {"blocked": problem}
        # a ground truth is called in this process, with modules that were compiled for it before
        if settings.timed:
            facts = inside.record(cuda_home)  # takes seconds, since it reads all of some packages
            record = {**facts, "digest": digest_json(facts), "cuda_home": cuda_home}
            os.environ.update(replace(main, record=record).told(caches))
        torch.set_num_threads(1)
        pool.hide(map(Path, settings.conceal))
        watch = trial.Watch(tell, item["begun"])
        watch.done("importing")
        watch.say("planning")
        definition, cases = trial.planned(item["definition"], settings)
        watch.done("planning")
        with trial.SolutionRun.of(definition, candidate, settings, pool) as run:
            watch.done("preparing")
            result = trial.tried(run, cases, whole=settings.whole, watch=watch)
        versions, device = inside.identity()
        return {**result.model_dump(mode="json"), "device": device, "versions": versions}

    return handle
