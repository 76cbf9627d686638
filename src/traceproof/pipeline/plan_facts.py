"""What is asked of a plan again and again, in a small file beside it: one of many definitions takes long to read.

It states the digest of the plan's file, which tells a damaged one by its bytes alone, and the digest of all that
the plan was made of, so that an op_type in which nothing has changed is not planned again.
"""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Self

from pydantic import ValidationError

from traceproof.actors.registry import ACTORS
from traceproof.dataset.definition import Definition
from traceproof.digests import digest_bytes
from traceproof.pipeline.records import PLAN_BYTES, OpTypePlan, PlannedCase, PlannedDefinition, Record
from traceproof.pipeline.stages.shards import BYTE_SECONDS, CASE_SECONDS
from traceproof.store import read_sealed, write_sealed
from traceproof.untrusted.border import BorderError, read_regular

LANES = 4  # definitions of one op_type side by side: long references on a GPU, and the judge beside one
DRAWING_LANES = 8  # the same of a sampler's references: thousands of short calls, and little memory
HOST_COPIES = 2  # tensors of a case that a GPU computes, on the host: in its file, and on their way there or back
SUFFIX = ".facts"


class PlanFacts(Record):
    """What the load, and the room on disk, of an op_type's jobs follow from."""

    plan: str = ""  # digest of the plan's file
    # what planned it, and of which files; empty: nobody can say whether it would be the same again
    context: str = ""
    made_of: str = ""
    # bytes of the largest case of each definition, of the largest definitions alone, in ascending order
    needs: tuple[int, ...]
    kernel_needs: tuple[int, ...]  # the same for a kernel
    host_needs: tuple[int, ...]  # the same on the host, of what is computed on a GPU
    large: bool  # whether there are cases whose oracle the judge computes
    on_gpu: tuple[str, ...]  # the actors that compute any of the others on the GPU
    shards: dict[str, int]  # how many jobs an actor has that has several
    seconds: float  # what an actor takes for all cases, draws aside, roughly
    trials: int  # draws of all cases
    elements: int  # of all cases' outputs, where the oracle keeps them in float64
    output_bytes: int  # of all cases' outputs

    @classmethod
    def of(cls, plan: OpTypePlan) -> Self:
        """From a plan."""
        definitions = [(entry.parsed, entry) for entry in plan.definitions.values()]
        to_run = [(case, one) for one, entry in definitions for case in entry.cases if case.skip is None]
        sizes = [(case, *output_size(one, case)) for case, one in to_run]
        return cls(
            needs=_largest(plan, lambda case: case.memory),
            kernel_needs=_largest(plan, lambda case: case.memory + case.kernel_bytes),
            host_needs=tuple(sorted(_host_need(*pair) for pair in definitions)[-DRAWING_LANES:]),
            large=any(case.large for case, _ in to_run),
            on_gpu=tuple(actor for actor in ACTORS if _opens_gpu(plan, actor)),
            shards={actor: len(parts) for actor, parts in plan.shards.items()},
            seconds=sum(CASE_SECONDS + BYTE_SECONDS * case.memory for case, _ in to_run),
            trials=sum(case.trials for case, _ in to_run),
            elements=sum(elements for case, elements, _ in sizes if not case.large),
            output_bytes=sum(size for _, _, size in sizes),
        )

    @classmethod
    def beside(cls, path: Path) -> Self | None:
        """Those in the file beside a plan; None: there are none. Raises BorderError: one of the two is damaged."""
        if not path.with_suffix(SUFFIX).exists():
            return None
        try:
            found = cls.model_validate(read_sealed(path.with_suffix(SUFFIX)))
        except ValidationError:  # another version's
            return None
        if found.plan != digest_bytes(bytes(read_regular(path, most=PLAN_BYTES))):
            raise BorderError(f"{path.name} is not the plan that its facts are of")
        return found

    @classmethod
    def read(cls, path: Path) -> Self:
        """Those beside a plan, else of the plan itself. Raises TraceproofError: it is no plan."""
        try:
            found = cls.beside(path)
        except BorderError:
            found = None
        return found or cls.of(OpTypePlan.read(path))

    def write(self, path: Path, *, text: str, context: str, made_of: str) -> None:
        """Write them beside a plan of some text. Raises TraceproofError: the disk is full."""
        stated = {"plan": digest_bytes(text.encode()), "context": context, "made_of": made_of}
        write_sealed(path.with_suffix(SUFFIX), self.model_copy(update=stated).model_dump(mode="json"))


def tensors(definition: Definition, case: PlannedCase) -> int:
    """Bytes of a case's inputs and outputs."""
    specs = (*definition.inputs.values(), *definition.outputs.values())
    shapes = [(definition.shape_of(spec, case.case.axes) or (), spec.dtype.bits) for spec in specs]
    return sum(math.prod(shape) * bits // 8 for shape, bits in shapes)


def output_size(definition: Definition, case: PlannedCase) -> tuple[int, int]:
    """Elements of all outputs of a case, and their bytes."""
    specs = definition.outputs.values()
    counts = [max(1, case.trials) * math.prod(definition.shape_of(spec, case.case.axes) or ()) for spec in specs]
    return sum(counts), sum(n * -(-spec.dtype.bits // 8) for n, spec in zip(counts, specs, strict=True))


def _largest(plan: OpTypePlan, need: Callable[[PlannedCase], int]) -> tuple[int, ...]:
    """What the largest case of each of the largest definitions needs, in ascending order."""
    entries = plan.definitions.values()
    needs = [max((need(case) for case in entry.cases if case.skip is None), default=0) for entry in entries]
    return tuple(sorted(needs)[-DRAWING_LANES:])


def _host_need(definition: Definition, entry: PlannedDefinition) -> int:
    """Bytes of the host for a definition's largest case that is computed on a GPU."""
    cases = (case for case in entry.cases if case.skip is None)
    return max((min(case.memory, HOST_COPIES * tensors(definition, case)) for case in cases), default=0)


def _opens_gpu(plan: OpTypePlan, actor: str) -> bool:
    info = ACTORS[actor]
    able = (entry for entry in plan.definitions.values() if entry.lacks(actor) is None)
    waiting = (case for entry in able for case in entry.cases if case.skip is None)
    if not info.host_bytes:
        return any(True for _ in waiting)
    # Oracles of large cases are the judge's work.
    return any(info.device("cuda", case.memory) == "cuda" for case in waiting if not case.large)
