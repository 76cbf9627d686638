"""`traceproof judge`: decides whether a kernel computes what a definition says, and writes a certificate."""

import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from types import ModuleType
from typing import Annotated

import typer

from traceproof.cli import options, run
from traceproof.config import Config, Solutions
from traceproof.dataset.fetch import fetch
from traceproof.environments.building import has_driver, ready, resolve
from traceproof.errors import TraceproofError
from traceproof.files import write_text
from traceproof.judge.kernel_properties import PROPERTIES
from traceproof.names import path_part
from traceproof.programs import telling
from traceproof.sandbox import GIB
from traceproof.solutions.judging import Judge, blocked, new_hidden_seed, target_of
from traceproof.solutions.reading import Candidate, read
from traceproof.solutions.records import Certificate, JudgeSettings
from traceproof.solutions.render import as_json, page, table, trace_lines
from traceproof.solutions.suites import ATEN
from traceproof.stacks import MAIN, PACKAGES, STACKS

TRACES = ".traces.jsonl"  # suffix of the file beside a certificate with times
PROBLEM = ".py"  # suffix of the file of one of KernelBench's problems
JUDGED = "judged"  # folder below the results
SILENT_SECONDS = 3.0  # time after which progress is reported again
PART = r"[A-Za-z0-9_][A-Za-z0-9_.-]*"

Timed = Annotated[bool, typer.Option("--time", help="Time what passes, in turns with the ground truth's kernel.")]
Whole = Annotated[bool, typer.Option("--all", help="Go on after a wrong answer: all cases, and its precision.")]
Demand = Annotated[list[str] | None, typer.Option(help="Refuse it without this property, too, e.g. errors.")]
Sign = Annotated[
    Path | None, typer.Option(metavar="KEY.pem", help="Sign certificates: an Ed25519 key (beside it, .json.sig).")
]
Key = Annotated[Path | None, typer.Option(metavar="KEY.pub", help="The public key that must have signed it.")]


def judge_command(  # noqa: PLR0913 - one parameter per option
    path: Annotated[
        str,
        typer.Argument(metavar="FILE_OR_FOLDER", help="A .json, .py, .cu, FILE::FUNCTION, or a folder of these."),
    ],
    *,
    definition: Annotated[
        str | None,
        typer.Option(
            help="Name of the definition in the dataset, or its file; a problem of KernelBench's (.py); "
            "aten::relu, an operator of PyTorch. A JSON solution, or a file in BackendBench's folders, names it."
        ),
    ] = None,
    dataset: options.Dataset = None,
    test_sizes: options.Sizes = None,
    tolerance: options.Tolerance = None,
    seed: options.Seed = None,
    hidden_seed: options.HiddenSeed = None,
    stack: Annotated[
        str | None, typer.Option(help="Environment to run in; that of the package it imports, else torch.")
    ] = None,
    allow_weak_isolation: options.WeakIsolation = False,
    timed: Timed = False,
    whole: Whole = False,
    demand: Demand = None,
    sign: Sign = None,
    out: options.Out = None,
    json_file: options.JsonFile = None,
) -> None:
    """Judge a kernel by the float64 oracle of its definition, on cases that it can not know; write a certificate.

    Exit codes: 0 accepted, 1 refused, 2 bad use or input, or a solution was not judged, as without a GPU.
    """
    chosen = run.without_none(tolerance=tolerance, seed=seed)
    replaced = {"dataset": run.dataset_in(dataset), "allow_weak_isolation": allow_weak_isolation or None}
    root, config = run.configured(test_sizes=test_sizes, **replaced, **chosen)
    if unknown := [name for name in demand or () if name not in PROPERTIES]:
        raise TraceproofError(f"--demand {', '.join(unknown)}: properties are {', '.join(PROPERTIES)}")
    if demand:
        demanded = Solutions(demanded=(*dict.fromkeys((*config.solutions.demanded, *demand)),))
        config = config.model_copy(update={"solutions": demanded})
    doing = Doing()
    session = Session(
        root=root,
        config=config,
        out=out or root / config.results / JUDGED,
        say=run.say,
        judge=Judge(doing.now),
        hidden_seed=hidden_seed or new_hidden_seed(),
        definition=definition,
        dataset=dataset,
        stack=stack,
        timed=timed,
        whole=whole,
        sign=None if sign is None else partial(_signatures().sign, key=_signatures().private_key(sign)),
    )
    chosen = run.without_none(definition=definition, dataset=dataset, stack=stack, **chosen)
    repeats = [word for name, value in chosen.items() for word in (f"--{name}", str(value))]
    repeats += ["--test-sizes", *test_sizes] if test_sizes else []
    repeats += ["--allow-weak-isolation"] if allow_weak_isolation else []
    repeats += [word for name in demand or () for word in ("--demand", name)]
    with session.judge:
        certificates, not_judged = _judged(session, path, repeats, json_file, doing)
    judged = [certificate.model_dump(mode="json") for certificate in certificates]
    value = {"certificates": judged, "not_judged": not_judged}
    run.end(json_file, value, bad=not all(certificate.accepted for certificate in certificates))
    if not_judged:
        raise typer.Exit(run.UNFINISHED)


def check_certificate(
    certificate: Annotated[Path, typer.Argument(help="A certificate's JSON file, with its .sig beside it.")],
    *,
    key: Key = None,
) -> None:
    """Check that a certificate is unchanged since it was signed, by the given key or the one in the signature.

    Exit codes: 0 unchanged, 2 changed, signed by another key, or not signed.
    """
    fingerprint = _signatures().check(certificate, key)
    run.say(f"{certificate} is as it was signed, by the key sha256:{fingerprint}")


def _signatures() -> ModuleType:
    """The module that signs and checks. Raises TraceproofError: its package is not installed."""
    try:
        from traceproof.solutions import signature
    except ImportError:
        what = "signatures need the package cryptography"
        raise TraceproofError(what, todo="pip install 'traceproof[sign]'") from None
    return signature


@dataclass(frozen=True, kw_only=True, eq=False)
class Session:
    """Settings and state for judging solutions."""

    root: Path  # the repository
    config: Config  # sizes, seed, limits, stacks, demanded properties
    out: Path  # folder for certificates
    say: Callable[[str], None]  # reports progress
    judge: Judge = field(default_factory=Judge)  # judges one solution after the other
    hidden_seed: int = field(default_factory=new_hidden_seed)  # seed of hidden cases
    definition: str | None = None  # a definition's name or file; None: the one that a solution names
    # folder with definitions; None: the configured one, fetched if absent
    dataset: Path | None = None
    # whose environment runs all solutions; None: the stack of the package that a solution imports
    stack: str | None = None
    timed: bool = False  # whether to measure the speed of accepted solutions
    whole: bool = False  # whether to continue after a wrong answer
    sign: Callable[[Path], object] | None = None  # signs a certificate's file

    def judged(self, candidate: Candidate, repeat: str) -> Certificate:
        """Judge one solution and write its certificate. Raises TraceproofError: it can not be judged here."""
        name = self.definition or candidate.definition
        if not name:
            todo = "Give --definition NAME, as it stands in the dataset, or --definition FILE.json."
            raise TraceproofError(f"{candidate.path} does not say which definition it implements", todo=todo)
        why = blocked(candidate, gpu=has_driver())
        if why is not None:  # refused before an environment is built
            raise TraceproofError(why)
        # The stack whose package a solution imports; else one with a CUDA compiler if it needs that; else the main
        # one.
        stacks = [name for name, package in PACKAGES.items() if package in candidate.imported]
        compilers = [name for name, stack in STACKS.items() if stack.toolkit and candidate.is_compiled]
        settings = self._settings(self.stack or [*stacks, *compilers, MAIN][0])
        folder = None
        if not name.endswith((".json", PROBLEM)) and not name.startswith(ATEN):
            folder = self.dataset or fetch(self.config.dataset, root=self.root / self.config.results / "dataset")
        with self.judge.problem(name, settings) if name.endswith(PROBLEM) else target_of(name, folder) as target:
            self.say(f"judging {candidate.name} for {target.definition.name}")
            certificate = self.judge.judged(candidate, target, settings, repeat=repeat)
        for suffix, text in ((".json", as_json(certificate)), (".html", page(certificate))):
            write_text(self.place(certificate).with_suffix(suffix), text)
        if self.sign is not None:
            self.sign(self.place(certificate).with_suffix(".json"))
        if certificate.accepted and certificate.speed:
            write_text(self.place(certificate).with_suffix(TRACES), "".join(trace_lines(certificate)))
        return certificate

    def place(self, certificate: Certificate) -> Path:
        """The path of a certificate, `<solution>-<definition>.json`; other files have the same stem."""
        name = f"{path_part(certificate.solution, PART)}-{path_part(certificate.definition, PART)}"
        return self.out / f"{name}.json"

    @cache  # noqa: B019 - a session lives as long as its command
    def _settings(self, stack: str) -> JudgeSettings:
        """Settings for judging with a stack's interpreter, which is built first if it is absent."""
        if stack not in STACKS:
            raise TraceproofError(f"--stack {stack}: there is no such stack; known: {', '.join(STACKS)}")
        installation = resolve(self.config, stack)
        python = str(ready(installation, root=self.root, say=self.say))
        results, limits = self.root / self.config.results, self.config.limits
        return JudgeSettings(
            python=python,
            cuda_home=installation.cuda_home,
            gpu=has_driver(),
            caches=str(results / "compiled"),
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
        )


class Doing:
    """Text on what is being done; printed line by line if stderr is no terminal."""

    text = ""

    def now(self, text: str) -> None:
        """Set what is being done."""
        self.text = f"{self.text.partition(': ')[0]}: {text}"
        if not sys.stderr.isatty():
            run.say(self.text)

    def __str__(self) -> str:
        return self.text


def _judged(
    session: Session, path: str, options: Sequence[str], json_file: Path | None, doing: Doing
) -> tuple[list[Certificate], list[str]]:
    """Judge the solutions at a path, and print each verdict; `options` go into the command that repeats one.

    Returns the certificates, and why other solutions of a folder could not be judged.
    """
    repeats = [*options, *(["--time"] if session.timed else []), *(["--all"] if session.whole else [])]
    repeats += ["--hidden-seed", str(session.hidden_seed)]
    where, _, entry = path.partition("::")
    candidates = read(Path(where).expanduser(), entry or None)
    certificates: list[Certificate] = []
    not_judged: list[str] = []
    for candidate in candidates:
        named = path if len(candidates) == 1 else candidate.path
        try:
            doing.text = f"judging {candidate.name}"
            run.say(doing.text)
            with telling(doing, most=SILENT_SECONDS):
                certificate = session.judged(candidate, shlex.join(["traceproof", "judge", named, *repeats]))
        except TraceproofError as error:
            if len(candidates) == 1:
                raise
            run.say(f"not judged: {error}")  # others are still judged
            not_judged.append(f"{candidate.path}: {error}")
            continue
        certificates.append(certificate)
        place = session.place(certificate).with_suffix(".html")
        run.text_stream(json_file).write(f"{table(certificate)}certificate: {place} and .json\n")
    return certificates, not_judged
