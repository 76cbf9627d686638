"""Would today's cases have caught the bugs that packages really had?

    python lab/replay_history.py --list                    # the catalogue, lab/bugs.yaml
    python lab/replay_history.py --bug flashinfer-merge-empty-pair
    python lab/replay_history.py --packages wheels         # releases from a folder of wheels instead of the index

Runs the cases of a bug's op_type on the release with it and on the one without, in the folder whose config.yaml is
to be used. Exit codes: 0 fine, 1 a bug was missed or a release without it fails, 2 bad use or input.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from enum import StrEnum
from fnmatch import fnmatch
from functools import cache, cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Literal, Self, get_args

from filelock import FileLock
from packaging.utils import InvalidWheelFilename, canonicalize_name, parse_wheel_filename
from packaging.version import Version
from pydantic import BaseModel, Field, StringConstraints, model_validator
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from ruamel.yaml import YAML

from traceproof.bumps import GroundTruthTrial
from traceproof.checkouts.packages import bring_package, unpack
from traceproof.checkouts.pins import Pin
from traceproof.cli import BAD_USE, run
from traceproof.config import Config
from traceproof.dataset.fetch import CLOSED, Dataset, Text, fetch
from traceproof.dataset.tree import closest
from traceproof.digests import digest_json
from traceproof.environments.building import importable, probe, ready
from traceproof.errors import TraceproofError
from traceproof.files import write_json
from traceproof.ops import registry
from traceproof.ops.cases import ALL_SIZES, STRESS
from traceproof.reasons import Error, Skip, Verdict
from traceproof.run.flow import Pipeline
from traceproof.run.report import headed
from traceproof.run.schema import VerdictRow
from traceproof.stacks import MAIN, STACKS, truths_of

# The kind of mistake; the least hardware that shows it (cpu: by Triton's interpreter, or natively); how it shows,
# by numbers, by an error or a crash, by a call that never ends; the class of cases that shows it, those of size
# `stress` apart, as far as an op has them.
Kind = Literal[
    "mask", "address", "state", "race", "cache", "dtype", "underflow", "tie", "layout", "scale", "recurrence"
]
Hardware = Literal["cpu", "gpu", "sm90", "sm100"]
Shows = Literal["wrong", "error", "hang"]
Ordinary = Literal["regular", "edge", "adversarial", "odd_sizes", "layouts", "state", "races", "samplers"]
Stressing = Literal["extreme_values", "far_addresses", "long_contexts"]
CATALOGUE = Path(__file__).with_name("bugs.yaml")
DISTRIBUTIONS: Mapping[str, str] = {
    name: stack.name for stack in STACKS.values() if stack.origin for name in (stack.distribution, *stack.formerly)
}


class Bug(BaseModel):
    """One bug."""

    model_config = CLOSED | {"strict": False}
    id: Annotated[str, StringConstraints(pattern=r"^[a-z0-9]+(-[a-z0-9]+)*$")]  # its key in the catalogue
    title: Text  # what was wrong
    upstream: Text | None = None  # number of the issue or change, where it is known
    kind: Kind  # of mistake
    op_type: Text  # whose ground truth has it
    package: Text  # the distribution whose releases have it
    since: Text | None = None  # the first release known to have it; None: only `last_bad` is known to
    # last_bad, first_good: the releases before and after the fix
    last_bad: Text
    first_good: Text
    hardware: Hardware  # the least that shows it
    shows: Shows  # how it shows
    cases: Ordinary | Stressing  # the class of cases that shows it
    needs: Text  # what such a case has to have
    definitions: tuple[Text, ...] = ()  # patterns of the definitions to run; empty: all of the op_type
    # sizes of const axes to run instead of the definition's
    axes: dict[str, Annotated[int, Field(ge=1)]] = Field(default_factory=dict)
    # of inputs and outputs, to run instead of the definition's
    dtypes: dict[str, Text] = Field(default_factory=dict)
    in_turn: bool = False  # whether the definition as it is runs before it with those dtypes, in one process
    shown_by: tuple[Text, ...] = ()  # ids of the cases that show it, which alone are run and counted; empty: all
    ground_truths: tuple[Text, ...] = ()  # of the stack, which alone are run; empty: all
    # of the environment, that the package's own choice of kernels follows
    variables: dict[str, Text] = Field(default_factory=dict)
    # what the releases' sources show: a file of the package, and what changed in it
    evidence: Annotated[dict[str, Text], Field(min_length=1)]

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.op_type not in registry.known():
            raise ValueError(f"op_type {self.op_type!r} is none; known: {', '.join(registry.known())}")
        if self.package not in DISTRIBUTIONS:
            raise ValueError(f"package {self.package!r} is no stack's; known: {', '.join(DISTRIBUTIONS)}")
        if unknown := set(self.ground_truths) - set(truths_of(self.stack)):
            raise ValueError(f"{', '.join(sorted(unknown))} is no ground truth of the stack {self.stack}")
        if not self.oldest_bad <= Version(self.last_bad) < Version(self.first_good):
            raise ValueError("since, last_bad and first_good are not in order")
        return self

    @property
    def stressing(self) -> bool:
        """Whether cases of size `stress` show it."""
        return self.cases in get_args(Stressing)

    @property
    def oldest_bad(self) -> Version:
        """The first release known to have it."""
        return Version(self.since or self.last_bad)

    @property
    def stack(self) -> str:
        """The stack that the package is the ground truth of."""
        return DISTRIBUTIONS[self.package]

    def had(self, version: str) -> bool:
        """Whether a release has it, as far as is known."""
        return self.oldest_bad <= Version(version) <= Version(self.last_bad)


@cache
def bugs() -> Mapping[str, Bug]:
    """All bugs by id, sorted."""
    found = YAML(typ="safe").load(CATALOGUE.read_text("utf-8"))["bugs"]
    return MappingProxyType({name: parsed(name, found[name]) for name in sorted(found)})


def parsed(name: str, entry: Mapping[str, Any]) -> Bug:
    """The bug that an entry of the catalogue describes. Raises ValidationError: it describes none."""
    flat = {key: value for key, value in entry.items() if key not in {"about", "releases"}}
    return Bug.model_validate({"id": name, **entry.get("about", {}), **entry.get("releases", {}), **flat})


def beside(bug: Bug, version: str) -> set[str]:
    """Ids of other bugs of the same package and op_type that a release has."""
    others = (one for one in bugs().values() if one.id != bug.id)
    return {
        one.id for one in others if (one.package, one.op_type) == (bug.package, bug.op_type) and one.had(version)
    }


def chosen(names: Iterable[str]) -> list[Bug]:
    """The bugs of these ids; all where none is given. Raises TraceproofError: there is no such bug."""
    known, wanted = bugs(), list(names)
    for name in (name for name in wanted if name not in known):
        todo = "`python lab/replay_history.py --list` names them."
        raise TraceproofError(f"there is no bug {name}; {closest(name, known)}", todo=todo)
    return [known[name] for name in wanted] or list(known.values())


class Found(StrEnum):
    """What came of a replay."""

    CAUGHT = "caught"  # a case fails with the bug and passes without it
    MISSED = "missed"
    NOT_HERE = "not reproducible here"


class Why(StrEnum):
    """Why a bug is not reproducible here, where no skip of the pipeline says it."""

    NO_RELEASE = "no_release"
    NO_DEFINITION = "no_definition"
    NOT_RUN = "release_not_run"  # one of the releases could not be run


class Outcome(BaseModel):
    """What came of one bug."""

    model_config = CLOSED
    bug: str  # its id
    found: Found  # what came of it
    # reason, message: why it is not reproducible here, or what a miss needs
    reason: Skip | Why | None = None
    message: str = ""
    # bad, good: the releases that were run
    bad: str | None = None
    good: str | None = None
    cases: int = 0  # rows that were compared in both
    flips: tuple[str, ...] = ()  # rows that fail with the bug and pass without it, `definition case output`
    alarms: tuple[str, ...] = ()  # rows that fail without the bug
    # other bugs that the one release has and the other has not: the flips may be theirs
    shared: tuple[str, ...] = ()
    remaining: tuple[str, ...] = ()  # other bugs that both releases have: the alarms may be theirs
    seconds: float = 0.0  # wall-clock time of the bug's runs

    @property
    def finding(self) -> bool:
        """Whether it is a miss, or an alarm that no known bug explains."""
        return self.found is Found.MISSED or self.unexplained

    @property
    def unexplained(self) -> bool:
        """Whether a release without the bug fails, and no other known bug explains it."""
        return bool(self.alarms) and not self.remaining


class Rows(BaseModel):
    """Rows by what was compared."""

    # verdict and message by `definition case implementation output`
    compared: dict[str, tuple[Verdict, str]] = Field(default_factory=dict)
    skipped: list[tuple[Skip, str]] = Field(default_factory=list)  # reasons and messages of what was not

    @classmethod
    def of(cls, bug: Bug, rows: Sequence[VerdictRow]) -> Self:
        """Sort a trial's rows of the bug's cases; of several rows of one output the worst counts.

        A wrong address may end the process where it lies outside all memory: such a crash is a failure.
        """
        sorted_ = cls()
        for row in rows:
            if bug.shown_by and row.case not in bug.shown_by:
                continue
            key = f"{row.definition} {row.case} {row.implementation} {row.output}"
            if row.verdict is Verdict.SKIP:
                sorted_.skipped.append((Skip(str(row.reason)), row.message))
            elif key not in sorted_.compared or row.bad:
                crash = bug.kind == "address" and row.reason == Error.CRASH
                sorted_.compared[key] = Verdict.FAIL if crash else row.verdict, row.message
        return sorted_

    @property
    def broken(self) -> bool:
        """Whether most of what was compared are errors: the release does not run here."""
        errors = [key for key, (verdict, _) in self.compared.items() if verdict is Verdict.ERROR]
        return 2 * len(errors) > len(self.compared)

    @property
    def failing(self) -> dict[str, str]:
        """Messages of the rows that are failures or errors."""
        return {key: message for key, (verdict, message) in self.compared.items() if verdict is not Verdict.PASS}


def judged(bug: Bug, bad: Sequence[VerdictRow], good: Sequence[VerdictRow]) -> Outcome:
    """What two releases' rows say of a bug.

    An error of the release with the bug counts only where the bug is one: a call that the adapter can not make is
    no catch. A case that fails as a whole (a crash) stands for its outputs.
    """
    before, after = Rows.of(bug, bad), Rows.of(bug, good)
    if not before.compared or not after.compared:
        return _nothing(bug, before, after)
    wrong = bug.shows == "wrong"
    for rows in (before, after) if wrong else (after,):
        if rows.broken:
            message = next(said for verdict, said in rows.compared.values() if verdict is Verdict.ERROR)
            return Outcome(bug=bug.id, found=Found.NOT_HERE, reason=Why.NOT_RUN, message=message)
    errors = {key for key, (verdict, _) in before.compared.items() if wrong and verdict is Verdict.ERROR}
    counted = {key: said for key, said in before.failing.items() if key not in errors}
    passing = {_case(key) for key in after.compared.keys() - after.failing.keys()}
    flips = sorted(key for key in counted if key not in after.failing and _case(key) in passing)
    common = len(before.compared.keys() & after.compared.keys())
    outcome = Outcome(bug=bug.id, found=Found.MISSED, cases=common, alarms=tuple(sorted(after.failing)))
    if flips:
        return outcome.model_copy(
            update={"found": Found.CAUGHT, "flips": tuple(flips), "message": counted[flips[0]]}
        )
    return outcome.model_copy(update={"message": f"would be caught by {bug.cases}: {bug.needs}"})


def _nothing(bug: Bug, before: Rows, after: Rows) -> Outcome:
    """Of a bug of which one release compared nothing: the most frequent reason."""
    skipped = (before if not before.compared else after).skipped
    if not skipped:
        return Outcome(bug=bug.id, found=Found.NOT_HERE, reason=Why.NO_DEFINITION, message="no case was planned")
    (reason, message), _ = Counter(skipped).most_common(1)[0]
    return Outcome(bug=bug.id, found=Found.NOT_HERE, reason=reason, message=message)


def _case(key: str) -> str:
    """The case and implementation of a row's key."""
    return key.rpartition(" ")[0]


RELEASES = "releases"  # folder of unpacked releases below that of the replays


class NoReleaseError(TraceproofError):
    """A release can not be had here."""


@dataclass(frozen=True)
class Releases:
    """Where releases come from, and where they are unpacked."""

    folder: Path  # of the unpacked releases, each in `<package>-<version>`; sources of others, never committed
    # a folder of wheels to take instead of the index; None: the index that pip is set up for
    wheels: Path | None = None

    def pair(self, bug: Bug, installed: str | None) -> tuple[str, str | None]:
        """The release with the bug and the one without; None for the latter: the installed one.

        Of a folder of wheels, those nearest the fix: the newest that has the bug, the oldest that has not. Raises
        NoReleaseError: the folder holds no release that has the bug, or none that has not.
        """
        if self.wheels is None:
            return bug.last_bad, bug.first_good
        here = sorted(self._files.get(canonicalize_name(bug.package), {}))
        bad = [version for version in here if bug.oldest_bad <= version <= Version(bug.last_bad)]
        good = [version for version in here if version >= Version(bug.first_good)]
        if not bad:
            raise NoReleaseError(
                f"{self.wheels} holds no {bug.package} from {bug.oldest_bad} to {bug.last_bad}",
                todo=f"pip download --no-deps --dest {self.wheels} {bug.package}=={bug.last_bad}",
            )
        if good:
            return str(bad[-1]), str(good[0])
        if installed is not None and Version(installed) >= Version(bug.first_good):
            return str(bad[-1]), None
        raise NoReleaseError(
            f"{self.wheels} holds no {bug.package} from {bug.first_good} on, nor is one installed",
            todo=f"pip download --no-deps --dest {self.wheels} {bug.package}=={bug.first_good}",
        )

    def bring(self, package: str, version: str) -> Path:
        """The folder of an unpacked release; nothing of it is run. Raises NoReleaseError: it can not be had."""
        target = self.folder / f"{canonicalize_name(package)}-{version}"
        self.folder.mkdir(parents=True, exist_ok=True)
        try:
            with FileLock(self.folder / ".lock"):  # trials side by side take the same release
                if self.wheels is None:
                    bring_package(target, Pin(package=package, version=version))
                elif not target.is_dir():
                    wheel = self._files[canonicalize_name(package)][Version(version)]
                    with tempfile.TemporaryDirectory(prefix=".unpacking-", dir=target.parent) as scratch:
                        unpack(wheel, Path(scratch) / "content")
                        (Path(scratch) / "content").rename(target)
        except TraceproofError as error:
            raise NoReleaseError(f"{package} {version} can not be had: {error}") from error
        return target

    @cached_property
    def _files(self) -> Mapping[str, Mapping[Version, Path]]:
        """Wheels by package and version."""
        found: dict[str, dict[Version, Path]] = {}
        for path in sorted(self.wheels.glob("*.whl")) if self.wheels is not None else ():
            try:
                name, version, _, _ = parse_wheel_filename(path.name)
            except InvalidWheelFilename:
                continue
            found.setdefault(name, {})[version] = path
        return found


REPLAYS = "replays"  # folder below the results
REPORT = "replay.json"
OUTCOMES = "outcomes"  # folder below the replays: what came of each bug, written as it ends
LEAST: Mapping[str, int] = {"sm90": 9, "sm100": 10}  # first figure of the compute capability


@dataclass(frozen=True)
class Replays:
    """Replays of one configuration."""

    root: Path  # the repository of traceproof
    config: Config  # sizes, seed, limits, stacks and the dataset
    out: Path  # folder for unpacked releases, plans, verdicts and what is compiled
    releases: Releases  # where releases come from
    say: Callable[[str], None]  # gets a line per step
    _rows: dict[str, list[VerdictRow]] = field(default_factory=dict)
    _records: dict[str, dict[str, Any]] = field(default_factory=dict)

    def run(self, bugs: Sequence[Bug], *, jobs: int) -> list[Outcome]:
        """Replay bugs, `jobs` op_types at a time; those that share releases and definitions share runs.

        Raises TraceproofError: the configuration can not be used.
        """
        groups: dict[str, list[Bug]] = {}
        for bug in bugs:
            groups.setdefault(self._key(bug), []).append(bug)
        self.out.mkdir(parents=True, exist_ok=True)
        flow = self._flow(None)
        dataset = fetch(flow.config.dataset, root=self.root / flow.config.results / "dataset")
        for stack in {MAIN, *(bug.stack for bug in bugs)}:
            ready(flow.stacks[stack], root=self.root, say=self.say)
        with ThreadPoolExecutor(jobs) as pool:
            done = list(pool.map(lambda group: self._group(group, dataset), groups.values()))
        found = {outcome.bug: outcome for outcomes in done for outcome in outcomes}
        return [found[bug.id] for bug in bugs]

    @staticmethod
    def _key(bug: Bug) -> str:
        chosen = [bug.definitions, bug.axes, bug.dtypes, bug.in_turn, bug.ground_truths, bug.variables]
        return digest_json([bug.stack, bug.op_type, chosen, bug.stressing])

    def _flow(self, dataset: Path | None, bugs: Sequence[Bug] = ()) -> Pipeline:
        """The pipeline on a dataset (None: the configured one), with the cases that show the bugs."""
        sizes = self.config.test_sizes
        changes: dict[str, Any] = {"workloads": False}
        if any(bug.stressing for bug in bugs) and STRESS not in sizes:
            changes["test_sizes"] = (*sizes, STRESS)
        if bugs and all(bug.shown_by for bug in bugs):
            cases = tuple(sorted({case for bug in bugs for case in bug.shown_by}))
            changes["test_sizes"] = ALL_SIZES
            changes["selection"] = self.config.selection.model_copy(update={"case": cases})
        if dataset is not None:
            changes["dataset"] = Dataset(path=dataset)
        return Pipeline(self.config.model_copy(update=changes), self.root)

    def _group(self, bugs: Sequence[Bug], dataset: Path) -> list[Outcome]:
        """Bugs of one stack, op_type and choice of definitions, one after the other."""
        outcomes = []
        trial: GroundTruthTrial | None = None
        for bug in bugs:
            started = time.monotonic()
            try:
                trial = trial or self._trial(bugs, dataset)
                outcome = self._one(bug, trial)
            except _NotHereError as error:
                outcome = Outcome(bug=bug.id, found=Found.NOT_HERE, reason=error.why, message=str(error))
            outcome = outcome.model_copy(update={"seconds": round(time.monotonic() - started, 1)})
            write_json(self.out / OUTCOMES / f"{bug.id}.json", outcome.model_dump(mode="json"))
            self.say(f"{bug.id}: {outcome.found}{f' ({outcome.reason})' if outcome.reason else ''}")
            outcomes.append(outcome)
        return outcomes

    def _one(self, bug: Bug, trial: GroundTruthTrial) -> Outcome:
        lacking = _lacking(bug, self._record(trial)["capability"])
        if lacking is not None:
            raise _NotHereError(lacking, f"the bug shows on {bug.hardware} alone")
        try:
            bad, good = self.releases.pair(bug, self._installed(trial))
            rows = [self._of(trial, bug.package, version) for version in (bad, good)]
        except NoReleaseError as error:
            raise _NotHereError(Why.NO_RELEASE, str(error)) from error
        without = good or str(self._installed(trial))
        both, one = beside(bug, bad) & beside(bug, without), beside(bug, bad) - beside(bug, without)
        told = {"bad": bad, "good": without, "remaining": tuple(sorted(both)), "shared": tuple(sorted(one))}
        return judged(bug, *rows).model_copy(update=told)

    def _trial(self, bugs: Sequence[Bug], dataset: Path) -> GroundTruthTrial:
        """The plan of the definitions of bugs that have them in common, with their own const axes and dtypes."""
        bug = bugs[0]
        folder = dataset / "definitions" / bug.op_type
        patterns = bug.definitions or ("*",)
        files = [
            path for path in sorted(folder.glob("*.json")) if any(fnmatch(path.stem, one) for one in patterns)
        ]
        if not files:
            raise _NotHereError(Why.NO_DEFINITION, f"{dataset} has no definition of {bug.op_type} that is meant")
        work = self.out / "trials" / f"{bug.op_type}-{self._key(bug)[:12]}"
        chosen = work / "dataset" / "definitions" / bug.op_type
        shutil.rmtree(work / "dataset", ignore_errors=True)
        chosen.mkdir(parents=True)
        for definition in (json.loads(path.read_text(encoding="utf-8")) for path in files):
            for name, form in _forms(definition, bug).items():
                write_json(chosen / f"{name}.json", form)
        return GroundTruthTrial(
            flow=self._flow(work / "dataset", bugs),
            root=self.root,
            definitions=tuple(sorted(path.stem for path in chosen.iterdir())),
            op_type=bug.op_type,
            stack=bug.stack,
            work=work,
            variables=bug.variables,
            truths=bug.ground_truths,
        )

    def _record(self, trial: GroundTruthTrial) -> dict[str, Any]:
        """What the stack's environment is."""
        if trial.stack not in self._records:
            self._records[trial.stack] = probe(trial.flow.stacks[trial.stack], root=self.root)
        return self._records[trial.stack]

    def _installed(self, trial: GroundTruthTrial) -> str | None:
        """The version of the stack's package in its environment."""
        version: str | None = self._record(trial)["versions"].get(STACKS[trial.stack].distribution)
        return version

    def _of(self, trial: GroundTruthTrial, package: str, version: str | None) -> list[VerdictRow]:
        """The verdict rows of a release; None is the installed one. A release of one trial is run once."""
        name, linked = "installed" if version is None else f"{package}-{version}", None
        if version is not None:
            linked = importable(self.releases.bring(package, version), trial.stack, trial.work / "linked" / name)
        key = digest_json([str(trial.work), name])
        if key not in self._rows:
            try:
                self._rows[key] = trial.rows(linked, name)
            except TraceproofError as error:
                raise _NotHereError(Why.NOT_RUN, f"{name}: {error}") from error
        return self._rows[key]


class _NotHereError(Exception):
    """A bug can not be replayed here."""

    def __init__(self, why: Why | Skip, message: str) -> None:
        super().__init__(message)
        self.why = why


def _lacking(bug: Bug, capability: str | None) -> Skip | None:
    """What a machine of this compute capability (None: no GPU) lacks to show a bug."""
    least = LEAST.get(bug.hardware)
    if bug.hardware == "cpu":
        return None
    if capability is None:
        return Skip.NO_CUDA
    return Skip.NEEDS_SM if least is not None and int(capability.partition(".")[0]) < least else None


def _forms(definition: dict[str, Any], bug: Bug) -> dict[str, dict[str, Any]]:
    """A definition with the bug's const axes and dtypes, by name; where asked, one without the dtypes before it.

    Raises _NotHereError: it has no such axis or tensor.
    """
    axes = {name: dict(axis) for name, axis in definition["axes"].items()}
    for name, size in bug.axes.items():
        if axes.get(name, {}).get("type") != "const":
            raise _NotHereError(Why.NO_DEFINITION, f"{definition['name']} has no const axis {name}")
        axes[name]["value"] = size
    tensors = {part: dict(definition[part]) for part in ("inputs", "outputs")}
    for name, dtype in bug.dtypes.items():
        found = next((part for part in tensors.values() if name in part), None)
        if found is None:
            raise _NotHereError(Why.NO_DEFINITION, f"{definition['name']} has no tensor {name}")
        found[name] = {**found[name], "dtype": dtype}
    sized = {**definition, "axes": axes}
    if not bug.in_turn:
        return {definition["name"]: {**sized, **tensors}}
    later = f"{definition['name']}_later"  # definitions run in the order of their names
    return {definition["name"]: sized, later: {**sized, **tensors, "name": later}}


def counts(outcomes: Iterable[Outcome]) -> dict[str, int]:
    """How many bugs were caught, missed, or are not reproducible here."""
    found = [outcome.found for outcome in outcomes]
    return {one.value: found.count(one) for one in Found}


MESSAGE = 90  # characters of a message shown


def listed(bugs: Sequence[Bug]) -> Table:
    """The catalogue."""
    names = ("bug", "kind", "op_type", "package", "last bad", "first good", "hardware", "cases")
    grid = headed("Known bugs of released packages", names)
    for bug in bugs:
        versions = (bug.package, bug.last_bad, bug.first_good)
        grid.add_row(bug.id, bug.kind, bug.op_type, *versions, bug.hardware, bug.cases)
    return grid


def replayed(bugs: Sequence[Bug], outcomes: Sequence[Outcome]) -> Table:
    """What came of each bug."""
    grid = headed(
        "Replays (one row per bug)", ("bug", "kind", "with", "without", "found"), ("flips", "alarms", "s"), "why"
    )
    for bug, outcome in zip(bugs, outcomes, strict=True):
        text = f"{outcome.reason}: {outcome.message}" if outcome.reason else outcome.message
        figures = (str(len(outcome.flips)), str(len(outcome.alarms)), f"{outcome.seconds:.0f}")
        shown = escape(" ".join(text.split())[:MESSAGE])
        grid.add_row(bug.id, bug.kind, outcome.bad or "", outcome.good or "", outcome.found, *figures, shown)
    return grid


def summed(outcomes: Sequence[Outcome]) -> str:
    """The counts in a sentence."""
    found = counts(outcomes)
    caught, missed = found[Found.CAUGHT], found[Found.MISSED]
    alarms = sum(outcome.unexplained for outcome in outcomes)
    share = f" ({100 * caught / (caught + missed):.0f} % of those run)" if caught + missed else ""
    return (
        f"{caught} caught{share}, {missed} missed, {found[Found.NOT_HERE]} not reproducible here; "
        f"releases without the bug that fail for no known reason: {alarms}"
    )


PARSER = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
PARSER.add_argument("--bug", nargs="+", action="extend", default=[], help="replay these; all if not given")
PARSER.add_argument("--list", action="store_true", help="list the bugs and replay none")
PARSER.add_argument("--out", type=Path, help="folder for releases, verdicts and json")
PARSER.add_argument("--packages", type=Path, help="a folder of wheels; those nearest the fix are taken")
PARSER.add_argument("--dataset", type=Path, help="a dataset's folder instead of the configured one")
PARSER.add_argument("--test-sizes", nargs="+", help="small medium large")
PARSER.add_argument("--jobs", type=int, default=max(1, (os.cpu_count() or 1) // 4), help="op_types at a time")
PARSER.add_argument("--json", type=Path, help="write the result as JSON; - is stdout")


def main(arguments: list[str] | None = None) -> int:
    """Replay, and print the table."""
    options = PARSER.parse_args(arguments)
    out = Console(file=run.text_stream(options.json))
    try:
        bugs = chosen(options.bug)
        if options.list:
            run.write_result(options.json, {"bugs": [one.model_dump(mode="json") for one in bugs]})
            out.print(listed(bugs))
            return run.FINE
        root, config = run.configured(dataset=run.dataset_in(options.dataset), test_sizes=options.test_sizes)
        folder = (options.out or root / config.results / REPLAYS).absolute()
        wheels = options.packages and options.packages.expanduser().absolute()
        replays = Replays(root, config, folder, Releases(folder / RELEASES, wheels), run.say)
        outcomes = replays.run(bugs, jobs=options.jobs)
        result = {"counts": counts(outcomes), "outcomes": [one.model_dump(mode="json") for one in outcomes]}
        write_json(folder / REPORT, result)
        run.write_result(options.json, result)
    except TraceproofError as error:
        sys.stderr.write(f"{error}\n")
        return BAD_USE
    out.print(replayed(bugs, outcomes))
    out.print(summed(outcomes), markup=False, highlight=False, soft_wrap=True)
    return run.FINDINGS if any(one.finding for one in outcomes) else run.FINE


if __name__ == "__main__":
    sys.exit(main())
