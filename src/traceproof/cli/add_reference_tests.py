"""`traceproof add-reference-tests`: writes pytest tests of a dataset's references into the dataset."""

import contextlib
import importlib.util
import inspect
import json
import math
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from traceproof.checkouts.pins import DATASET
from traceproof.cli import options, run
from traceproof.dataset.fetch import FETCHED
from traceproof.dataset.tree import is_dataset
from traceproof.environments.building import built, resolve
from traceproof.errors import TraceproofError
from traceproof.lint.flashinfer_names import Package
from traceproof.run.flow import Pipeline
from traceproof.run.known import read_known
from traceproof.stacks import MAIN, PACKAGES, STACKS
from traceproof.testgen.generate import GENERATED, PLACE, Divergences, Generated, GenerateOptions, generate

SIZES = ("small", "medium", "large")


def add_reference_tests(  # noqa: PLR0913 - the specification's options
    *,
    definition_name: options.DefinitionNames = None,
    op_type: options.OpTypes = None,
    everything: options.Everything = False,
    definitions_dir: Annotated[
        Path | None,
        typer.Option(
            help="A dataset's definitions/: all, if none are named; else the clone of --repos-config, or the "
            "configured dataset."
        ),
    ] = None,
    output_dir: options.OutputDir = None,
    repos_config: Annotated[
        Path | None,
        typer.Option(help="A repos_config.json of clone-repos: where FlashInfer, SGLang and the dataset are."),
    ] = None,
    test_sizes: Annotated[
        list[str] | None, typer.Option("--test-sizes", help=f"Sizes: {' '.join(SIZES)}; small medium if left out.")
    ] = None,
    tolerance: options.Tolerance = None,
    force: options.Force = False,
    json_file: options.JsonFile = None,
    **checkouts: Path | None,
) -> None:
    """Write one test file per definition, and the conftest that they share.

    A fetched dataset is not changed: its tests go to `generated` in the folder of results, where `traceproof
    publish` finds them.

    Exit codes: 0 written, 1 some definitions got no test, 2 bad use or input and nothing written.
    """
    if everything and (op_type or definition_name):
        raise TraceproofError(options.ALL_AND_SOME)
    if unknown := sorted(set(test_sizes or ()) - set(SIZES)):
        raise TraceproofError(f"--test-sizes {' '.join(unknown)}: expected out of {', '.join(SIZES)}")
    if tolerance is not None and not 0 <= tolerance < math.inf:
        raise TraceproofError(f"--tolerance {tolerance}: expected a finite number from 0")
    clones = _paths(repos_config)
    paths = clones | run.without_none(**{name: checkouts.get(f"{name}_path") for name in PACKAGES})
    clone = clones.get(DATASET)
    # a fetched dataset is not changed
    if clone is not None and is_dataset(clone) and (output_dir or not (clone / FETCHED).exists()):
        definitions_dir = definitions_dir or clone
    root, out = _places(definitions_dir, output_dir)
    order = GenerateOptions(
        root=root,
        out=out,
        op_types=tuple(op_type or ()),
        definitions=tuple(definition_name or ()),
        everything=everything or (definitions_dir is not None and not (op_type or definition_name)),
        sizes=tuple(size for size in SIZES if size in test_sizes) if test_sizes else None,
        tolerance=tolerance,
        checkouts={name: _checkout(paths[name], name) for name in PACKAGES if name in paths},
        force=force,
        python=None if importlib.util.find_spec("torch") else str(run.stack_interpreter(MAIN)),
    )
    result = generate(order, _divergences())
    run.end(json_file, result.as_json(), _as_text(result, order), bad=bool(result.problems))


def _places(definitions: Path | None, output: Path | None) -> tuple[Path, Path]:
    """(the dataset's folder, the folder that is to contain tests/references)."""
    out = output.expanduser().resolve() if output is not None else None
    if out is not None and out.parts[-2:] == PLACE.parts:
        out = out.parents[1]
    if definitions is not None:
        place = definitions.expanduser().resolve()
        root = place.parent if place.name == "definitions" else place
        return root, out or root
    if out is not None and (out / "definitions").is_dir():
        return out, out
    repository, config = run.configured()
    root = repository / Pipeline(config, repository).dataset
    tests = root if config.dataset.path is not None else repository / config.results / config.run / GENERATED
    return root, out or tests


def _paths(config: Path | None) -> dict[str, Path]:
    """Folders by repository, from a file of clone-repos. Raises TraceproofError: the file can not be used."""
    if config is None:
        return {}
    try:
        records: dict[str, dict[str, Any]] = json.loads(config.read_text(encoding="utf-8"))["repositories"]
        return {name: Path(record["path"]) for name, record in records.items() if record.get("path")}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        todo = "Give the repos_config.json that `traceproof clone-repos` wrote."
        raise TraceproofError(f"--repos-config {config} cannot be used: {error}", todo=todo) from error


def _checkout(path: Path, stack: str) -> str:
    """The folder to import a package from, before installed ones. Raises TraceproofError: it lacks the package."""
    folder = path.expanduser().resolve()
    package, origin = PACKAGES[stack], STACKS[stack].origin
    inner = folder / (origin.place if origin else "")
    Package(inner if (inner / package).is_dir() else folder, package)
    return str(folder)


def _with_checkouts(command: Callable[..., None]) -> None:
    """Give a command an option `--<stack>-path` for every stack that can use a checkout."""
    signature = inspect.signature(command, eval_str=True)
    parameters = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
    for name in PACKAGES:
        kind = Annotated[
            Path | None, typer.Option(help=f"A checkout of {STACKS[name].label} for the tests to use.")
        ]
        only = inspect.Parameter.KEYWORD_ONLY
        parameters.append(inspect.Parameter(f"{name}_path", only, default=None, annotation=kind))
    command.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined] # which typer reads
    command.__annotations__ = {p.name: p.annotation for p in parameters}


_with_checkouts(add_reference_tests)


def _divergences() -> Divergences:
    """Known divergences of references in this repository; none if the package was installed without one."""
    try:
        repository, config = run.configured()
    except TraceproofError:
        return Divergences()
    known = repository / config.known if config.known is not None else None
    findings = read_known(known).findings if known is not None and known.is_file() else []
    return Divergences(verdicts=repository / config.results / config.run / "verdicts", known=findings)


def _python() -> str:
    """The interpreter with torch and pytest of config.yaml; if it is not built yet, text that stands for it."""
    with contextlib.suppress(TraceproofError):  # installed without a repository
        root, config = run.configured()
        stack = resolve(config, MAIN)
        if stack.environment is None or built(stack.environment, root=root):
            return shlex.quote(str(root / stack.python))
    return "PYTHON (one with torch and pytest; `traceproof verify` builds it)"


def _as_text(result: Generated, order: GenerateOptions) -> str:
    """The result as text: a table by op_type, how to run the tests, and what was flagged or got none."""
    lines = [f"{'op_type':14} {'definitions':>11} {'with tests before':>18} {'after':>6}"]
    rows = [(name, count, result.before[name], result.after[name]) for name, count in sorted(result.total.items())]
    rows.append(("all", result.total.total(), result.before.total(), result.after.total()))
    lines += [f"{name:14} {count:11} {before:18} {after:6}" for name, count, before, after in rows]
    counts = {how: list(result.status.values()).count(how) for how in ("written", "kept", "elsewhere")}
    lines.append(
        f"{counts['written']} written, {counts['kept']} were there (--force writes them again), "
        f"{counts['elsewhere']} have one of somebody else's; {len(result.files)} files changed below {order.place}"
    )
    elsewhere = "" if order.place == order.root / PLACE else f" --dataset {shlex.quote(str(order.root))}"
    lines.append(f"run them: {_python()} -m pytest {shlex.quote(str(order.place))}{elsewhere}")
    lines += [f"flagged: {name}: {'; '.join(divergences)}" for name, divergences in result.flagged.items()]
    lines += [f"no test: {problem}" for problem in result.problems]
    return "\n".join(lines) + "\n"
