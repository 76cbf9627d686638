"""What the Snakemake rules ask: paths, interpreters and digests, all of it from one frozen configuration."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from traceproof.actors.registry import ACTORS, for_op_type
from traceproof.checkouts.lock import NAME
from traceproof.config.reading import read_config
from traceproof.config.repeat_options import options
from traceproof.config.schema import Config
from traceproof.digests import digest_bytes, digest_json
from traceproof.environments.building import FOLDER, INSTALLED, Installation, on_gpu, resolve
from traceproof.ops import registry
from traceproof.pipeline.adapters import compiles
from traceproof.pipeline.code_digests import CodeDigests
from traceproof.pipeline.dataset_files import DatasetFiles
from traceproof.pipeline.load import Load
from traceproof.pipeline.sources import Sources
from traceproof.pipeline.stages.hidden import hidden_seed
from traceproof.stacks import PACKAGES, STACKS, TRUTHS

GIB = 1 << 30


@dataclass(frozen=True)
class Pipeline(CodeDigests, DatasetFiles):
    """One configuration, as the rules need it. Paths are relative to `root`, the repository."""

    config: Config
    root: Path

    @classmethod
    def of(cls, raw: Mapping[str, Any], *, root: Path) -> "Pipeline":
        """From a raw mapping. Raises TraceproofError: the configuration can not be used."""
        return cls(read_config(raw, root=root), root)

    @property
    def run(self) -> str:
        """Where this selection's cases, verdicts and summary are written."""
        return str(self.config.results / self.config.run)

    @cached_property
    def stacks(self) -> Mapping[str, Installation]:
        """The stacks by name."""
        return {name: resolve(self.config, name) for name in STACKS}

    @property
    def environments_digest(self) -> str:
        """Digest of the configuration of what runs of several selections share."""
        config = self.config
        return digest_json([config.stacks.model_dump(mode="json"), self.models])

    def python(self, stack: str) -> str:
        """A stack's interpreter."""
        return self.stacks[stack].python

    @property
    def on_gpu(self) -> bool:
        """Whether jobs find an NVIDIA driver."""
        return on_gpu(self.config)

    @property
    def gpu_model(self) -> str | None:
        """The model of GPU to ask a batch system for; None: any."""
        return self.config.gpu if isinstance(self.config.gpu, str) and self.config.gpu != "auto" else None

    @property
    def one_gpu(self) -> int | None:
        """GPUs of a job that works on one; None: there is none."""
        return 1 if self.on_gpu else None

    def gpus(self, op_type: str, actor: str = "") -> int | None:
        """GPUs of an actor's job, or of the judge's where none is named; None: it needs none."""
        return self.one_gpu if self.load.opens_gpu(op_type, actor) else None

    @property
    def actors(self) -> tuple[str, ...]:
        """The actors whose outputs are judged, the oracle among them."""
        return tuple(name for name in ACTORS if name not in TRUTHS or name in self.config.truths)

    def actors_of(self, op_type: str) -> tuple[str, ...]:
        """The actors that are run for an op_type."""
        return tuple(name for name in for_op_type(op_type) if name in self.actors)

    def manifests(self, op_type: str) -> list[str]:
        """What the actors of an op_type leave, one file per job."""
        return [
            f"{self.run}/actors/{op_type}/{actor}{shard}.json"
            for actor in self.actors_of(op_type)
            for shard in self.load.shards(op_type, actor)
        ]

    def builds(self, op_type: str, actor: str) -> list[str]:
        """What has to be built before an actor runs: one file, or none."""
        if actor not in TRUTHS or not compiles(actor, op_type) or not self.on_gpu:
            return []
        return [f"{self.run}/jit/{op_type}-{self.actor_stack(actor)}.json"]

    def builders(self, family: str = "") -> list[str]:
        """Records of the stacks that build kernels, to be written while planning: a first run waits for builds.

        None where there is no GPU, or an environment would have to be made that the plan may not need.
        """
        if not self.on_gpu:
            return []
        selection = self.config.selection
        named = selection.op_types or registry.known()
        wanted = [name for name in named if family in {"", registry.record(name).family}]
        stacks = {
            self.actor_stack(actor)
            for op_type in wanted
            for actor in self.actors_of(op_type)
            if actor in TRUTHS and compiles(actor, op_type)
        }
        there = [
            name
            for name in sorted(stacks)
            if all((self.root / stamp).exists() for stamp in self.environment(name))
        ]
        return [f"{self.results}/stacks/{name}.json" for name in there]

    @property
    def caches(self) -> str:
        """Where what is compiled is kept."""
        return f"{self.results}/compiled"

    def actor_stack(self, actor: str) -> str:
        """The stack that an actor runs in."""
        return ACTORS[actor].stack

    def environment(self, stack: str) -> list[str]:
        """Stamp of the environment that a stack needs built first: one, or none where an interpreter is given."""
        name = self.stacks[stack].environment
        return [] if name is None else [f"{FOLDER}/{name}/{INSTALLED}"]

    @cached_property
    def sources(self) -> Sources:
        """Where the stacks' packages come from, and the records that key their outputs."""
        taken = {stack: self.config.stacks[stack].get("source") for stack in PACKAGES}
        return Sources(root=self.root, results=self.results, taken=taken)

    def stacks_of(self, op_types: Iterable[str]) -> list[str]:
        """The stacks that anything of some op_types runs in."""
        return sorted({self.actor_stack(actor) for op_type in op_types for actor in self.actors_of(op_type)})

    @property
    def history(self) -> str:
        """Where the verdicts of every state are kept."""
        return f"{self.results}/history"

    @property
    def scope(self) -> str:
        """What a run covers, for the history, as JSON; null: its verdicts stand on the user's tolerance."""
        config = self.config
        if config.tolerance is not None:
            return "null"
        source = config.dataset.model_dump(mode="json", exclude_none=True)
        for kind in source.values():  # the same dataset in another version is compared
            if isinstance(kind, dict):
                for version in ("version", "sha256", "commit"):
                    kind.pop(version, None)
        path = {"path": str((self.root / config.dataset.path).resolve())} if config.dataset.path else {}
        dataset = json.dumps(source | path, sort_keys=True)
        return json.dumps({"dataset": dataset, "whole": not config.selection.case})

    @property
    def lock(self) -> list[str]:
        """The file of the sources' pins: one, or none."""
        return [NAME] if (self.root / NAME).is_file() else []

    @cached_property
    def hidden_seed(self) -> int:
        """What the hidden cases follow from."""
        given = self.config.hidden_seed
        return hidden_seed(self.root / self.config.results) if given is None else given

    @property
    def weak_flag(self) -> str:
        """The flag that lets references run where isolation is not whole."""
        return "--allow-weak-isolation" if self.config.allow_weak_isolation else ""

    @property
    def selection(self) -> str:
        """What planning reads of the configuration, as JSON."""
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

    @property
    def limits(self) -> str:
        """A case's limits, as JSON."""
        return self.config.limits.model_dump_json(exclude={"store_gb"})

    @property
    def store_gb(self) -> str:
        """What the store may grow to, as JSON."""
        return json.dumps(self.config.limits.store_gb)

    @property
    def tolerance(self) -> str:
        """The override of the specification's tolerance, as JSON."""
        return json.dumps(self.config.tolerance)

    @property
    def repeat(self) -> str:
        """Options of commands that repeat a case: what config.yaml does not say."""
        return options(self.config, self.root)

    @property
    def known(self) -> list[str]:
        """The file of known findings: one, or none."""
        return [] if self.config.known is None else [str(self.config.known)]

    @property
    def known_state(self) -> str:
        """Changes when the file of known findings does."""
        paths = (self.root / name for name in self.known)
        return digest_json([digest_bytes(path.read_bytes()) for path in paths if path.is_file()])

    @property
    def load(self) -> Load:
        """What a job of an actor or a judge takes of the machine."""
        return Load(self.root / self.run / "cases", side_by_side=self.on_gpu)

    @property
    def force_flag(self) -> list[str]:
        """The flag that makes an actor run what the store holds; no parameter: the rule is forced, too."""
        return ["--force"] if self.config.force else []

    def op_types(self, family: str = "") -> list[str]:
        """The op_types that were planned, all or those of one family; call it after the checkpoint `cases`."""
        planned = sorted(path.stem for path in (self.root / self.run / "cases").glob("*.json"))
        return [name for name in planned if family in {"", registry.record(name).family}]
