"""`traceproof judge`: whether a kernel computes what a definition says, with a certificate."""

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from traceproof.cli import options, run
from traceproof.config import Solutions
from traceproof.errors import TraceproofError
from traceproof.programs import telling
from traceproof.solutions.judging import JUDGED, Session, new_hidden_seed
from traceproof.solutions.reading import read
from traceproof.solutions.records import Certificate
from traceproof.solutions.render import table

Solution = Annotated[
    str, typer.Argument(metavar="FILE_OR_FOLDER", help="A solution: .json, .py, .cu, FILE::FUNCTION, or a folder.")
]
DefinitionOf = Annotated[
    str | None, typer.Option(help="Name of the definition in the dataset, or its file; a JSON solution names it.")
]
StackName = Annotated[
    str | None, typer.Option(help="Environment to run in; that of the package it imports, else torch.")
]
Timed = Annotated[bool, typer.Option("--time", help="Time what passes, in turns with the ground truth's kernel.")]
Whole = Annotated[bool, typer.Option("--all", help="Go on after a wrong answer: all cases, and its precision.")]
Demand = Annotated[list[str] | None, typer.Option(help="A property without which it is refused, beside others.")]


def judge_command(  # noqa: PLR0913 - one parameter per option
    path: Solution,
    *,
    definition: DefinitionOf = None,
    dataset: options.Dataset = None,
    test_sizes: options.Sizes = None,
    tolerance: options.Tolerance = None,
    seed: options.Seed = None,
    hidden_seed: options.HiddenSeed = None,
    stack: StackName = None,
    allow_weak_isolation: options.WeakIsolation = False,
    timed: Timed = False,
    whole: Whole = False,
    demand: Demand = None,
    out: options.Out = None,
    json_file: options.JsonFile = None,
) -> None:
    """Judge a kernel by the float64 oracle of its definition, on cases that it can not know; writes a certificate.

    Exit codes: 0 accepted, 1 refused, 2 bad use or input, or it needs a GPU and there is none.
    """
    given, weak = run.given(tolerance=tolerance, seed=seed), allow_weak_isolation or None
    root, config = run.configured(
        dataset=run.dataset_in(dataset), test_sizes=test_sizes, allow_weak_isolation=weak, **given
    )
    if demand:
        demanded = Solutions(demanded=(*dict.fromkeys((*config.solutions.demanded, *demand)),))
        config = config.model_copy(update={"solutions": demanded})
    session = Session(
        root=root,
        config=config,
        out=out or root / config.results / JUDGED,
        say=run.say,
        hidden_seed=hidden_seed or new_hidden_seed(),
        definition=definition,
        dataset=dataset,
        stack=stack,
        timed=timed,
        whole=whole,
    )
    given = run.given(definition=definition, dataset=dataset, **given)
    repeats = [word for name, value in given.items() for word in (f"--{name}", str(value))]
    repeats += ["--test-sizes", *test_sizes] if test_sizes else []
    repeats += [word for name in demand or () for word in ("--demand", name)]
    certificates = _judged(session, path, repeats, json_file)
    run.write_result(json_file, {"certificates": [one.model_dump(mode="json") for one in certificates]})
    raise typer.Exit(run.FINE if all(one.accepted for one in certificates) else run.FINDINGS)


def _judged(session: Session, path: str, given: Sequence[str], json_file: Path | None) -> list[Certificate]:
    """Certificates of the solutions at a path, told one by one; `given` are the options that repeat one."""
    repeats = [*given, *(["--time"] if session.timed else []), *(["--all"] if session.whole else [])]
    where, _, entry = path.partition("::")
    candidates = read(Path(where).expanduser(), entry or None)
    certificates: list[Certificate] = []
    for candidate in candidates:
        named = path if len(candidates) == 1 else candidate.path
        try:
            with telling(f"judging {candidate.name}"):
                certificate = session.judge(candidate, shlex.join(["traceproof", "judge", named, *repeats]))
        except TraceproofError as error:
            if len(candidates) == 1:
                raise
            run.say(f"not judged: {error}")  # the others are
            continue
        certificates.append(certificate)
        place = session.place(certificate).with_suffix(".html")
        run.told(json_file).write(f"{table(certificate)}certificate: {place} and .json\n")
    return certificates
