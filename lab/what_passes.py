"""Mutants that the forms make, judged on the cases of `verify`: what is caught, and what passes by what.

Nothing here names an op: mutants are made of a definition's axes, inputs, outputs and dtypes, around a right way
that its op declares, so that a new form has its mutants at once. They are computed in this process, which says
nothing of isolation. docs/measurements.md has the figures.
"""

from __future__ import annotations

import math
import secrets
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from random import Random

import torch

from calibrate import chosen, command_line, memory, side_by_side
from traceproof.dataset.definition import Definition
from traceproof.ops import registry
from traceproof.ops.base import TORCH_DTYPES, Tensors, Value, Values
from traceproof.ops.batch import SLOTS, batch_of, halved
from traceproof.ops.cases import BEFALLEN, LOSSLESS, UNUSUAL, Case
from traceproof.ops.compare import ANY_CODE, Backward, Exact, Quantised, Samples
from traceproof.ops.formula import Variant
from traceproof.ops.op import Op
from traceproof.reasons import Skip, Verdict
from traceproof.run.case import SolvedCase, solve
from traceproof.run.judging import rulings
from traceproof.run.plan import PlanSelection, planned_alone
from traceproof.run.untrusted import CaseResult
from variants import variants_of

SIZE, INPUT, OUTPUT, FAR, ROUNDING, TIES, CACHE, SAMPLER = KINDS = (
    "wrong from a size on",
    "an input without effect",
    "an output not written",
    "far values",
    "a relative of the right one",
    "ties away from zero",
    "caches",
    "samplers",
)
BLOCKS = (16, 20, 64, 100, 128, 256, 512)  # sizes from which kernels take another path
FURTHER = 15  # times a case's trials: what a reference in Python draws in the quarter of a second that it has
TILES = (128, 256)  # rows that fill tiles of scales up
LIMITS = (8.0, 127.0, 448.0, 65504.0)  # where values are cut off: exponentials', int8's, fp8's, float16's
WIDE = frozenset({"float32", "float16", "bfloat16"})
NARROWER = {"float32": "bfloat16", "bfloat16": "float8_e4m3fn", "float16": "float8_e4m3fn"}
NEVER_NEGATIVE = ("scale", "probs", "top_p")  # parts of names of inputs
RAISED = (RuntimeError, IndexError, ValueError, AssertionError, KeyError, TypeError)  # by inputs that no case has
# The right way of computing a case, on other inputs where some are given.
Right = Callable[..., Tensors]
Make = Callable[[SolvedCase, Right], Tensors]
Change = Callable[[torch.Tensor], torch.Tensor]


@dataclass(slots=True)
class Mutant:
    """One wrong way of computing a definition, and what came of it."""

    kind: str
    name: str
    make: Make
    changes: Sequence[str] = ()  # inputs or outputs that it changes
    axis: str = ""  # along which it exchanges their entries
    caught: str = ""  # the case, output and reason that refuse it as a reference; empty: it passes
    as_kernel: str = ""  # the same as a kernel
    differs: bool = False  # whether any bit is other than the right way's
    counts: bool = False  # whether one is that the oracle does not leave open
    equal: str = ""  # why it is the right way in other words, by what the form declares
    nearest: float = 0.0  # the largest ratio of a measured error to its limit, where it passes
    nearest_kernel: float = 0.0  # the same as a kernel


def on_input(name: str, change: Change) -> Make:
    """The right way on one input that is changed; scalars and what is left out stay."""

    def make(subject: SolvedCase, right: Right) -> Tensors:
        value = subject.inputs[name]
        return right(**{name: change(value).to(value.dtype)}) if isinstance(value, torch.Tensor) else right()

    return make


def on_output(name: str, change: Change) -> Make:
    """The right way with one output changed, where it is given."""

    def make(_: SolvedCase, right: Right) -> Tensors:
        outputs = right()
        return {**outputs, name: change(outputs[name]).to(outputs[name].dtype)} if name in outputs else outputs

    return make


def along(value: torch.Tensor, axis: int, source: torch.Tensor) -> torch.Tensor:
    """Entries of an axis by their places, for all dtypes."""
    narrow = value.dtype.itemsize == 1
    return (value.view(torch.uint8) if narrow else value).index_select(axis, source).view(value.dtype)


# Wrong from a size on


@dataclass(frozen=True, slots=True)
class Sized:
    """A mutant whose entries along an axis are those of other places, as `source` says of their number."""

    axis: str
    source: Callable[[int], torch.Tensor]
    outputs: bool = False  # whether of outputs rather than of inputs

    def __call__(self, subject: SolvedCase, right: Right) -> Tensors:
        """The outputs."""
        count = subject.case.axes.get(self.axis, 0)
        source = self.source(count)
        if torch.equal(source, torch.arange(count)):
            return right()
        specs = subject.definition.outputs if self.outputs else subject.definition.inputs
        values: Mapping[str, Value] = right() if self.outputs else subject.inputs
        changed = dict(values)
        for name, spec in specs.items():
            value, shape = values.get(name), spec.shape or ()
            if isinstance(value, torch.Tensor) and self.axis in shape:
                at = shape.index(self.axis) + value.dim() - len(shape)  # a sampler's trials come before the shape
                changed[name] = along(value, at, source)
        return changed if self.outputs else right(**changed)  # type: ignore[return-value] # tensors stay so


def last_is_first(least: int, parity: int, count: int) -> torch.Tensor:
    """Places of which the last is the first where there are more than `least`, and so many modulo 2."""
    source = torch.arange(count)
    if count > least and (parity < 0 or count % 2 == parity):
        source[-1] = 0
    return source


def cut_off_at(least: int, count: int) -> torch.Tensor:
    """Places of which none lies past `least`."""
    return torch.arange(count).clamp_max(least - 1)


def in_chunks(block: int, count: int) -> torch.Tensor:
    """Places of which each chunk's first is the one before."""
    source = torch.arange(count)
    source[block::block] -= 1
    return source


@dataclass(frozen=True, slots=True)
class Segmented:
    """A mutant that takes the first entry of a sequence for all of its entries past a number."""

    axis: str
    ends: str  # the input that cuts the axis
    least: int

    def __call__(self, subject: SolvedCase, right: Right) -> Tensors:
        """The outputs."""
        bounds, places = subject.tensor(self.ends).long(), torch.arange(subject.case.axes.get(self.axis, 0))
        part = (torch.searchsorted(bounds, places, right=True) - 1).clamp(0, len(bounds) - 2)
        far = (places - bounds[part] >= self.least) & (places < bounds[-1])
        source = torch.where(far, bounds[part], places)
        return Sized(self.axis, lambda _: source)(subject, right)


def largest_sizes(definition: Definition) -> dict[str, int]:
    """Of each var axis the largest size over the cases of several seeds: what fits here."""
    found = dict.fromkeys(definition.var_axes, 2)
    for seed in range(8):
        selection = PlanSelection(sizes=("small", "medium"), hidden_seed=seed)
        for planned in planned_alone(definition, selection).cases:
            for axis in found if planned.skip is None else ():
                found[axis] = max(found[axis], planned.case.axes.get(axis, 0))
    return found


def sizes_of(definition: Definition, op: Op, axis: str) -> set[int]:
    """The sizes that the form gives an axis where all others are 1 to 64."""
    sizes = (dict.fromkeys(definition.var_axes, size) for size in range(1, 65))
    return {op.settled(definition, Case("", "", one, 0)).axes[axis] for one in sizes}


def from_a_size_on(definition: Definition, op: Op, random: Random) -> Iterator[Mutant]:
    """Entries past a size that are those before it, rows that are the ones before, chunks, odd numbers."""
    medium = solve(definition, next(iter(op.cases(definition, sizes=("medium",), seed=0))))
    for axis, most in largest_sizes(definition).items():
        block = random.choice([one for one in BLOCKS if one < most - 2] or [1])
        drawn = [round(2 ** random.uniform(0.0, math.log2(most - 0.6))) for _ in range(2)]
        found: dict[str, Make] = {}
        if any(axis in (spec.shape or ()) for spec in definition.outputs.values()):
            for least in (block, drawn[0]):
                made = Sized(axis, partial(last_is_first, least, -1), outputs=True)
                found[f"the last of {axis} over {least} is the first"] = made
            odd = Sized(axis, partial(last_is_first, min(3, most - 1), 1), outputs=True)
            found[f"the last of odd {axis} is the first"] = odd
        for least in (block, drawn[1]):
            found[f"{axis} past {least} are the last before"] = Sized(axis, partial(cut_off_at, least))
        found[f"{axis} in chunks of {block}, the first the one before"] = Sized(axis, partial(in_chunks, block))
        for ends, value in medium.inputs.items():
            if isinstance(value, torch.Tensor) and value.dtype in {torch.int32, torch.int64} and value.dim() == 1:
                cuts = len(value) > 2 and int(value[0]) == 0 and int(value[-1]) == medium.case.axes[axis]
                if not cuts or axis in (definition.inputs[ends].shape or ()):
                    continue
                found[f"{axis} of a part of {ends} past {block}"] = Segmented(axis, ends, block)
        for name, make in found.items():
            specs = definition.outputs if isinstance(make, Sized) and make.outputs else definition.inputs
            one = Mutant(SIZE, name, make, [key for key in specs if axis in (specs[key].shape or ())], axis)
            known = sizes_of(definition, op, axis)
            one.equal = f"{axis} has one entry" if known == {1} else ""
            if " odd " in name and not any(size % 2 for size in known):
                one.equal = f"{axis} is even by the form"
            yield one


# Inputs without effect, outputs that are not written


def constant(name: str, number: Value) -> Make:
    """The right way with an input replaced, or left out."""
    return lambda _, right: right(**{name: number})


def first_for_all(value: torch.Tensor) -> torch.Tensor:
    """Its first entry in the place of all."""
    return along(value, 0, torch.zeros(len(value), dtype=torch.long)) if value.dim() and len(value) else value


def without_effect(definition: Definition, op: Op, _: Random) -> Iterator[Mutant]:
    """Each input by itself taken for a constant, for its first entries, without its sign."""
    usual = solve(definition, next(iter(op.cases(definition, sizes=("small",), seed=0)))).inputs
    for name, spec in definition.inputs.items():
        if spec.shape is None:
            yield Mutant(INPUT, f"{name} is its usual value", constant(name, usual[name]), [name])
            if isinstance(usual[name], float):
                yield Mutant(INPUT, f"{name} is 1", constant(name, 1.0), [name])
            continue
        given = usual[name]
        several = not isinstance(given, torch.Tensor) or given.numel() != 1
        changes: dict[str, Change] = {"its first for all": first_for_all} if several else {}
        if "float" in spec.dtype:
            changes |= {"zeros": torch.zeros_like, "ones": lambda value: torch.ones_like(value.float())}
            if name not in op.positive and not any(part in name for part in NEVER_NEGATIVE):
                changes["without its sign"] = lambda value: value.float().abs()
        for told, change in changes.items():
            axis = (*spec.shape, "")[0] if change is first_for_all else ""
            yield Mutant(INPUT, f"{name}: {told}", on_input(name, change), [name], axis)
        if spec.optional:
            yield Mutant(INPUT, f"{name} left out", constant(name, None), [name])


def missing(name: str) -> Make:
    """The right way without an output."""
    return lambda _, right: {key: value for key, value in right().items() if key != name}


def filled(start: float, end: float, number: float, value: torch.Tensor) -> torch.Tensor:
    """A part of a tensor filled, at least one element."""
    copied = value.float().clone() if value.dtype.itemsize == 1 else value.clone()
    flat = copied.view(-1)
    first = min(int(start * len(flat)), max(len(flat) - 1, 0))
    flat[first : max(first + 1, math.ceil(end * len(flat)))] = number
    return copied


def not_written(definition: Definition, op: Op, random: Random) -> Iterator[Mutant]:
    """Each output by itself missing, unwritten in whole, in a half, at an end, in one place."""
    place = random.random()
    for name in op.judged(definition):
        if name in definition.outputs:  # an input that is written to is always there
            yield Mutant(OUTPUT, f"{name} missing", missing(name), [name])
        for told, (start, end, number) in {
            "zeros": (0.0, 1.0, 0.0),
            "rubbish": (0.0, 1.0, 7.0),
            "its last half unwritten": (0.5, 1.0, 0.0),
            "its last 2 % unwritten": (0.98, 1.0, 0.0),
            "one element unwritten": (place, place, 0.0),
            "its last element unwritten": (1.0, 1.0, 0.0),
        }.items():
            yield Mutant(OUTPUT, f"{name}: {told}", on_output(name, partial(filled, start, end, number)), [name])


# Far values


def clamped(limit: float, value: torch.Tensor) -> torch.Tensor:
    """Finite values cut off."""
    return torch.where(value.isfinite(), value.clamp(-limit, limit), value)


def wrapped(bits: int, value: torch.Tensor) -> torch.Tensor:
    """Whole numbers in so many bits; -1 stays."""
    return torch.where(value < 0, value, value % (1 << bits))


def far_changes(said: set[str]) -> dict[str, Change]:
    """What hides the unusual values that mean something."""
    found: dict[str, Change] = {}
    if "large" in said:
        found |= {f"cut off at {limit:g}": partial(clamped, limit) for limit in LIMITS}
    hidden: dict[str, Change] = {
        "small": lambda value: torch.where(value.abs() < 2.0**-14, 0.0, value),
        "nan": lambda value: torch.where(value.isnan(), 0.0, value),
        "inf": lambda value: torch.where(value.isinf(), torch.finfo(value.dtype).max * value.sign(), value),
    }
    return found | {f"{value} hidden": change for value, change in hidden.items() if value in said}


def far_values(definition: Definition, op: Op, _: Random) -> Iterator[Mutant]:
    """Inputs that the form lets be far, and outputs: cut off, rounded away, hidden; indices that wrap."""
    unusual = op.unusual(definition)
    indexed = max([*definition.const_axes.values(), 1 << 10 if definition.var_axes else 0])
    for name, spec in definition.inputs.items():
        said = {value for value, names in unusual.items() if name in names}
        changes = far_changes(said)
        if "large" in said:
            changes["through float16"] = torch.Tensor.half
        if spec.shape is not None and spec.dtype in {"int32", "int64"}:
            changes |= {f"in {bits} bits": partial(wrapped, bits) for bits in (7, 8, 15) if indexed > 1 << bits}
        for told, change in changes.items():
            yield Mutant(FAR, f"{name} {told}", on_input(name, change), [name])
    for name, spec in definition.outputs.items():
        for told, change in far_changes(set(unusual)).items() if spec.dtype in WIDE else ():
            yield Mutant(FAR, f"{name} {told}", on_output(name, change), [name])


# Relatives of the right one


def truncated(value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Rounded towards zero."""
    near = value.to(dtype)
    return torch.where(near.double().abs() > value.double().abs(), torch.nextafter(near, near * 0), near)


def ties_away(value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Rounded to nearest, ties away from zero."""
    near = value.to(dtype)
    other = torch.where(near.double().abs() < value.double().abs(), torch.nextafter(near, near * math.inf), near)
    tie = (other.double() - value.double()).abs() == (near.double() - value.double()).abs()
    return torch.where(tie & value.isfinite() & other.isfinite(), other, near)


def exactly(name: str, change: Callable[[torch.Tensor, torch.dtype], torch.Tensor]) -> Make:
    """The right way with one output made of the oracle's value."""

    def make(subject: SolvedCase, right: Right) -> Tensors:
        outputs = right()
        held = name in outputs and name in subject.oracle
        return {**outputs, name: change(subject.oracle[name], outputs[name].dtype)} if held else outputs

    return make


def scaled(factor: float, value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Times a number."""
    return (value * factor).to(dtype)


def through(kind: torch.dtype, value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Rounded to another dtype first."""
    return value.to(kind).to(dtype)


def relatives(definition: Definition, op: Op, random: Random) -> Iterator[Mutant]:
    """Other roundings of outputs, factors near 1, inputs of fewer bits, the whole formula in half precision."""
    kinds = op.comparisons(definition)
    for name, spec in definition.outputs.items():
        if spec.dtype not in WIDE or isinstance(kinds[name], Exact):
            continue
        step = random.uniform(0.003, 0.006) / (8 if spec.dtype == "float16" else 1)
        changes: dict[str, Callable[[torch.Tensor, torch.dtype], torch.Tensor]] = {"truncated": truncated}
        narrower = NARROWER[spec.dtype]
        if spec.dtype == "float32":
            step, changes = 2.0 ** random.uniform(-9, -7), {"rounded to float16": partial(through, torch.float16)}
        elif op.lossless(definition):  # elsewhere a tie is luck: right ways come out on either side
            yield Mutant(TIES, f"{name} with ties away from zero", exactly(name, ties_away), [name])
        changes[f"rounded to {narrower}"] = partial(through, TORCH_DTYPES[narrower])
        changes |= {f"times {factor:.6g}": partial(scaled, factor) for factor in (1 + step, 1 - step)}
        for told, change in changes.items():
            yield Mutant(ROUNDING, f"{name} {told}", exactly(name, change), [name])
    quantised = all(isinstance(kind, Quantised) for kind in kinds.values())  # which allow 16 bits within
    rounded = {name: spec.dtype for name, spec in definition.inputs.items() if spec.shape is not None}
    for name, dtype in rounded.items():
        if dtype in NARROWER and not (quantised and dtype == "float32"):
            kind = NARROWER[dtype]
            make = on_input(name, lambda value, kind=kind: value.to(TORCH_DTYPES[kind]))  # type: ignore[misc]
            yield Mutant(ROUNDING, f"{name} rounded to {kind}", make, [name])
    # PyTorch sums products in float32 whatever it is given, and copies and draws are as they were.
    other = Backward | Exact | Quantised | Samples
    if isinstance(op, Op) and not any(isinstance(kind, other) for kind in kinds.values()):
        for precision in ("bfloat16", "float16"):
            variant = Variant(precision, precision=precision)
            yield Mutant(ROUNDING, f"all in {precision}", partial(by_variant, variant), [*kinds])


def by_variant(variant: Variant, subject: SolvedCase, right: Right) -> Tensors:
    """What a variant gives; the first one where it says nothing."""
    return variant.make(subject) or right()


# Caches and samplers


@dataclass(frozen=True, slots=True)
class Remembered:
    """A mutant that takes some inputs of the first call of the same shapes."""

    names: Sequence[str]
    least: int = 0  # size of the largest axis from which on it does
    held: dict[object, Values] = field(default_factory=dict)

    def __call__(self, subject: SolvedCase, right: Right) -> Tensors:
        """The outputs."""
        if self.least > max(subject.case.axes.values(), default=0):
            return right()
        shapes = tuple(getattr(value, "shape", ()) for value in subject.inputs.values())
        return right(**self.held.setdefault(shapes, {name: subject.inputs[name] for name in self.names}))


def caches(definition: Definition, _: Op, random: Random) -> Iterator[Mutant]:
    """Each input by itself, and all together, as they were in the first call of these shapes."""
    names = [name for name, spec in definition.inputs.items() if spec.shape is not None]
    for name in names:
        yield Mutant(CACHE, f"{name} of the first call of these shapes", Remembered([name]), [name])
    yield Mutant(CACHE, "all of the first call of these shapes", Remembered(names), names)
    least = random.choice(BLOCKS[:2])
    if definition.var_axes:
        told = f"all of the first call of these shapes from {least} on"
        yield Mutant(CACHE, told, Remembered(names, least), names)


def equal_rows(share: float, probs: torch.Tensor, samples: torch.Tensor) -> None:
    """In a share of the draws, rows take the token of an equal row before."""
    for row in range(1, samples.shape[1]):
        alike = next((one for one in range(row) if torch.equal(probs[row], probs[one])), None)
        if alike is not None:
            taken = torch.rand(len(samples)) < share
            samples[taken, row] = samples[taken, alike]


def repeats(share: float, lag: int, _: torch.Tensor, samples: torch.Tensor) -> None:
    """A share of the draws repeats those some draws before."""
    for trial in (torch.rand(len(samples)) < share).nonzero().flatten().tolist():
        samples[trial] = samples[max(trial - lag, 0)]


def never(rank: int, probs: torch.Tensor, samples: torch.Tensor) -> None:
    """The token of a rank is not drawn; another one in its place."""
    order = probs.argsort(-1, descending=True)
    for row in range(samples.shape[1]):
        if rank < int((probs[row] > 0).sum()):
            samples[samples[:, row] == order[row, rank], row] = order[row, 0 if rank else 1].to(samples.dtype)


def greedy(share: float, probs: torch.Tensor, samples: torch.Tensor) -> None:
    """A share of the draws is the likeliest token."""
    taken = torch.rand(samples.shape[:2]) < share
    samples.copy_(torch.where(taken, probs.argmax(-1).to(samples.dtype).expand_as(samples), samples))


def drawn(change: Callable[[torch.Tensor, torch.Tensor], None]) -> Make:
    """The right way with its draws changed."""

    def make(subject: SolvedCase, right: Right) -> Tensors:
        outputs = right()
        samples = outputs["samples"].clone()
        if samples.numel():
            change(subject.tensor("probs"), samples)
        return {**outputs, "samples": samples}

    return make


def samplers(definition: Definition, op: Op, random: Random) -> Iterator[Mutant]:
    """Draws that follow others, tokens that are never drawn."""
    if not op.trials(definition, next(iter(op.cases(definition, sizes=("small",), seed=0)))):
        return
    for share in (1.0, random.uniform(0.3, 0.9)):
        yield Mutant(SAMPLER, f"equal rows draw alike in {share:.2f}", drawn(partial(equal_rows, share)))
    for lag in (1, 2, random.randrange(3, 9), random.randrange(9, 60)):
        share = random.uniform(0.3, 1.0)
        name = f"a draw repeats the one {lag} before in {share:.2f}"
        yield Mutant(SAMPLER, name, drawn(partial(repeats, share, lag)))
    for rank in (0, 1, random.randrange(2, 5)):
        yield Mutant(SAMPLER, f"rank {rank} is never drawn", drawn(partial(never, rank)))
    for share in (random.uniform(0.2, 0.5), random.uniform(0.5, 1.0)):
        yield Mutant(SAMPLER, f"the likeliest in {share:.2f}", drawn(partial(greedy, share)))


FAMILIES = (from_a_size_on, without_effect, not_written, far_values, relatives, caches, samplers)


# Judging


def judged(definition: Definition, seed: int, sizes: Sequence[str], kinds: Sequence[str]) -> list[Mutant]:
    """All mutants of a definition, each judged on the cases until one catches it."""
    op = registry.get(definition.op_type).of_form(definition)
    variants = variants_of(definition.op_type)
    plan = planned_alone(definition, PlanSelection(sizes=tuple(sizes), hidden_seed=seed, boundaries=True))
    random = Random(f"{seed} {definition.name}")  # noqa: S311 - sizes
    mutants = [one for family in FAMILIES for one in family(definition, op, random) if one.kind in kinds]
    opened = {*definition.outputs}
    for planned in plan.cases:
        if planned.skip is None:
            subject = solve(definition, planned.case, seed=seed)
            right = partial(computed, subject, variants[0])
            plain = right()
            opened &= open_in_whole(subject)
            if planned.case.params.get(UNUSUAL) == LOSSLESS:  # what has no tie there shows none
                kept = {key for key, value in plain.items() if without_ties(subject.oracle.get(key), value.dtype)}
                mutants = [one for one in mutants if one.kind != TIES or not {*one.changes} & kept]
            for mutant in mutants:
                if not (mutant.caught and mutant.as_kernel):
                    hold(mutant, subject, right, plain)
    unseen = [one for one in mutants if not one.caught]
    for one in mutants:
        wholly = "the oracle leaves it open" if {*one.changes} <= opened and one.changes else ""
        one.equal = wholly or ("" if one.caught or one.counts else one.equal or equal_by_form(definition, op, one))
    same_bits = [one for one in unseen if one.kind in {FAR, ROUNDING} and not one.differs]
    if op.unusual(definition):
        beyond(definition, op, variants[0], same_bits)
    if any(isinstance(kind, Exact) and kind.order for kind in op.comparisons(definition).values()):
        in_whole_tiles(definition, op, variants[0], [one for one in unseen if not (one.counts or one.equal)])
    for one in mutants:
        one.make = done  # so that it can be sent to who asked
    return mutants


def open_in_whole(subject: SolvedCase) -> set[str]:
    """The outputs of which all may be anything."""
    free = {name: subject.oracle.get(f"{name}@free") for name in subject.definition.outputs}
    return {name for name, one in free.items() if one is not None and bool(one.all())}


def without_ties(value: torch.Tensor | None, dtype: torch.dtype) -> bool:
    """Whether all that is expected are numbers that a dtype holds, or quotients, which are never a middle."""
    if value is None:
        return False
    loose = (value - value.float()).abs() > value.abs() * 2.0**-40
    return bool(((value.to(dtype).to(value.dtype) == value) | loose).all())


def equal_by_form(definition: Definition, op: Op, mutant: Mutant) -> str:
    """Why the form says that what a mutant changes has no effect; empty: it does not."""
    unread = op.unread(definition)
    empty = {
        name
        for name, spec in definition.outputs.items()
        if any(definition.const_axes.get(axis) == 0 for axis in spec.shape or ())
    }
    if mutant.axis in op.single(definition):
        return f"{mutant.axis} has one entry"
    if mutant.axis and not mutant.changes:
        return f"nothing that is changed has the axis {mutant.axis}"
    if not {*mutant.changes} - empty:
        return "an output of no elements" if mutant.changes else ""
    return "" if {*mutant.changes} - unread.keys() else "; ".join({unread[name] for name in mutant.changes})


def done(_: SolvedCase, right: Right) -> Tensors:
    """The right way, in place of a mutant's once it is judged."""
    return right()


def equivalents(definition: Definition, op: Op) -> Iterator[tuple[str, Make]]:
    """Right ways of computing a definition: its op's, one in float64, a batch in halves, and from its end."""
    for variant in variants_of(definition.op_type):
        yield variant.name, partial(by_variant, variant)
    if isinstance(op, Op):
        yield "float64", partial(by_variant, Variant("float64", precision="float64"))
    yield "in halves", in_halves
    yield "parts in the opposite order", from_the_end


def in_halves(subject: SolvedCase, right: Right) -> Tensors:
    """Both halves of a batch by themselves; a pool of states, which has no halves, is left whole."""
    found = halved(subject)
    if found is None or pooled(subject.definition):
        return right()
    parts = [right(**one) for one in found.inputs]
    return found.joined([{name: part[name] for name in subject.definition.outputs} for part in parts])


def from_the_end(subject: SolvedCase, right: Right) -> Tensors:
    """The parts of a batch in the opposite order, and back."""
    found = halved(subject)
    if found is None or pooled(subject.definition):
        return right()
    order = list(reversed(range(found.batch.count)))
    turned = batch_of(subject, found.batch.select(order))
    assert turned is not None
    return turned.pick(right(**found.batch.select(order)), order)


def pooled(definition: Definition) -> bool:
    """Whether states are picked out of a pool."""
    return any(name in definition.inputs for name in SLOTS)


def ways_of(definition: Definition, seed: int, sizes: Sequence[str], _: Sequence[str]) -> list[Mutant]:
    """Each right way of computing a definition, `caught` by what refuses it."""
    op = registry.get(definition.op_type).of_form(definition)
    variants = variants_of(definition.op_type)
    ways = dict(equivalents(definition, op))
    found = dict.fromkeys(ways, "")
    for planned in planned_alone(definition, PlanSelection(sizes=tuple(sizes), hidden_seed=seed)).cases:
        if planned.skip is not None:
            continue
        subject = solve(definition, planned.case, seed=seed)
        for name, make in ways.items():
            outputs = make(subject, partial(computed, subject, variants[0]))
            result = CaseResult(outputs=outputs)
            bad = [one for one in rulings(subject, result, tolerance=None) if one[1].verdict is Verdict.FAIL]
            found[name] = found[name] or "; ".join(
                f"{planned.id} {output} {ruling.reason}: {ruling.message}" for output, ruling in bad
            )
    return [Mutant("a right way", name, done, caught=why) for name, why in found.items()]


def computed(subject: SolvedCase, variant: Variant, **changes: Value) -> Tensors:
    """The right way on some other inputs."""
    torch.manual_seed(subject.seed)
    other = replace(subject, inputs={**subject.inputs, **changes})
    outputs = variant.make(other)
    assert outputs is not None
    salt = sum(int(bits(one).long().sum()) for one in other.inputs.values() if isinstance(one, torch.Tensor))
    for turn in range(1, FURTHER + 1 if subject.trials else 1):  # a sampler's draws follow from the seed
        more = variant.make(replace(other, seed=subject.seed + turn + salt)) or {}
        outputs = {name: torch.cat([value, more[name]]) for name, value in outputs.items()}
    written = subject.op.judged(subject.definition).keys() - subject.definition.outputs.keys()
    kept = {name: value for name in written if isinstance(value := subject.inputs[name], torch.Tensor)}
    return kept | outputs


def hold(mutant: Mutant, subject: SolvedCase, right: Right, plain: Tensors) -> None:
    """Judge a mutant on one case, as a reference and as a kernel, where it still passes."""
    alone = subject.case.id == "adversarial-boundaries"  # of kernels
    try:
        outputs = mutant.make(subject, right)
    except RAISED as error:
        seen = f"{subject.case.id} raises {type(error).__name__}"
        mutant.caught, mutant.as_kernel, mutant.differs = mutant.caught or seen, mutant.as_kernel or seen, True
        return
    if same(outputs, plain):
        return
    mutant.differs, result = True, CaseResult(status="ok", outputs=outputs)
    mutant.counts = mutant.counts or not left_open(subject, outputs, plain)
    if not mutant.caught and not alone:
        mutant.caught = seen_in(mutant, subject, result, reference=True)
    mutant.as_kernel = mutant.as_kernel or seen_in(mutant, subject, result, reference=False)


def seen_in(mutant: Mutant, subject: SolvedCase, result: CaseResult, *, reference: bool) -> str:
    """What refuses a case's outputs; empty: nothing does."""
    for name, ruling in rulings(subject, result, tolerance=None, reference=reference):
        if ruling.verdict in {Verdict.FAIL, Verdict.ERROR} or ruling.reason == Skip.UNJUDGED:
            return f"{subject.case.id} {name} {ruling.reason}"
        margin = (ruling.details.get("gate") or {}).get("margin") or 0.0
        if reference:
            mutant.nearest = max(mutant.nearest, margin)
        else:
            mutant.nearest_kernel = max(mutant.nearest_kernel, margin)
    return ""


def beyond(definition: Definition, op: Op, variant: Variant, mutants: Sequence[Mutant]) -> None:
    """Tell the mutants that give the right bits on inputs beyond those of the cases, too."""
    base = next(iter(op.cases(definition, sizes=("medium",), seed=1)))
    told: set[int] = set()
    for turn, (value, names) in enumerate(op.unusual(definition).items()):
        params = {**base.params, UNUSUAL: value, BEFALLEN: list(names)}
        subject = solve(definition, replace(base, params=params))
        generator = torch.Generator().manual_seed(turn)
        for name in names:
            one = subject.inputs[name]
            if isinstance(one, torch.Tensor) and value in {"large", "small"}:
                spread, most = (
                    2.0 ** torch.randint(-6, 7, one.shape, generator=generator),
                    torch.finfo(one.dtype).max,
                )
                one.copy_((one * spread).clamp(-most / 4, most / 4))
        right = partial(computed, subject, variant)
        plain = right()
        for mutant in mutants:
            with suppress(*RAISED):
                told |= {id(mutant)} if not same(mutant.make(subject, right), plain) else set()
    for mutant in mutants:
        mutant.equal = "" if id(mutant) in told else "the same bits on inputs beyond those of the cases, too"


def in_whole_tiles(definition: Definition, op: Op, variant: Variant, mutants: Sequence[Mutant]) -> None:
    """Tell the mutants that change only what the oracle leaves open, in sizes that fill tiles up, too."""
    base = next(iter(op.cases(definition, sizes=("medium",), seed=1)))
    for count in TILES if mutants else ():
        subject = solve(definition, op.of_size(definition, base, count, long=False))
        right: Right = partial(computed, subject, variant)
        plain = right()
        rubbish = {
            name: torch.randint(256, bits(value).shape, dtype=torch.uint8).view(value.dtype).view(value.shape)
            for name, value in plain.items()
        }
        for mutant in mutants:
            given, way = (rubbish, partial(dict, rubbish)) if mutant.kind == OUTPUT else (plain, right)
            with suppress(*RAISED):  # beside rubbish all that is written shows
                outputs = mutant.make(subject, way)
                mutant.differs = mutant.differs or not same(outputs, given)
                mutant.counts = mutant.counts or not left_open(subject, outputs, given)
    for mutant in mutants:
        mutant.equal = "the oracle leaves open what is changed" if mutant.differs and not mutant.counts else ""


def left_open(subject: SolvedCase, outputs: Tensors, plain: Tensors) -> bool:
    """Whether outputs differ in codes alone that may be any, as the oracle says."""
    kinds = subject.op.comparisons(subject.definition)
    for name, value in plain.items():
        kind, low = kinds.get(name), subject.oracle.get(f"{name}@low")
        if name not in outputs or outputs[name].shape != value.shape:
            return False
        if torch.equal(bits(outputs[name]), bits(value)):
            continue
        if low is None or not isinstance(kind, Exact) or kind.order is None:
            return False
        whatever = (low <= -ANY_CODE) & (subject.oracle[f"{name}@high"] >= ANY_CODE)
        if ((kind.order(outputs[name]) != kind.order(value)) & ~whatever.any(-1)).any():
            return False
    return outputs.keys() == plain.keys()


def same(one: Tensors, other: Tensors) -> bool:
    """Whether outputs have the same bits."""
    return one.keys() == other.keys() and all(
        value.shape == other[name].shape and torch.equal(bits(value), bits(other[name]))
        for name, value in one.items()
    )


def bits(value: torch.Tensor) -> torch.Tensor:
    """A tensor as bytes."""
    return value.contiguous().view(-1).view(torch.uint8)


def table(found: Mapping[tuple[str, str], Sequence[Mutant]]) -> Iterator[str]:
    """Counts per kind, what passes, and equivalent ones by why they are, as Markdown."""
    every = [one for mutants in found.values() for one in mutants]
    yield "| kind | made | caught | passed | of these, the same bits in all cases | kernels caught | equivalent |"
    yield "|---|---:|---:|---:|---:|---:|---:|"
    for kind in (*KINDS, "all"):
        mine = [one for one in every if kind in {one.kind, "all"} and not one.equal]
        passed = [one for one in mine if not one.caught]
        share = f"{len(mine) - len(passed)} ({100 * (1 - len(passed) / max(len(mine), 1)):.1f} %)"
        kernels = sum(bool(one.as_kernel) for one in mine)
        told = f"{sum(not one.differs for one in passed)} | {kernels} ({100 * kernels / max(len(mine), 1):.1f} %)"
        equal = sum(bool(one.equal) for one in every if kind in {one.kind, "all"})
        yield f"| {kind} | {len(mine)} | {share} | {len(passed)} | {told} | {equal} |"
    yield ""
    whys: dict[str, Counter[str]] = {}
    for (op_type, name), mutants in sorted(found.items()):
        for one in (one for one in mutants if not (one.caught and one.as_kernel)):
            nearest = one.nearest_kernel if one.caught else one.nearest
            told = f"{nearest:.2g} of the limit" if one.differs else "the same bits"
            if one.equal:
                whys.setdefault(one.equal, Counter()).update([op_type])
            else:
                alone = ", as a kernel" if one.caught else ""
                yield f"- {op_type}, {name}: {one.kind}: {one.name}: {told}{alone}"
    for why, counts in sorted(whys.items()):
        yield f"- equivalent: {why}: {', '.join(f'{op_type} {count}' for op_type, count in counts.items())}"


def main() -> int:
    """Print the table; a line per definition and seed goes to stderr.

    Exit code 1: a right way was refused, or a definition could not be measured.
    """
    parser = command_line(__doc__)
    parser.add_argument("--seed", type=int, nargs="+", help="of mutants and hidden cases; drawn unless given")
    parser.add_argument("--sizes", nargs="+", default=["small", "medium"])
    parser.add_argument("--kind", nargs="*", default=list(KINDS), choices=KINDS)
    parser.add_argument("--right", action="store_true", help="right ways in place of mutants")
    parser.add_argument("--caught", action="store_true", help="say what catches each, too")
    options = parser.parse_args()
    options.seed = options.seed or [secrets.randbelow(1 << 20)]
    sys.stdout.write(f"seed {' '.join(map(str, options.seed))}\n")
    units = [(definition, seed) for seed in options.seed for definition in chosen(options)]
    sizes = {definition.name: memory(definition, options.sizes) for definition, _ in units}
    units.sort(key=lambda unit: -sizes[unit[0].name])  # the largest first: the last one to end decides
    what = ways_of if options.right else judged
    calls = {
        (one.op_type, one.name, seed): (what, one.as_json(), seed, options.sizes, options.kind)
        for one, seed in units
    }
    found: dict[tuple[str, str], list[Mutant]] = {}
    counts: Counter[bool] = Counter()
    spent, broken = 0.0, list[str]()
    for (op_type, name, seed), result, error in side_by_side(timed, calls, options.jobs):
        if error is not None:
            broken.append(f"{name} seed {seed}: {error!r}")
            continue
        seconds, seen = result
        spent += seconds
        told = f"{name} seed {seed}, {seconds:.0f} s"
        if options.right:
            counts.update(bool(one.caught) for one in seen)
            sys.stderr.write(f"{told}: {len(seen)} right ways\n")
            sys.stdout.writelines(f"{told}: {one.name}: refused: {one.caught}\n" for one in seen if one.caught)
            continue
        found.setdefault((op_type, name), []).extend(seen)
        passed = [one for one in seen if not (one.caught or one.equal)]
        sys.stderr.write(f"{told}: {len(passed)} of {sum(not one.equal for one in seen)} pass\n")
        for one in seen if options.caught else passed:
            how = one.caught or one.equal or f"PASSES, {one.nearest:.2g}{'' if one.differs else ', same bits'}"
            sys.stderr.write(f"  {one.kind}: {one.name}: {how}\n")
    sys.stderr.write(f"{spent:.0f} processor seconds\n")
    sys.stdout.writelines(f"not measured: {one}\n" for one in broken)
    if options.right:
        sys.stdout.write(f"{sum(counts.values())} right ways, {counts[True]} refused\n")
    else:
        sys.stdout.write("\n".join(table(found)) + "\n")
    return int(counts[True] > 0 or bool(broken))


def timed(
    what: Callable[..., list[Mutant]], definition: dict[str, object], *unit: object
) -> tuple[float, list[Mutant]]:
    """What is seen of a definition by one seed, and the processor seconds that it took."""
    torch.set_num_threads(1)
    started = time.process_time()
    seen = what(Definition.model_validate(definition), *unit)
    return time.process_time() - started, seen


if __name__ == "__main__":
    sys.exit(main())
