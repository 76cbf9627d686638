"""`traceproof judge`: whether a kernel computes what a definition says, with a certificate."""

import shlex
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Annotated, Any

import typer

from traceproof.cli import options, run
from traceproof.cli.interpreter import say
from traceproof.config.schema import Config
from traceproof.dataset.fetch import fetch
from traceproof.environments.building import probe, ready, resolve
from traceproof.errors import TraceproofError
from traceproof.solutions.judging import Asked, Bar, asking, blocked, judge, new_hidden_seed
from traceproof.solutions.reading import Candidate, read
from traceproof.solutions.records import Certificate
from traceproof.solutions.render import as_json, page, table
from traceproof.stacks import MAIN, PACKAGES
from traceproof.store import write_text
from traceproof.untrusted.names import path_part

JUDGED = "judged"  # below the results folder
PART = r"[A-Za-z0-9_][A-Za-z0-9_.-]*"


def judge_command(  # noqa: PLR0913 - one parameter an option
    path: Annotated[
        str,
        typer.Argument(metavar="FILE_OR_FOLDER", help="A solution: .json, .py, .cu, FILE::FUNCTION, or a folder."),
    ],
    *,
    definition: Annotated[
        str | None,
        typer.Option(help="Name of the definition in the dataset, or its file; a JSON solution names it."),
    ] = None,
    dataset: options.Dataset = None,
    test_sizes: Annotated[list[str] | None, typer.Option(help="Sizes: small medium large.")] = None,
    tolerance: options.Tolerance = None,
    seed: Annotated[int | None, typer.Option(help="Seed of the public cases.")] = None,
    hidden_seed: Annotated[
        int | None, typer.Option(min=1, help="What hidden cases follow from; drawn if not given.")
    ] = None,
    stack: Annotated[
        str | None, typer.Option(help="Environment to run in; that of the package it imports, else torch.")
    ] = None,
    allow_weak_isolation: Annotated[
        bool, typer.Option("--allow-weak-isolation", help="Run it where it can not be isolated whole.")
    ] = False,
    out: Annotated[Path | None, typer.Option(help="Folder for certificates; results/judged if left out.")] = None,
    json_file: options.JsonFile = None,
) -> None:
    """Judge a kernel by the float64 oracle of its definition, on cases that it can not know; writes a certificate.

    Exit codes: 0 accepted, 1 refused, 2 bad use or input, or it needs a GPU and there is none.
    """
    root = run.repository()
    config = _config(root, dataset, test_sizes, tolerance, seed, weak=allow_weak_isolation)
    where, _, entry = path.partition("::")
    candidates = read(Path(where).expanduser(), entry or None)
    target = out or root / config.results / JUDGED
    drawn = hidden_seed or new_hidden_seed()
    given = _repeated(definition, dataset, test_sizes, tolerance, seed)
    certificates: list[Certificate] = []
    for candidate in candidates:
        bar = _bar(root, config, stack or _stack_of(candidate), drawn, conceal=[target])
        why = blocked(candidate, gpu=bar.gpu)
        if why is not None:
            raise TraceproofError(why)
        with _asked(candidate, definition, dataset, root, config) as asked:
            say(f"judging {candidate.name} for {asked.definition.name}")
            repeat = shlex.join(["traceproof", "judge", path if len(candidates) == 1 else candidate.path, *given])
            certificate = judge(candidate, asked, bar, repeat=repeat)
        certificates.append(certificate)
        _show(certificate, target, quiet=str(json_file) == "-")
    run.write_result(json_file, {"certificates": [one.model_dump(mode="json") for one in certificates]})
    raise typer.Exit(run.FINE if all(one.accepted for one in certificates) else run.FINDINGS)


def _config(  # noqa: PLR0913 - the options that change it
    root: Path,
    dataset: Path | None,
    sizes: list[str] | None,
    tolerance: float | None,
    seed: int | None,
    *,
    weak: bool,
) -> Config:
    changes: dict[str, Any] = {
        "dataset": dataset and {"path": str(dataset.expanduser().resolve()), "pypi": None, "git": None},
        "test_sizes": sizes,
        "tolerance": tolerance,
        "seed": seed,
        "allow_weak_isolation": weak or None,
    }
    return run.config_of(root, {key: value for key, value in changes.items() if value is not None})


def _repeated(
    definition: str | None,
    dataset: Path | None,
    sizes: Sequence[str] | None,
    tolerance: float | None,
    seed: int | None,
) -> list[str]:
    """The options that a repeat needs, as they were given."""
    words: list[str] = []
    for name, value in (
        ("definition", definition),
        ("dataset", dataset),
        ("tolerance", tolerance),
        ("seed", seed),
    ):
        words += [] if value is None else [f"--{name}", str(value)]
    return [*words, *(["--test-sizes", *sizes] if sizes else [])]


def _stack_of(candidate: Candidate) -> str:
    """The stack whose package a solution imports, else the main one."""
    imported = candidate.imported
    return next((name for name, package in PACKAGES.items() if package in imported), MAIN)


def _bar(root: Path, config: Config, stack: str, hidden_seed: int, *, conceal: Sequence[Path]) -> Bar:
    installation = resolve(config, stack)
    python = str(ready(installation, root=root, say=say))
    return Bar(
        python=python,
        record=probe(installation, root=root),
        caches=root / config.results / "compiled",
        config=config,
        hidden_seed=hidden_seed,
        conceal=[root / config.results, *conceal],
    )


def _asked(
    candidate: Candidate, definition: str | None, dataset: Path | None, root: Path, config: Config
) -> AbstractContextManager[Asked]:
    name = definition or candidate.definition
    if not name:
        todo = "Give --definition NAME, as it stands in the dataset, or --definition FILE.json."
        raise TraceproofError(f"{candidate.path} does not say which definition it implements", todo=todo)
    if name.endswith(".json"):
        return asking(name, None)
    return asking(name, dataset or fetch(config.dataset, root=root / config.results / "dataset"))


def _show(certificate: Certificate, target: Path, *, quiet: bool) -> None:
    """Write a certificate's files, and print its tables."""
    name = f"{path_part(certificate.solution, PART)}-{path_part(certificate.definition, PART)}"
    for suffix, text in ((".json", as_json(certificate)), (".html", page(certificate))):
        write_text(target / f"{name}{suffix}", text)
    (sys.stderr if quiet else sys.stdout).write(
        table(certificate) + f"certificate: {target / name}.html and .json\n"
    )
