"""What the Snakemake rules ask for: paths, interpreters, options and digests, all from one configuration."""

import json
import os
import shlex
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import cache, cached_property
from pathlib import Path
from typing import Any, Protocol, TypeVar

from traceproof.checkouts.pins import NAME
from traceproof.checkouts.sources import Sources
from traceproof.config import Config, read_config, repeat_options
from traceproof.dataset.fetch import FETCHED, folder_of, scan_digest, untouched
from traceproof.digests import code_digest, digest_bytes, digest_json, verdict_code
from traceproof.environments.building import FOLDER, INSTALLED, Installation, on_gpu, resolve
from traceproof.errors import TraceproofError
from traceproof.ops import registry
from traceproof.run.entry import UNFINISHED
from traceproof.run.hidden import hidden_seed
from traceproof.run.schema import RETRY, Index, Listed, environment_of, for_op_type
from traceproof.stacks import MAIN, PACKAGES, STACKS, TRUTHS

GIB = 1 << 30
T = TypeVar("T")


class Wildcards(Protocol):
    """Wildcards that Snakemake gives a rule's functions; a rule has some of these."""

    op_type: str
    group: str
    stack: str

    def get(self, name: str, default: str) -> str:
        """The value of a wildcard that a rule may lack."""


class Pipeline:
    """One configuration as the rules need it. Paths are relative to `root`, the repository."""

    def __init__(self, config: Config, root: Path) -> None:
        self.config, self.root = config, root
        self.results = str(config.results)  # everything is written there
        self.run = str(config.results / config.run)  # this selection's cases, verdicts and summary
        self.caches = f"{self.results}/compiled"
        self.cache = f"{self.results}/cache.sqlite"  # finished rows
        self.lock = [NAME] if (root / NAME).is_file() else []  # the file of pinned sources
        self.known = [] if config.known is None else [str(config.known)]  # the file of known findings
        # The configured dataset, and what is verified: the same, or a copy with extracted definitions added.
        self.source = str(folder_of(config.dataset, root=config.results / "dataset"))
        self.dataset = f"{self.results}/extract/dataset" if config.models else self.source
        # Stamps of the two; none where a folder is used in place.
        self.source_fetched = [] if config.dataset.path is not None else [f"{self.source}/{FETCHED}"]
        self.fetched = [f"{self.dataset}/{FETCHED}"] if config.models else self.source_fetched
        self.dataset_source = config.dataset.model_dump_json(exclude_none=True)
        self.models = json.dumps([model.model_dump(mode="json") for model in config.models])
        self.model_files = [str(model.config) for model in config.models if model.config is not None]
        self.tolerance = json.dumps(config.tolerance)
        self.weak = f"--weak={config.allow_weak_isolation}"
        # The GPU model to ask a batch system for; None: any.
        self.gpu_model = config.gpu if isinstance(config.gpu, str) and config.gpu != "auto" else None
        taken = {stack: config.stacks[stack].get("source") for stack in PACKAGES}
        self.sources = Sources(root, self.results, taken)

    @classmethod
    def of_snakefile(cls, raw: Mapping[str, Any]) -> "Pipeline":
        """From Snakemake's raw config. Raises SystemExit: it can not be used; stderr says why."""
        try:
            found = cls(read_config(raw, root=Path.cwd()), Path.cwd())
        except TraceproofError as error:
            sys.stderr.write(f"{error}\n")
            raise SystemExit(UNFINISHED) from None
        _ = found.index  # reading it removes a damaged one before Snakemake looks, so that it is made again
        return found

    @property
    def shell_prefix(self) -> str:
        """Prefix of each shell command: `python` is this interpreter, and a command replaces its shell.

        Bytecode is always written: otherwise each process compiles torch's files again. PYTHONHASHSEED=0 gives
        sets one order, also in code that packages generate and cache by its text.
        """
        python = shlex.quote(str(Path(sys.executable).parent))
        return f"unset PYTHONDONTWRITEBYTECODE; export PATH={python}:$PATH PYTHONHASHSEED=0 PYTHONPATH=src; exec "

    @cached_property
    def stacks(self) -> Mapping[str, Installation]:
        """Where each stack runs, by its name."""
        return {name: resolve(self.config, name) for name in STACKS}

    def python(self, stack: str) -> str:
        """Path of a stack's interpreter."""
        return self.stacks[stack].python

    def environment(self, stack: str) -> list[str]:
        """Stamp files of the environment that a stack needs; none where an interpreter is configured."""
        name = self.stacks[stack].environment
        return [] if name is None else [f"{FOLDER}/{name}/{INSTALLED}"]

    def record(self, stack: str) -> str:
        """The JSON file that describes a stack: versions, content of packages, device."""
        return f"{self.results}/stacks/{stack}.json"

    @property
    def on_gpu(self) -> bool:
        """Whether jobs find an NVIDIA driver."""
        return on_gpu(self.config)

    @property
    def one_gpu(self) -> int | None:
        """The number of GPUs for a job that works on one; None: there is none."""
        return 1 if self.on_gpu else None

    # Digests of files that no rule has as an input, for `params`.

    @property
    def known_state(self) -> str:
        """Digest of the file of known findings."""
        paths = (self.root / name for name in self.known)
        return digest_json([digest_bytes(path.read_bytes()) for path in paths if path.is_file()])

    @cached_property
    def source_state(self) -> str:
        """Digest of the configured dataset's files, or "as fetched" where nobody changed them."""
        folder = self.root / self.source
        as_fetched = self.config.dataset.path is None and untouched(folder)
        return "as fetched" if as_fetched else scan_digest(folder)

    @cached_property
    def dataset_state(self) -> str:
        """Digest of the files of the dataset that is verified, or "as fetched" or "as extracted"."""
        folder = self.root / self.dataset
        if not self.config.models:
            return self.source_state
        return "as extracted" if untouched(folder) else scan_digest(folder)

    def date_back(self) -> None:
        """Touch this run's files whose dates lie in the future: Snakemake ends a run that meets one."""
        now, results, run = time.time(), self.root / self.results, self.root / self.run
        parts = ("stacks", "dataset/*/.fetched.json", "extract/dataset/.fetched.json")
        places = [place for part in parts for place in results.glob(part)]
        places += [place for part in ("cases", "verdicts", "tests", "summar*") for place in run.glob(part)]
        for path in (file for place in places for file in (place, *place.glob("*"))):
            with suppress(OSError):  # gone by now, or another user's
                if path.stat().st_mtime > now:
                    os.utime(path)

    @property
    def selection(self) -> str:
        """The part of the configuration that planning reads, as JSON."""
        config = self.config
        value = {
            "op_types": config.selection.op_types,
            "definitions": config.selection.definitions,
            "cases": config.selection.case,
            "sizes": config.test_sizes,
            "seed": config.seed,
            "hidden_seed": self.hidden_seed,
            "workloads": config.workloads,
            "memory_limit": int(config.limits.memory_gb * GIB),
        }
        return json.dumps(value, separators=(",", ":"))

    @cached_property
    def repeat(self) -> str:
        """Command-line options of commands that repeat a case: what differs from config.yaml."""
        return repeat_options(self.config, self.root)

    @cached_property
    def hidden_seed(self) -> int:
        """The number that hidden cases are derived from: configured, or kept in the results folder."""
        given = self.config.hidden_seed
        return hidden_seed(self.root / self.config.results) if given is None else given

    @property
    def scope(self) -> str:
        """What a run covers, as JSON, by which runs are compared in the history; null with a user's tolerance."""
        config = self.config
        if config.tolerance is not None:
            return "null"
        source = config.dataset.model_dump(mode="json", exclude_none=True)
        for kind in (one for one in source.values() if isinstance(one, dict)):
            for version in ("version", "sha256", "commit"):  # the same dataset in another version is compared
                kind.pop(version, None)
        path = {"path": str((self.root / config.dataset.path).resolve())} if config.dataset.path else {}
        dataset = json.dumps(source | path, sort_keys=True)
        return json.dumps({"dataset": dataset, "whole": not config.selection.case})

    def limits(self, *, cases: int = 1) -> str:
        """The limits for `cases` cases together, as JSON."""
        return json.dumps(self.config.limits.of_call(cases=cases).as_json())

    @property
    def plan_options(self) -> list[str]:
        """Command-line options of the job `cases`."""
        code = code_digest("dataset", *(f"run/{name}.py" for name in ("hidden", "judging", "plan", "schema")))
        options = [f"--dataset={self.dataset}", f"--selection={self.selection}", f"--code={code}"]
        return [*options, f"--foreign={json.dumps(registry.foreign())}"]

    def verify_options(self, wildcards: Wildcards) -> list[str]:
        """Command-line options of an op_type's jobs `verify`; rows are made again where any of it changes."""
        op_type = wildcards.op_type
        code = verdict_code(registry.file_of(op_type))
        given = [f"--environments={self.environments(op_type)}", f"--code={code}"]
        given += [f"--cache={self.cache}", f"--caches={self.caches}", f"--limits={self.limits()}"]
        given += [f"--build-seconds={self.config.limits.build_s}"]
        given += [f"--tolerance={self.tolerance}", f"--repeat={self.repeat}", self.weak]
        return [*given, "--implementations", *self.implementations(op_type)]

    def stack_options(self, wildcards: Wildcards) -> list[str]:
        """Command-line options of the script that records a stack."""
        stack, source = wildcards.stack, self.sources.of(wildcards.stack)
        options = [f"--python={self.python(stack)}", f"--cuda-home={self.stacks[stack].cuda_home}"]
        return [*options, f"--source={source}", f"--linked={self.sources.linked(stack)}"]

    # What was planned. Rules that use it come after the checkpoint `cases`.

    @property
    def index(self) -> Index | None:
        """The index of all plans; None: nothing is planned yet, or it was damaged and removed."""
        path = self.root / self.run / "cases" / "index.json"
        try:
            return _read(path, path.stat().st_mtime_ns)
        except (FileNotFoundError, TraceproofError):
            return None

    def plan(self, wildcards: Wildcards) -> str:
        """The plan file of a job."""
        return f"{self.run}/cases/{wildcards.op_type}{wildcards.group}.json"

    def plans(self, wildcards: Wildcards) -> list[str]:
        """The plan files of all jobs, or of an op_type's."""
        op_type = wildcards.get("op_type", "")
        return [f"{self.run}/cases/{name}.json" for name in self._jobs([op_type] if op_type else self.op_types())]

    def _jobs(self, op_types: Iterable[str]) -> list[str]:
        """Names of the jobs of op_types, and of their files."""
        index = self.index
        return [name for op_type in op_types for name in index.op_types[op_type].digests] if index else []

    def op_types(self, family: str = "") -> list[str]:
        """The planned op_types, all or of one family, sorted."""
        planned = self.index.op_types if self.index else ()
        return sorted(name for name in planned if family in {"", registry.get(name).family})

    def verdicts(self, wildcards: Wildcards) -> list[str]:
        """The verdict files of all planned op_types, or of a family's, one per job."""
        names = self._jobs(self.op_types(wildcards.get("family", "")))
        return [f"{self.run}/verdicts/{name}.jsonl" for name in names]

    def implementations(self, op_type: str) -> tuple[str, ...]:
        """What is judged of an op_type: its references, and the configured ground truths with adapters for it."""
        return tuple(name for name in for_op_type(op_type) if name not in TRUTHS or name in self.config.truths)

    def stacks_of(self, op_type: str) -> list[str]:
        """The stacks that an op_type's implementations run in; the main one first.

        Without a GPU, nothing runs in any other one but those that have a configured interpreter.
        """
        found = {environment_of(name) for name in self.implementations(op_type)} - {MAIN}
        runs = (name for name in found if self.on_gpu or self.config.stacks[name].python is not None)
        return [MAIN, *sorted(runs)]

    def records(self, wildcards: Wildcards) -> list[str]:
        """Record files of the stacks that all planned op_types, or a family's, run in."""
        op_types = self.op_types(wildcards.get("family", ""))
        found = {MAIN, *(stack for op_type in op_types for stack in self.stacks_of(op_type))}
        return [self.record(stack) for stack in sorted(found)]

    def environments(self, op_type: str) -> str:
        """Interpreter, record file and folder of a linked checkout, by stack of an op_type, as JSON."""
        found = {}
        for stack in self.stacks_of(op_type):
            path = [self.sources.linked(stack)] if self.sources.of(stack) else []
            found[stack] = {"python": self.python(stack), "record": self.record(stack), "path": path}
        return json.dumps(found)

    # Resources of a rule's job.

    def _listed(self, wildcards: Wildcards) -> Listed:
        """The index entry of an op_type; a small one if it is not planned."""
        found = self.index.op_types.get(wildcards.op_type) if self.index else None
        return found or Listed(digests={}, mem_mb=2000, gpu_mb=0, parallel=1, builds=0, seconds=0)

    def job_records(self, wildcards: Wildcards) -> list[str]:
        """Record files of the stacks that a job uses."""
        return [self.record(stack) for stack in self.stacks_of(wildcards.op_type)]

    def job_digest(self, wildcards: Wildcards) -> str:
        """Digest of the job's cases."""
        return self._listed(wildcards).digests.get(wildcards.op_type + wildcards.group, "")

    def job_again(self, wildcards: Wildcards) -> str:
        """When rows of the job ran into a limit, which starts it again once; empty: never, or nothing is kept."""
        path = self.root / self.run / RETRY / f"{wildcards.op_type}{wildcards.group}"
        return path.read_text() if self.config.tolerance is None and path.is_file() else ""

    def job_mb(self, wildcards: Wildcards, attempt: int) -> int:
        """Memory of the job in MiB, times the attempt, as a batch system may have ended the last one for it."""
        return attempt * self._listed(wildcards).mem_mb

    def job_gpu_mb(self, wildcards: Wildcards) -> int:
        """GPU memory of the job in MiB."""
        return self._listed(wildcards).gpu_mb if self.on_gpu else 0

    def job_parallel(self, wildcards: Wildcards) -> int:
        """Definitions that the job works on at the same time."""
        return self._listed(wildcards).parallel

    def job_threads(self, wildcards: Wildcards) -> int:
        """Cores of the job: on a GPU at most two, since most wait for it, and more become free only late.

        On a CPU one, even where two definitions run at the same time: other jobs run beside it and fill the cores.
        """
        return min(self.job_parallel(wildcards), 2) if self.on_gpu else 1

    def parallel_on(self, wildcards: Wildcards, threads: int) -> int:
        """Definitions that a job with `threads` cores works on at the same time."""
        parallel = self.job_parallel(wildcards)
        return parallel if threads >= self.job_threads(wildcards) else threads

    def job_priority(self, wildcards: Wildcards) -> int:
        """Priority: what takes longest starts first; before any run has compiled kernels, what compiles."""
        listed = self._listed(wildcards)
        if not self.on_gpu or any((self.root / self.caches).glob("*/built/*")):
            return int(listed.seconds)
        late = 1000 if registry.get(wildcards.op_type).compiles_late else 0
        return late + int(listed.builds + listed.seconds)


def by_stack(what: Callable[[str], T]) -> Callable[[Wildcards], T]:
    """A rule's function of its wildcards that gives `what` for the wildcard `stack`."""
    return lambda wildcards: what(wildcards.stack)


@cache
def _read(path: Path, stamp: int) -> Index:
    """The index of plans, parsed once per state (modification time) of the file, as several rules ask per job."""
    del stamp
    return Index.read(path)
