"""TP4xx: tags by themselves and against the rest; tensor and expert parallelism; the FlashInfer call."""

import re
from collections import Counter
from collections.abc import Iterator
from itertools import islice, product

from traceproof.dataset.definition import DType
from traceproof.errors import TraceproofError
from traceproof.lint.flashinfer_names import Package
from traceproof.lint.model import Hit, LintedDataset, LintedDefinition, definition_rule, pointer, rule
from traceproof.models import catalogue
from traceproof.ops.registry import ground_truth, record
from traceproof.stacks import TAGGED

FLAGS = frozenset({"fused"})
# definition.md controls the first four; the published definitions use the rest in one sense each.
NAMESPACES = frozenset({"stage", "model", "quantization", "status", "tp", "ep", "fi_api"})
STAGES = frozenset({"prefill", "decode", "mtp"})
STATUSES = frozenset({"verified", "unverified", "draft", "deprecated"})
SINGLE = frozenset({"status", "quantization"})  # namespaces that make sense once
LOW_PRECISION = {
    DType.FLOAT8_E4M3FN: "float8_e4m3fn",
    DType.FLOAT8_E5M2: "float8_e5m2",
    DType.FLOAT4_E2M1: "float4_e2m1",
}
QUANTIZATIONS = frozenset({*LOW_PRECISION.values(), "int8", "int4", "nvfp4", "mxfp4", "mxfp8"})
PARALLEL = re.compile(r"(?i)tensor[- ]parallel(?:ism)?(?: size)?\s*(?:=|of)?\s*(\d+)|\bTP\s*=?\s*(\d+)")


@definition_rule("TP401")
def unknown_tag(subject: LintedDefinition) -> Iterator[Hit]:
    """A namespace, flag or value outside definition.md and the published custom."""
    values = {"stage": STAGES, "status": STATUSES, "quantization": QUANTIZATIONS}
    for (where, namespace, colon, value), tag in zip(subject.tag_parts, subject.definition.tags, strict=True):
        why = ""
        if not colon:
            why = "" if tag in FLAGS else "no such flag"
        elif namespace not in NAMESPACES:
            why = f"no namespace {namespace!r}" + (
                "; definition.md's is 'quantization'" if namespace == "quant" else ""
            )
        elif value not in values.get(namespace, {value}):
            why = f"{namespace} is one of {', '.join(sorted(values[namespace]))}"
        if why:
            yield Hit(where, f"{tag!r}: {why}")


@definition_rule("TP402")
def malformed_tag(subject: LintedDefinition) -> Iterator[Hit]:
    """An empty value, a repeated tag, a tp or ep that is no positive number."""
    tags = subject.definition.tags
    for index, (where, namespace, colon, value) in enumerate(subject.tag_parts):
        tag = tags[index]
        if colon and not (namespace and value):
            yield Hit(where, f"{tag!r}: empty namespace or value")
        elif namespace in {"tp", "ep"} and not re.fullmatch(r"[1-9][0-9]{0,8}", value):
            yield Hit(where, f"{tag!r}: {namespace} must be a positive whole number")
        elif tag in tags[:index]:
            yield Hit(where, f"{tag!r} is there twice")


@definition_rule("TP403")
def missing_tag(subject: LintedDefinition) -> Iterator[Hit]:
    """No status or model, no stage where the kind has some, no quantization, or no tp that is stated."""
    definition = subject.definition
    for namespace in ("status", "model"):
        if not subject.tags(namespace):
            yield Hit(pointer("tags"), f"no {namespace}:*")
    if record(definition.op_type).staged and not subject.tags("stage"):
        yield Hit(pointer("tags"), f"no stage:*, though {definition.op_type} has stages")
    types = sorted({LOW_PRECISION[spec.dtype] for spec in subject.tensors.values() if spec.dtype in LOW_PRECISION})
    if types and not subject.tags("quantization"):
        yield Hit(pointer("tags"), f"no quantization:*, though tensors are {', '.join(types)}")
    stated = PARALLEL.search(definition.description or "")
    if stated and not subject.tags("tp"):
        yield Hit(pointer("tags"), f"no tp:*, though the description says {stated[0]!r}")


@definition_rule("TP404")
def contradictory_tags(subject: LintedDefinition) -> Iterator[Hit]:
    """Two statuses, a stage that the name denies, a quantization no tensor has, a tp the description denies."""
    yield from (Hit(pointer("tags"), evidence) for evidence in _contradictions(subject))


def _contradictions(subject: LintedDefinition) -> Iterator[str]:
    for namespace in sorted(SINGLE):
        values = sorted(set(subject.tags(namespace)))
        if len(values) > 1:
            yield f"{namespace} is {' and '.join(values)}"
    named, stages = STAGES & set(subject.words), STAGES & set(subject.tags("stage"))
    if named and stages and not named & stages:
        yield f"stage:{', '.join(sorted(stages))}, but the name says {', '.join(sorted(named))}"
    types = {spec.dtype.value for spec in subject.tensors.values()}
    for value in subject.tags("quantization"):
        if value in {dtype.value for dtype in DType} and value not in types:
            yield f"quantization:{value}, but no tensor is {value}"
    for old, new in product(subject.tags("quant"), subject.tags("quantization")):
        if old not in new.replace("float", "fp"):
            yield f"quant:{old} beside quantization:{new}"
    stated, sizes = PARALLEL.search(subject.definition.description or ""), subject.tags("tp")
    if stated and sizes and (stated[1] or stated[2]) not in sizes:
        yield f"tp:{', '.join(sizes)}, but the description says {stated[0]!r}"


def _plain(model: str) -> str:
    return re.sub(r"[-_. ]|instruct|chat|^meta", "", model.lower())


def _better_names(counts: Counter[str]) -> dict[str, str]:
    """The more common name of each model that has two."""
    preferred: dict[str, str] = {}
    for model in sorted(counts, key=lambda one: (-counts[one], one)):
        preferred.setdefault(_plain(model), model)
    better = {model: preferred[_plain(model)] for model in counts if preferred[_plain(model)] != model}
    for short in counts:
        # Without trailing sizes: qwen3-next-80b-a3b is a qwen3-next.
        long = [one for one in counts if one != short and re.sub(r"(-a?\d+(\.\d+)?b)+$", "", one) == short]
        if len(long) == 1:
            rare, common = sorted((short, long[0]), key=lambda one: (counts[one], one))
            better.setdefault(rare, common)
    return better


@rule("TP405")
def model_aliases(dataset: LintedDataset) -> Iterator[Hit]:
    """Model tags that differ only in punctuation or case, or in a size that only one model of that name has."""
    counts = Counter(model for subject in dataset.subjects for model in subject.tags("model"))
    better = _better_names(counts)
    for subject in dataset.subjects:
        for where, namespace, _, model in subject.tag_parts:
            if namespace == "model" and model in better:
                other = better[model]
                evidence = f"{model!r} ({counts[model]} x) beside {other!r} ({counts[other]} x)"
                yield Hit(where, evidence, subject.path)


@rule("TP406")
def drifting_tags(dataset: LintedDataset) -> Iterator[Hit]:
    """A namespace or flag that most definitions of one kind have, and this one has not."""
    for subjects in dataset.by_family.values():
        if len(subjects) < 3:  # of two, neither is the odd one out
            continue
        keys = [{key for _, key, _, _ in subject.tag_parts} for subject in subjects]
        counts = Counter(key for found in keys for key in found)
        for subject, found in zip(subjects, keys, strict=True):
            for key in sorted(counts.keys() - found - {"status", "model", "stage"}):
                if counts[key] * 3 >= len(subjects) * 2:
                    evidence = f"{counts[key]} of {len(subjects)} definitions {subject.family} have {key}:*"
                    yield Hit(pointer("tags"), evidence, subject.path)


# Axes that tensor parallelism divides. Key and value heads are not here: they never go below one a rank.
DIVIDED = ("num_qo_heads", "num_q_heads", "num_v_heads", "nheads")
# What a model's config.json calls its whole number of them.
WHOLE = {
    "num_qo_heads": "num_attention_heads",
    "num_q_heads": "linear_num_key_heads",
    "num_v_heads": "linear_num_value_heads",
    "nheads": "mamba_num_heads",
}
EXPERTS = ("num_experts", "n_routed_experts", "num_local_experts")  # of a config.json: all routed ones


def _sizes(subject: LintedDefinition, namespace: str) -> frozenset[int]:
    return frozenset(int(value) for value in subject.tags(namespace) if re.fullmatch(r"[1-9][0-9]{0,8}", value))


@definition_rule("TP411")
def expert_parallel(subject: LintedDefinition) -> Iterator[Hit]:
    """An ep tag that the numbers of experts deny, or experts split over ranks without an ep tag."""
    const = subject.definition.const_axes
    experts, local = const.get("num_experts"), const.get("num_local_experts")
    if not experts or not local:
        return
    sizes = _sizes(subject, "ep")
    given = f"num_experts = {experts}, num_local_experts = {local}"
    if experts % local:
        yield Hit(pointer("axes", "num_local_experts"), f"{given}: no whole number of ranks")
    elif sizes and experts // local not in sizes:
        yield Hit(pointer("tags"), f"ep:{', '.join(map(str, sorted(sizes)))}, but {given}")
    elif not sizes and experts != local:
        yield Hit(pointer("tags"), f"{given}, but no ep:{experts // local}")


@rule("TP412")
def tensor_parallel(dataset: LintedDataset) -> Iterator[Hit]:
    """Definitions of one model and op_type for which no common number of heads is possible."""
    groups: dict[tuple[str, str, str], list[tuple[LintedDefinition, frozenset[int]]]] = {}
    for subject in dataset.subjects:
        const = subject.definition.const_axes
        sizes = _sizes(subject, "tp")
        for axis in DIVIDED:
            if axis in const and sizes:
                totals = frozenset(const[axis] * size for size in sizes)
                for model in subject.tags("model"):
                    groups.setdefault((model, subject.definition.op_type, axis), []).append((subject, totals))
    for (model, _, axis), members in groups.items():
        votes: dict[int, int] = {}
        for _, totals in members:
            for total in totals:
                votes[total] = votes.get(total, 0) + 1
        agreed = max(votes, key=lambda total: (votes[total], -total))
        for subject, totals in members:
            if agreed not in totals:
                evidence = f"{axis} times tp is {sorted(totals)}; {votes[agreed]} of {model}'s others say {agreed}"
                yield Hit(pointer("tags"), evidence, subject.path)


@definition_rule("TP413")
def model_config(subject: LintedDefinition) -> Iterator[Hit]:
    """Heads times tp, or local experts times ep, that no rank count gives for a model whose config is bundled.

    A missing tag counts as one rank.
    """
    const = subject.definition.const_axes
    models = {catalogue.slug_of(model): model for model in reversed(subject.tags("model"))}
    for slug, model in models.items():
        entry = catalogue.entries().get(slug)
        if entry is None:
            continue
        whole = {axis: entry.config[key] for axis, key in WHOLE.items() if axis in const and key in entry.config}
        hits = (hit for axis, n in whole.items() for hit in _ranks(subject, "tp", axis, const[axis], n, model))
        yield from islice(hits, 1)  # other axes are divided by the same ranks
        experts = next((entry.config[key] for key in EXPERTS if key in entry.config), None)
        axis = "num_local_experts" if "num_local_experts" in const else "num_experts"
        # TP411 sees it already where the definition itself names the model's number beside a rank's.
        told = const.get("num_experts") == experts and "num_local_experts" in const
        if experts is not None and axis in const and not told:
            yield from _ranks(subject, "ep", axis, const[axis], experts, model)


def _ranks(  # noqa: PLR0913, PLR0917 - the parts of one sentence
    subject: LintedDefinition, namespace: str, axis: str, size: int, total: int, model: str
) -> Iterator[Hit]:
    """A hit where none of the tagged numbers of ranks makes the model's number of a rank's."""
    sizes = _sizes(subject, namespace) or frozenset({1})
    if any(size * ranks == total for ranks in sizes):
        return
    given = f"{namespace}:{', '.join(map(str, sorted(sizes)))}" if subject.tags(namespace) else f"no {namespace}:*"
    wanted = f"{namespace}:{total // size}" if size and total % size == 0 else "no number of ranks fits"
    yield Hit(pointer("tags"), f"{given}, but {axis} = {size} of {model}'s {total}: {wanted}")


@definition_rule("TP421")
def missing_api(subject: LintedDefinition) -> Iterator[Hit]:
    """No fi_api tag on a kind that FlashInfer serves."""
    definition = subject.definition
    served = ground_truth(definition.op_type, TAGGED) is not None
    if served and not record(definition.op_type).without_api(definition) and not subject.tags("fi_api"):
        yield Hit(pointer("tags"), f"no fi_api:*, though FlashInfer has kernels for {definition.op_type}")


@rule("TP422")
def unresolvable_api(dataset: LintedDataset) -> Iterator[Hit]:
    """A fi_api tag whose dotted name does not exist in the FlashInfer given."""
    if dataset.flashinfer is None:
        raise TraceproofError("TP422 needs an unpacked FlashInfer", todo="Give --flashinfer-path.")
    package = Package(dataset.flashinfer)
    for subject in dataset.subjects:
        for where, namespace, _, name in subject.tag_parts:
            if namespace == "fi_api" and (problem := package.problem(name)):
                yield Hit(where, f"{name}: {problem}", subject.path)
