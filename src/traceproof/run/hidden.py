"""Hidden cases: inputs that nobody can compute beforehand, beside the fixed cases that everybody can.

The fixed cases are a public function of the definition, so a reference that is right on those alone would pass. It
is therefore also run with a seed and, where its var axes are free, sizes derived from a secret number, drawn once
per results folder. Only references and the oracle run them: pinned packages do not know our cases.
"""

import math
import secrets
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from random import Random

from traceproof.dataset.definition import Definition
from traceproof.digests import digest_json
from traceproof.files import BorderError, read_regular, write_text
from traceproof.ops import far
from traceproof.ops.cases import AFTER, BEFALLEN, HIDDEN, LOSSLESS, OTHER_SCALARS, SEEN, STRESS, UNUSUAL, Case
from traceproof.ops.generic import GenericOp
from traceproof.ops.op import Op

FILE = "hidden_seed.txt"  # below `results`
BITS = 48  # of that number
# Sizes of cases: powers of two, and bytes that a case may need beyond an ordinary one. They are the same on every
# machine, so that a number gives the same cases; a reference in Python on a CPU takes seconds for them at most.
FEW, SEEN_ROWS, EXTREME_SIZE = 5, 20, 128
SEEN_INPUTS, SEEN_BYTES = 4, 32 << 20
MOST_POWER, MOST_POWER_BY_ROWS = 13, 10  # the second where a reference in Python works row by row
SEVERAL = (4.4, 7.0)  # powers of two between which the size of further cases is drawn: from 21 to 128
MOST_BYTES, LONG_BYTES = 128 << 20, 512 << 20
MOST_PRODUCTS = 1 << 32  # of the largest weight times all rows: half a second of a core in float64


def hidden_seed(results: Path) -> int:
    """The number that hidden cases of a results folder are derived from; drawn and written if there is none."""
    path = results / FILE
    try:
        return int(read_regular(path, most=100).decode("ascii")) % (1 << BITS)
    except (BorderError, ValueError):
        drawn = secrets.randbits(BITS)
        write_text(path, f"{drawn}\n")
        return drawn


def hidden_cases(definition: Definition, op: Op, base: Case, nonce: int) -> Iterator[Case]:
    """Cases like an ordinary one: with another seed, in other sizes, with other scalars, with unusual values.

    One size is the largest power of two that fits, or one off; where the op tells long sequences from many,
    another is so for these. More sizes are drawn log-uniformly. The cases of large and of small values, or two
    ordinary ones, have equal shapes, with the lengths in another order. Stress cases of extreme values are among
    them, and NaN and infinities in every input.
    """
    number = int(digest_json([nonce, definition.name, base.seed]), 16)
    seed = number % (1 << 31)
    yield Case(f"{HIDDEN}0", base.size, base.axes, seed, base.params)
    if not base.axes:
        return
    random = Random(number)  # noqa: S311 - sizes
    axes_used = [base.axes]
    rows, tokens = (op.of_size(definition, base, FEW, long=long).axes for long in (False, True))
    for place, long in enumerate((False, True)):
        most = _most(definition, op, base, long=long)
        size = 2**most + random.randint(-1, 1)
        if long and rows == tokens:  # or a size that a const axis has: a square hides which axis is taken
            const_sizes = [one for one in definition.const_axes.values() if FEW < one <= 2**most]
            size = random.choice([round(2 ** random.uniform(1, most)), *const_sizes])
        case = op.of_size(definition, base, max(1, size), long=long)
        if case.axes not in axes_used:
            axes_used.append(case.axes)
            yield Case(f"{HIDDEN}{place + 1}", base.size, case.axes, (seed + place + 1) % (1 << 31), case.params)
    size = round(2 ** min(random.uniform(*SEVERAL), _most(definition, op, base, long=True)))
    scalars = any(spec.shape is None for spec in definition.inputs.values())
    if scalars and not isinstance(op, GenericOp):  # GenericOp does not know which scalars are allowed
        one = op.of_size(definition, base, size, long=True)
        params = {**one.params, OTHER_SCALARS: True}
        yield Case(f"{HIDDEN}scalars", base.size, one.axes, (seed + 3) % (1 << 31), params)
    if op.lossless(definition):
        exact = op.lossless_case(definition, base)
        yield Case(f"{HIDDEN}{LOSSLESS}", base.size, exact.axes, seed, {**exact.params, UNUSUAL: LOSSLESS})
    yield from _unusual(definition, op, base, size, seed, alike=rows == base.axes)


def _unusual(  # noqa: PLR0913 - cases of one size and seed
    definition: Definition, op: Op, base: Case, size: int, seed: int, *, alike: bool
) -> Iterator[Case]:
    """Cases of unusual values, two at least of equal shapes; `alike`: no other number of rows is possible."""
    unusual = op.unusual(definition)
    again = () if alike else ("again-0", "again-1")[: 2 - len({"large", "small"} & unusual.keys())]
    for turn, value in enumerate([*unusual, *again], 4):
        two_values, apart = value in {"nan", "inf"}, op.row_axis(definition) is not None
        fewest = FEW if apart else SEEN_ROWS  # beside fewer than 16 keys PyTorch's attention hides a query's NaN
        one = op.of_size(definition, base, fewest if two_values else size, long=two_values and not apart)
        lists = {key: found for key, found in one.params.items() if isinstance(found, list | tuple)}
        # lists with an entry per sequence, unlike those of a block's sizes
        longest = max(map(len, lists.values()), default=0)
        backwards = value in {"small", "again-1"}
        params = {**one.params, **{k: [*reversed(v)] for k, v in lists.items() if backwards and len(v) == longest}}
        if value in unusual:
            params |= {UNUSUAL: value, BEFALLEN: list(unusual[value])}
        yield Case(f"{HIDDEN}{value}", base.size, one.axes, (seed + turn) % (1 << 31), params)
    for one in op.stress(definition, seed=(seed + len(unusual)) % (1 << 31)):  # extreme values, not sizes
        if not {far.SIZE, AFTER} & one.params.keys() and max(one.axes.values(), default=0) <= EXTREME_SIZE:
            yield replace(one, id=f"{HIDDEN}{one.id.removeprefix(STRESS).lstrip('-')}", size=base.size)
    several = op.of_size(definition, base, SEEN_ROWS, long=False)
    if op.memory(definition, several) > op.memory(definition, base) + SEEN_BYTES:
        several = op.of_size(definition, base, 2 * SEEN_INPUTS, long=False)
    seen = () if isinstance(op, GenericOp) else op.seen(definition)  # nothing says what a generic op makes of NaN
    by_row = [name for name in seen if (definition.inputs[name].shape or ("",))[0] in definition.var_axes]
    for what, names in (("rows", by_row), ("weights", [name for name in seen if name not in by_row])):
        if names:  # of many names, some by the seed: each costs two oracles
            some = sorted(Random(seed).sample(names, min(SEEN_INPUTS, len(names))), key=names.index)  # noqa: S311
            params = {**several.params, UNUSUAL: SEEN, BEFALLEN: some}
            yield Case(f"{HIDDEN}{SEEN}-{what}", base.size, several.axes, (seed + len(what)) % (1 << 31), params)


def _most(definition: Definition, op: Op, base: Case, *, long: bool) -> int:
    """Exponent of the largest power of two that fits as a size; 0: none does."""
    at_once = op.at_once(definition, long=long)
    allowed = op.memory(definition, base) + (LONG_BYTES if at_once and long else MOST_BYTES)
    shapes = [spec.shape or () for spec in definition.inputs.values()]
    const = definition.const_axes
    weights = max((math.prod(const[axis] for axis in one) for one in shapes if const.keys() >= {*one}), default=1)
    most = MOST_POWER if at_once else MOST_POWER_BY_ROWS
    exponents = (one for one in range(most, 0, -1) if weights * 2**one <= MOST_PRODUCTS)
    cases = ((one, op.of_size(definition, base, 2**one, long=long)) for one in exponents)
    return next((one for one, case in cases if op.memory(definition, case) <= allowed), 0)
