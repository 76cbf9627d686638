"""Judging solutions one after the other by one configuration: the command, `verify --solutions` and the rule."""

import json
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path

from traceproof.config import Config
from traceproof.dataset.fetch import fetch
from traceproof.dataset.tree import read_tree
from traceproof.environments.building import has_driver, probe, ready, resolve
from traceproof.errors import TraceproofError
from traceproof.files import write_text
from traceproof.names import path_part
from traceproof.sandbox import GIB
from traceproof.solutions.judging import JudgeEnvironment, blocked, judge, new_hidden_seed, target_of
from traceproof.solutions.reading import Candidate, read
from traceproof.solutions.records import Certificate, JudgeSettings
from traceproof.solutions.render import as_json, page, table, trace_lines
from traceproof.stacks import MAIN, PACKAGES, STACKS

FOLDER = "solutions"  # of a dataset
SUMMARY = "solutions.json"  # of a run
TRACES = ".traces.jsonl"  # beside a certificate that has times
JUDGED = "judged"  # below the results folder
PART = r"[A-Za-z0-9_][A-Za-z0-9_.-]*"


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
    sign: Callable[[Path], object] | None = None  # signs a certificate's file

    def judge(self, candidate: Candidate, repeat: str) -> Certificate:
        """Judge one solution, and write its certificate. Raises TraceproofError: why it can not be judged here."""
        name = self._named(candidate)
        why = blocked(candidate, gpu=has_driver())
        if why is not None:  # found out before an environment is built
            raise TraceproofError(why)
        environment = self._environment(self.stack or _stack_of(candidate))
        why = blocked(candidate, gpu=environment.gpu)
        if why is not None:
            raise TraceproofError(why)
        with target_of(name, None if name.endswith(".json") else self.folder) as target:
            self.say(f"judging {candidate.name} for {target.definition.name}")
            certificate = judge(candidate, target, environment, repeat=repeat)
        for suffix, text in ((".json", as_json(certificate)), (".html", page(certificate))):
            write_text(self.place(certificate).with_suffix(suffix), text)
        if self.sign is not None:
            self.sign(self.place(certificate).with_suffix(".json"))
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
        results = self.root / self.config.results
        return JudgeEnvironment(
            python=python,
            record=probe(installation, root=self.root),
            caches=results / "compiled",
            settings=self._settings(conceal=(str(results), str(self.out))),
            told=self._told,
        )

    def _settings(self, conceal: tuple[str, ...]) -> JudgeSettings:
        """How the configuration has solutions judged."""
        limits = self.config.limits
        return JudgeSettings(
            conceal=conceal,
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
        )

    @staticmethod
    def _told(what: str) -> None:
        """Rewrite the line that says how far the judge is, on a terminal."""
        if sys.stderr.isatty():
            sys.stderr.write(f"\r{what:<60}\r")
            sys.stderr.flush()

    def _named(self, candidate: Candidate) -> str:
        """Name or file of the definition that a solution is held against."""
        name = self.definition or candidate.definition
        if not name:
            todo = "Give --definition NAME, as it stands in the dataset, or --definition FILE.json."
            raise TraceproofError(f"{candidate.path} does not say which definition it implements", todo=todo)
        return name

    @property
    def folder(self) -> Path:
        """The dataset's folder."""
        return self.dataset or fetch(self.config.dataset, root=self.root / self.config.results / "dataset")

    def selected(self) -> list[Candidate]:
        """The dataset's solutions to the selected definitions. Raises TraceproofError: one can not be read."""
        place, chosen = self.folder / FOLDER, self.config.selection
        if not place.is_dir():
            return []
        found = [one for one in read(place) if not chosen.definitions or one.definition in chosen.definitions]
        if not chosen.op_types:
            return found
        kinds = {name: entry.definition.op_type for name, entry in read_tree(self.folder).definitions.items()}
        return [one for one in found if kinds.get(one.definition) in chosen.op_types]

    def judge_folder(self, candidates: Iterable[Candidate], summary: Path) -> int:
        """Judge a dataset's solutions, print their tables, and write a summary; gives how many are refused.

        One that can not be judged here is named with the reason, and counts as neither.
        """
        found: dict[str, dict[str, object]] = {}
        for candidate in candidates:
            repeat = f"traceproof judge {candidate.path} --dataset {self.folder}"
            try:
                certificate = self.judge(candidate, repeat)
            except TraceproofError as error:
                found[candidate.path] = {"verdict": "not judged", "reasons": [str(error)]}
                self.say(f"not judged: {error}")
                continue
            sys.stdout.write(table(certificate))
            found[candidate.path] = {"verdict": certificate.verdict, "reasons": list(certificate.reasons)}
        write_text(summary, json.dumps({"solutions": found}, indent=1, ensure_ascii=False) + "\n")
        counts = {kind: sum(one["verdict"] == kind for one in found.values()) for kind in KINDS}
        sys.stdout.write(f"solutions: {', '.join(f'{count} {kind}' for kind, count in counts.items())}\n")
        return counts["refused"]


KINDS = ("accepted", "refused", "not judged")


def _stack_of(candidate: Candidate) -> str:
    """The stack whose package a solution imports, one that has a CUDA compiler if it needs that, or the main."""
    imported = candidate.imported
    own = [name for name, package in PACKAGES.items() if package in imported]
    compilers = [name for name, stack in STACKS.items() if stack.toolkit and candidate.is_compiled]
    return [*own, *compilers, MAIN][0]
