"""`traceproof extract-kernel-definitions` and `add-new-model`: read a model's kernels off SGLang."""

import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from traceproof.cli import options, run
from traceproof.environments.building import built, resolve
from traceproof.errors import TraceproofError
from traceproof.extract import config_json, hierarchy, pipeline
from traceproof.extract.reading import ReaderEnvironment
from traceproof.models import catalogue
from traceproof.models.drafts import Choice, Draft
from traceproof.models.reading import KernelCall, Reading
from traceproof.programs import telling
from traceproof.stacks import MAIN, READER

REPORTS = Path("results/extract")
OUTPUT = Path("results/extracted")  # not results/extract/dataset, which the pipeline replaces
UNREAD = (
    "\nSGLang can read more: its environment lists them once it is built (minutes, about 2 GB), which the first "
    "extraction does. Or give an interpreter that has SGLang as --extract-python.\n"
)

Models = Annotated[list[str] | None, typer.Option("--model-name", help="Bundled models, or a name for --config.")]
TensorRanks = Annotated[
    list[str] | None,
    typer.Option("--tp", help="Tensor parallel ranks, or all that fit; the model's usual ones if left out."),
]
ExpertRanks = Annotated[
    list[str] | None, typer.Option("--ep", help="Expert parallel ranks, or all; must divide tp.")
]
Held = Annotated[Path | None, typer.Option(help="Compare with this dataset; the output folder if left out.")]


def extract_kernel_definitions(  # noqa: PLR0913 - one parameter per option
    *,
    model_name: Models = None,
    config: options.Config = None,
    hf_repo_id: options.Hub = None,
    revision: options.Revision = None,
    tp: TensorRanks = None,
    ep: ExpertRanks = None,
    dp_attention: Annotated[int, typer.Option(help="Groups of ranks, each with attention of its own.")] = 1,
    page_size: Annotated[
        list[int] | None, typer.Option("--page-size", help="Of paged attention; 1 and 64 if left out.")
    ] = None,
    gemm_shapes: Annotated[
        Literal["full", "rank"], typer.Option(help="The model's whole projections, or one rank's share.")
    ] = "full",
    sglang_path: options.Sglang = None,
    dataset: Held = None,
    output_dir: options.DefinitionsOut = OUTPUT,
    report_dir: options.ReportDir = REPORTS,
    extract_python: options.SglangPython = None,
    torch_python: options.TorchPython = None,
    single_reading: Annotated[
        bool, typer.Option("--single-reading", help="Do not hold SGLang's reading against transformers' model.")
    ] = False,
    list_models: Annotated[
        bool, typer.Option("--list", help="Name the bundled models and the architectures that SGLang can read.")
    ] = False,
    json_file: options.JsonFile = None,
) -> None:
    """Write the kernel definitions that models need, right by construction.

    Exit codes: 0 written or nothing new, 1 a conflict with the dataset is to be reviewed, 2 bad use or input.
    """
    if list_models:
        with telling("asking SGLang"):
            listed = listing(extract_python, sglang_path)
        run.end(json_file, listed, listing_text(listed))
        return
    names: list[str | None] = [*(model_name or [])] or [None]
    if len(names) > 1 and (config is not None or hf_repo_id is not None):
        raise TraceproofError("several models but one config.json", todo="Give one --model-name with it.")
    source: dict[str, Any] = {"config": config, "repository": hf_repo_id, "revision": revision}
    models = [pipeline.model_of(name, **source, tp=tp or [], ep=ep or [], dp=dp_attention) for name in names]
    wrong = [f"page size {size}; allowed: 1 and up" for size in page_size or [] if size < 1]
    if wrong:
        raise TraceproofError("the page sizes cannot be used", problems=wrong)
    choice = Choice(per_rank=gemm_shapes == "rank", second_reading=not single_reading)
    choice = replace(choice, page_sizes=tuple(dict.fromkeys(page_size or choice.page_sizes)))
    settings = pipeline.ExtractionSettings(
        environment=ReaderEnvironment(run.stack_interpreter(READER, extract_python), sglang_path),
        torch_python=run.stack_interpreter(MAIN, torch_python),
        choice=choice,
    )
    with telling("extracting"):
        extraction = pipeline.extract(models, settings, say=run.say)
    target, report = output_dir or OUTPUT, report_dir or REPORTS
    pipeline.publish(extraction, settings, dataset=dataset or target, out=target, report=report)
    counted = Counter(result.status for result in extraction.merged)
    for line in pipeline.to_review(extraction):
        run.say(line)
    counts = ", ".join(f"{count} {status}" for status, count in sorted(counted.items()))
    text = f"{len(extraction.merged)} definitions in {target}: {counts}\n"
    run.end(json_file, pipeline.as_json(extraction), text, bad="conflict" in counted or bool(extraction.clashes))


# For `--list`.


def listing(python: Path | None, sglang_path: Path | None) -> dict[str, Any]:
    """Bundled models, and architectures that SGLang can read; none before SGLang's environment is built."""
    bundled = [
        {"name": entry.slug, "title": entry.title, "repository": entry.repository}
        | {"parallel": [parallel._asdict() for parallel in entry.parallel]}
        for entry in catalogue.entries().values()
    ]
    if python is None:
        root, config = run.configured()
        reader = resolve(config, READER)
        if reader.environment is not None and not built(reader.environment, root=root):
            return {"bundled": bundled, "version": None, "architectures": []}
    readable = ReaderEnvironment(run.stack_interpreter(READER, python), sglang_path).listing()
    kinds = {str(config["architectures"][0]): kind for kind, config in readable.defaults.items()}
    architectures = [{"name": name, "transformers_model_type": kinds.get(name)} for name in readable.architectures]
    return {"bundled": bundled, "version": readable.version, "architectures": architectures}


def listing_text(listed: Mapping[str, Any]) -> str:
    """The result of `listing` as text; architectures that transformers can read too come first."""
    text = ""
    for entry in listed["bundled"]:
        usual = ", ".join(f"tp {at['tp']} ep {at['ep']}" for at in entry["parallel"])
        text += f"{entry['name']:22} {entry['title']:22} {usual:22} {entry['repository']}\n"
    if listed["version"] is None:
        return text + UNREAD
    both = [model["name"] for model in listed["architectures"] if model["transformers_model_type"]]
    others = [model["name"] for model in listed["architectures"] if not model["transformers_model_type"]]
    text += f"\n{len(both)} causal language models that transformers has too (docs/extraction.md tells how many "
    text += f"were read):\n{', '.join(both)}\n\n{len(others)} other classes of SGLang {listed['version']}, "
    return f"{text}encoders and drafts among them; most need --single-reading:\n{', '.join(others)}\n"


# For the web interface: a model's hierarchy of modules.


def add_new_model(  # noqa: PLR0913 - one parameter per option
    *,
    model_name: Annotated[str, typer.Option(help="The model's name, e.g. deepseek-v3; its id in models.ts.")],
    hf_repo_id: options.Hub = None,
    revision: options.Revision = None,
    config: options.Config = None,
    tp: TensorRanks = None,
    ep: ExpertRanks = None,
    models_ts: options.ModelsTs = None,
    json_file: options.JsonFile = None,
    sglang_path: options.Sglang = None,
    extract_python: options.SglangPython = None,
) -> None:
    """Write a model's modules (block or layer, parent, count, definitions) for the web interface.

    A bundled model's facts are used, without network access, unless --config or --revision asks for others. Exit
    codes: 0 written, 2 bad use or input.
    """
    bundled = catalogue.entries().get(catalogue.slug_of(model_name))
    fetched = hf_repo_id if bundled is None or revision is not None else None
    source: dict[str, Any] = {"config": config, "repository": fetched, "revision": revision}
    read = pipeline.model_of(model_name, **source, tp=tp or [], ep=ep or [])
    environment = ReaderEnvironment(run.stack_interpreter(READER, extract_python), sglang_path)
    named: dict[str, list[str]] = {}
    readings: list[Reading] = []
    for parallel in read.parallel:
        config_json.check(read.config, parallel, where=f"config.json of {read.name}")
        with telling(f"reading {read.name} {parallel}"):
            reading = environment.read(read.config, parallel)
        definitions, unmapped, _ = pipeline.definitions_of(reading, read.config, Choice())
        _name_definitions(named, reading, definitions)
        sys.stderr.write("".join(f"not described: {pipeline.unmapped_line(item)}\n" for item in unmapped))
        readings.append(reading)
    title = bundled.title if bundled is not None else model_name
    about = {"id": model_name, "name": title, "description": f"{title} ({', '.join(read.tags)})."}
    model = {**about, "modules": hierarchy.modules_of(readings[0], named)}
    if models_ts is None and json_file is None:
        sys.stdout.write(hierarchy.typescript(model))
    try:
        if models_ts is not None:
            old = models_ts.read_bytes().decode("utf-8")
            partial = models_ts.with_name(f".{models_ts.name}.partial")
            partial.write_bytes(hierarchy.inserted(old, model).encode("utf-8"))
            partial.replace(models_ts)
    except (OSError, UnicodeDecodeError) as error:
        raise TraceproofError(f"the model cannot be written: {error}", todo="Check the paths given.") from error
    run.write_result(json_file, model)


def _name_definitions(named: dict[str, list[str]], reading: Reading, made: list[tuple[KernelCall, Draft]]) -> None:
    """Add names of definitions by module path; a router's top-k gets those of the experts with the same parent."""
    selectors = [(module.parent, module.path) for module in reading.modules if module.kind == "top_k"]
    for call, draft in made:
        holders = {path.rpartition(".")[0] for path in call.paths if call.kind == "experts"}
        for path in [*call.paths, *(path for parent, path in selectors if parent in holders)]:
            names = named.setdefault(path, [])
            names += [draft.name] * (draft.name not in names)
