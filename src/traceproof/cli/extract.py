"""`traceproof extract-kernel-definitions`: the definitions that a model needs, read off SGLang."""

import sys
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from traceproof.cli import options, run
from traceproof.cli.interpreter import say, stack_interpreter
from traceproof.errors import TraceproofError
from traceproof.extract.config_json import requested
from traceproof.extract.pipeline import (
    PAGE_SIZES,
    AskedModel,
    Choices,
    ExtractionResult,
    ExtractionSettings,
    extract,
    model_of,
    publish,
)
from traceproof.extract.reading import Listing, ReaderEnvironment
from traceproof.extract.reports import as_json, not_described
from traceproof.models import catalogue
from traceproof.stacks import MAIN, READER

REPORTS = Path("results/extract")
OUTPUT = Path("results/extracted")  # not the pipeline's own results/extract/dataset, which it writes anew


Models = Annotated[list[str] | None, typer.Option(help="Bundled models, or a name for --config.")]
ConfigFile = Annotated[Path | None, typer.Option(help="A model's config.json.")]
Hub = Annotated[str | None, typer.Option(help="Fetch config.json from this HuggingFace repository.")]
TensorRanks = Annotated[
    list[str] | None,
    typer.Option(help="Tensor parallel ranks, or all that fit; the model's usual ones if left out."),
]
ExpertRanks = Annotated[list[str] | None, typer.Option(help="Expert parallel ranks, or all; must divide tp.")]
Groups = Annotated[int, typer.Option(help="Groups of ranks, each with attention of its own.")]
PageSizes = Annotated[list[int] | None, typer.Option(help="Of paged attention; 1 and 64 if left out.")]
Shapes = Annotated[
    Literal["full", "rank"], typer.Option(help="The model's whole projections, or one rank's share.")
]
Templates = Annotated[
    Path | None,
    typer.Option(help="A FlashInfer wheel or folder: its trace templates are held against the definitions."),
]
Held = Annotated[Path | None, typer.Option(help="Compare with this dataset; the output folder if left out.")]
Output = Annotated[Path, typer.Option(help="Root of the dataset folder to write to.")]
Reports = Annotated[Path, typer.Option(help="Where sharing.md and report.json go.")]
TorchPython = Annotated[
    Path | None, typer.Option(help="Interpreter of the torch stack; config.yaml's if left out.")
]
Single = Annotated[
    bool, typer.Option("--single-reading", help="Do not hold SGLang's reading against transformers' model.")
]
Strict = Annotated[
    bool, typer.Option("--strict", help="Write nothing where the two readings differ on some kernel call.")
]
Listed = Annotated[
    bool, typer.Option("--list", help="Name the bundled models and the architectures that SGLang can read.")
]


def extract_kernel_definitions(  # noqa: PLR0913 - one parameter per option
    *,
    model_name: Models = None,
    config: ConfigFile = None,
    hf_repo_id: Hub = None,
    revision: Annotated[str | None, typer.Option(help="Of --hf-repo-id.")] = None,
    tp: TensorRanks = None,
    ep: ExpertRanks = None,
    dp_attention: Groups = 1,
    page_size: PageSizes = None,
    gemm_shapes: Shapes = "full",
    sglang_path: options.Sglang = None,
    flashinfer_path: Templates = None,
    dataset: Held = None,
    output_dir: Output = OUTPUT,
    report_dir: Reports = REPORTS,
    extract_python: options.SglangPython = None,
    torch_python: TorchPython = None,
    single_reading: Single = False,
    strict: Strict = False,
    list_models: Listed = False,
    json_file: options.JsonFile = None,
) -> None:
    """Write the kernel definitions that models need, right by construction.

    Exit codes: 0 written or nothing new, 1 a conflict with the dataset is to be reviewed, 2 bad use or input.
    """
    if list_models:
        _list(ReaderEnvironment(interpreter(READER, extract_python), sglang_path).listing(), json_file)
        return
    models = _models(model_name or [], config, hf_repo_id, revision, tp or [], ep or [], dp_attention)
    pages, per_rank = _page_sizes(page_size or []), gemm_shapes == "rank"
    choices = Choices(page_sizes=pages, per_rank=per_rank, second_reading=not single_reading, strict=strict)
    environment = ReaderEnvironment(interpreter(READER, extract_python), sglang_path)
    python = interpreter(MAIN, torch_python)
    settings = ExtractionSettings(
        environment=environment, torch_python=python, choices=choices, flashinfer=flashinfer_path
    )
    extraction = extract(models, settings, say=say)
    publish(extraction, settings, dataset=dataset or output_dir, out=output_dir, report=report_dir)
    run.write_result(json_file, as_json(extraction))
    raise typer.Exit(run.FINDINGS if _summary(extraction, output_dir) else run.FINE)


def _list(listing: Listing, json_file: Path | None) -> None:
    if json_file is None:
        sys.stdout.write(told_bundled() + told_listing(listing))
    else:
        run.write_result(json_file, listing_json(listing))


def interpreter(stack: str, given: Path | None) -> Path:
    """The interpreter that was given, else the one of a stack by config.yaml, built first where it is absent."""
    return stack_interpreter(stack) if given is None else given.absolute()  # links tell a virtual environment


def _models(  # noqa: PLR0913, PLR0917 - the options that name models
    names: list[str],
    config: Path | None,
    repository: str | None,
    revision: str | None,
    tp: list[str],
    ep: list[str],
    dp: int,
) -> list[AskedModel]:
    if len(names) > 1 and (config is not None or repository is not None):
        raise TraceproofError("several models but one config.json", todo="Give one --model-name with it.")
    models = []
    wanted: list[str | None] = [*names] or [None]
    for name in wanted:
        slug, tags, given, usual = model_of(name, config=config, repository=repository, revision=revision)
        models.append(AskedModel(slug, tags, given, requested(given, tp, ep, usual, dp=dp)))
    return models


def _page_sizes(given: list[int]) -> tuple[int, ...]:
    wrong = [f"page size {size}; allowed: 1 and up" for size in given if size < 1]
    if wrong:
        raise TraceproofError("the page sizes cannot be used", problems=wrong)
    return tuple(dict.fromkeys(given)) or PAGE_SIZES


def told_bundled() -> str:
    """Each bundled model in a line."""
    lines = []
    for entry in catalogue.entries().values():
        usual = ", ".join(f"tp {item.tp} ep {item.ep}" for item in entry.parallel)
        lines.append(f"{entry.slug:22} {entry.title:22} {usual:22} {entry.repository}\n")
    return "".join(lines)


def listing_json(listing: Listing) -> dict[str, Any]:
    """What `--list` says, for machines."""
    kinds = {str(config["architectures"][0]): kind for kind, config in listing.defaults.items()}
    return {
        "bundled": [
            {
                "name": entry.slug,
                "title": entry.title,
                "repository": entry.repository,
                "parallel": [one._asdict() for one in entry.parallel],
            }
            for entry in catalogue.entries().values()
        ],
        "version": listing.version,
        "architectures": [
            {"name": name, "transformers_model_type": kinds.get(name)} for name in listing.architectures
        ],
        "without_defaults": dict(listing.without_defaults),
    }


def told_listing(listing: Listing) -> str:
    """Architectures of SGLang, apart those that have a second reading as language models.

    What became of each of these, by its default config, is in docs/measurements.md.
    """
    second = {str(config["architectures"][0]) for config in listing.defaults.values()}
    both = [name for name in listing.architectures if name in second]
    others = [name for name in listing.architectures if name not in second]
    return (
        f"\n{len(both)} causal language models that transformers has too "
        "(docs/measurements.md tells how many were read):\n"
        f"{', '.join(both)}\n"
        f"\n{len(others)} other classes of SGLang {listing.version}, encoders and drafts among them; most "
        f"of these have no second reading, so that they need --single-reading:\n{', '.join(others)}\n"
        + "".join(f"\nno default config: {kind}: {why}\n" for kind, why in listing.without_defaults.items())
    )


def _summary(extraction: ExtractionResult, root: Path) -> bool:
    """Tell what came of it; gives whether something conflicts."""
    counted: dict[str, int] = {}
    for outcome in extraction.outcomes:
        counted[outcome.status] = counted.get(outcome.status, 0) + 1
        if outcome.status == "conflict":
            say(f"conflict: {outcome.name}: {'; '.join(outcome.differences)}")
    for clash in extraction.clashes:
        say(f"conflict between models: {clash.renamed}: {'; '.join(clash.differences)}")
    for item, finding in extraction.refused:
        say(f"not written: {item.name}: no oracle: {finding.no_oracle}")
    for line in not_described(extraction):
        say(line)
    if extraction.template_readings:
        differ = sum(bool(said.differences) for said in extraction.template_readings)
        say(f"FlashInfer's trace templates differ from {differ} of them: templates.md says how")
    said = ", ".join(f"{count} {status}" for status, count in sorted(counted.items()))
    sys.stdout.write(f"{len(extraction.outcomes)} definitions in {root}: {said}\n")
    return "conflict" in counted or bool(extraction.clashes)
