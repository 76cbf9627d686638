"""TP42x: the FlashInfer call that a definition stands for."""

from collections.abc import Iterator

from traceproof.errors import TraceproofError
from traceproof.lint.flashinfer_names import Package
from traceproof.lint.model import Hit, definition_rule, pointer, rule
from traceproof.lint.subject import Dataset, Subject
from traceproof.ops.registry import ground_truth, record
from traceproof.stacks import TAGGED


@definition_rule("TP421")
def missing_api(subject: Subject) -> Iterator[Hit]:
    """No fi_api tag on a kind that FlashInfer serves."""
    definition = subject.definition
    served = ground_truth(definition.op_type, TAGGED) is not None
    if served and not record(definition.op_type).without_api(definition) and not subject.tags("fi_api"):
        yield Hit(pointer("tags"), f"no fi_api:*, though FlashInfer has kernels for {definition.op_type}")


@rule("TP422", needs_flashinfer=True)
def unresolvable_api(dataset: Dataset) -> Iterator[Hit]:
    """A fi_api tag whose dotted name does not exist in the FlashInfer given."""
    if dataset.flashinfer is None:
        raise TraceproofError("TP422 needs an unpacked FlashInfer", todo="Give --flashinfer-path.")
    package = Package(dataset.flashinfer)
    for subject in dataset.subjects:
        for index, tag in enumerate(subject.definition.tags):
            namespace, _, name = (part.strip() for part in tag.partition(":"))
            if namespace == "fi_api" and (problem := package.problem(name)):
                yield Hit(pointer("tags", index), f"{name}: {problem}", subject.path)
