"""TP40x: tags by themselves, against the rest of the definition, and against other definitions."""

import re
from collections import Counter
from collections.abc import Iterator
from itertools import product

from traceproof.dataset.definition import DType
from traceproof.lint.model import Hit, definition_rule, pointer, rule
from traceproof.lint.subject import Dataset, Subject
from traceproof.ops.registry import record

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
def unknown_tag(subject: Subject) -> Iterator[Hit]:
    """A namespace, flag or value outside definition.md and the published custom."""
    values = {"stage": STAGES, "status": STATUSES, "quantization": QUANTIZATIONS}
    for index, tag in enumerate(subject.definition.tags):
        namespace, colon, value = (part.strip() for part in tag.partition(":"))
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
            yield Hit(pointer("tags", index), f"{tag!r}: {why}")


@definition_rule("TP402")
def malformed_tag(subject: Subject) -> Iterator[Hit]:
    """An empty value, a repeated tag, a tp or ep that is no positive number."""
    tags = subject.definition.tags
    for index, tag in enumerate(tags):
        namespace, colon, value = (part.strip() for part in tag.partition(":"))
        if colon and not (namespace and value):
            yield Hit(pointer("tags", index), f"{tag!r}: empty namespace or value")
        elif namespace in {"tp", "ep"} and not re.fullmatch(r"[1-9][0-9]{0,8}", value):
            yield Hit(pointer("tags", index), f"{tag!r}: {namespace} must be a positive whole number")
        elif tag in tags[:index]:
            yield Hit(pointer("tags", index), f"{tag!r} is there twice")


def _quantized(subject: Subject) -> list[str]:
    found = {LOW_PRECISION[spec.dtype] for spec in subject.tensors.values() if spec.dtype in LOW_PRECISION}
    return sorted(found)


@definition_rule("TP403")
def missing_tag(subject: Subject) -> Iterator[Hit]:
    """No status or model, no stage where the kind has some, no quantization, or no tp that is stated."""
    definition = subject.definition
    for namespace in ("status", "model"):
        if not subject.tags(namespace):
            yield Hit(pointer("tags"), f"no {namespace}:*")
    if record(definition.op_type).staged and not subject.tags("stage"):
        yield Hit(pointer("tags"), f"no stage:*, though {definition.op_type} has stages")
    types = _quantized(subject)
    if types and not subject.tags("quantization"):
        yield Hit(pointer("tags"), f"no quantization:*, though tensors are {', '.join(types)}")
    stated = PARALLEL.search(definition.description or "")
    if stated and not subject.tags("tp"):
        yield Hit(pointer("tags"), f"no tp:*, though the description says {stated[0]!r}")


@definition_rule("TP404")
def contradictory_tags(subject: Subject) -> Iterator[Hit]:
    """Two statuses, a stage that the name denies, a quantization no tensor has, a tp the description denies."""
    for problems in (_repeated, _wrong_stage, _wrong_quantization, _wrong_parallelism):
        yield from (Hit(pointer("tags"), evidence) for evidence in problems(subject))


def _repeated(subject: Subject) -> Iterator[str]:
    for namespace in sorted(SINGLE):
        values = sorted(set(subject.tags(namespace)))
        if len(values) > 1:
            yield f"{namespace} is {' and '.join(values)}"


def _wrong_stage(subject: Subject) -> Iterator[str]:
    named = STAGES & set(subject.words)
    stages = STAGES & set(subject.tags("stage"))
    if named and stages and not named & stages:
        yield f"stage:{', '.join(sorted(stages))}, but the name says {', '.join(sorted(named))}"


def _wrong_quantization(subject: Subject) -> Iterator[str]:
    types = {spec.dtype.value for spec in subject.tensors.values()}
    for value in subject.tags("quantization"):
        if value in {dtype.value for dtype in DType} and value not in types:
            yield f"quantization:{value}, but no tensor is {value}"
    for old, new in product(subject.tags("quant"), subject.tags("quantization")):
        if old not in new.replace("float", "fp"):
            yield f"quant:{old} beside quantization:{new}"


def _wrong_parallelism(subject: Subject) -> Iterator[str]:
    stated = PARALLEL.search(subject.definition.description or "")
    sizes = subject.tags("tp")
    if stated and sizes and (stated[1] or stated[2]) not in sizes:
        yield f"tp:{', '.join(sizes)}, but the description says {stated[0]!r}"


def _plain(model: str) -> str:
    return re.sub(r"[-_. ]|instruct|chat|^meta", "", model.lower())


def _without_size(model: str) -> str:
    """A model's name without trailing sizes: qwen3-next-80b-a3b -> qwen3-next."""
    return re.sub(r"(-a?\d+(\.\d+)?b)+$", "", model)


def _better_names(counts: Counter[str]) -> dict[str, str]:
    """The more common name of each model that has two."""
    preferred: dict[str, str] = {}
    for model in sorted(counts, key=lambda one: (-counts[one], one)):
        preferred.setdefault(_plain(model), model)
    better = {model: preferred[_plain(model)] for model in counts if preferred[_plain(model)] != model}
    for short in counts:
        long = [model for model in counts if model != short and _without_size(model) == short]
        if len(long) == 1:
            rare, common = sorted((short, long[0]), key=lambda one: (counts[one], one))
            better.setdefault(rare, common)
    return better


@rule("TP405")
def model_aliases(dataset: Dataset) -> Iterator[Hit]:
    """Model tags that differ only in punctuation or case, or in a size that only one model of that name has."""
    counts = Counter(model for subject in dataset.subjects for model in subject.tags("model"))
    better = _better_names(counts)
    for subject in dataset.subjects:
        for index, tag in enumerate(subject.definition.tags):
            namespace, _, model = (part.strip() for part in tag.partition(":"))
            if namespace == "model" and model in better:
                other = better[model]
                evidence = f"{model!r} ({counts[model]} x) beside {other!r} ({counts[other]} x)"
                yield Hit(pointer("tags", index), evidence, subject.path)


@rule("TP406")
def drifting_tags(dataset: Dataset) -> Iterator[Hit]:
    """A namespace or flag that most definitions of one kind have, and this one has not."""
    for subjects in dataset.by_family.values():
        if len(subjects) < 3:  # of two, neither is the odd one out
            continue
        keys = [{tag.partition(":")[0].strip() for tag in subject.definition.tags} for subject in subjects]
        counts = Counter(key for found in keys for key in found)
        for subject, found in zip(subjects, keys, strict=True):
            for key in sorted(counts.keys() - found - {"status", "model", "stage"}):
                if counts[key] * 3 >= len(subjects) * 2:
                    evidence = f"{counts[key]} of {len(subjects)} definitions {subject.family} have {key}:*"
                    yield Hit(pointer("tags"), evidence, subject.path)
