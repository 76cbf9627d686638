"""Hidden cases: inputs that nobody can compute beforehand, beside the fixed cases that everybody can.

The fixed cases are a public function of the definition. A reference that is right on those alone would pass; so it
is also run with a seed, and where its axes are free in a size, that follow from a number drawn for the results.
Only references and the oracle run them: what is pinned does not know our cases.
"""

import math
import secrets
from collections.abc import Iterator
from pathlib import Path
from random import Random

from traceproof.dataset.definition import Definition
from traceproof.digests import digest_json
from traceproof.files import BorderError, read_regular, write_text
from traceproof.ops.base import Op
from traceproof.ops.cases import HIDDEN, OTHER_SCALARS, Case
from traceproof.ops.generic import GenericOp

FILE = "hidden_seed.txt"  # below `results`
BITS = 48
# Sizes: powers of two, and what a case may need beside an ordinary one. It is as large on every machine, so that a
# number's cases are the same; a reference in Python on a CPU takes seconds for them at most.
FEW, SEVERAL, MOST_POWER = 5, 17, 10
MOST_BYTES = 128 << 20
MOST_PRODUCTS = 1 << 33  # of the largest weight with all rows: two seconds in float64


def hidden_seed(results: Path) -> int:
    """The number that a results folder's hidden cases follow from; drawn if there is none."""
    path = results / FILE
    try:
        return int(read_regular(path, most=100).decode("ascii")) % (1 << BITS)
    except (BorderError, ValueError):
        drawn = secrets.randbits(BITS)
        write_text(path, f"{drawn}\n")
        return drawn


def hidden_cases(definition: Definition, op: Op, base: Case, nonce: int) -> Iterator[Case]:
    """Cases like an ordinary one: with another seed, in two other sizes, with other scalars, NaN and infinity.

    Of the sizes one is drawn evenly by its logarithm, the other lies at a large power of two, before it or behind
    it. One is of many rows or sequences, the other of long ones, where the op tells them apart.
    """
    number = int(digest_json([nonce, definition.name, base.seed]), 16)
    seed = number % (1 << 31)
    yield Case(f"{HIDDEN}0", base.size, base.axes, seed, base.params)
    if not base.axes:
        return
    random = Random(number)  # noqa: S311 - sizes
    even = random.randrange(2)
    met = [base.axes]
    for place, long in enumerate((False, True)):
        most = _most(definition, op, base, long=long)
        size = round(2 ** random.uniform(1, most + 1))
        if place != even:
            size = 2 ** random.randint(max(0, most - 3), most) + random.randint(-1, 1)
        case = op.of_size(definition, base, max(1, size), long=long)
        if case.axes not in met:
            met.append(case.axes)
            yield Case(f"{HIDDEN}{place + 1}", base.size, case.axes, (seed + place + 1) % (1 << 31), case.params)
    scalars = any(spec.shape is None for spec in definition.inputs.values())
    if scalars and not isinstance(op, GenericOp):  # which knows nothing of what they may be
        several = op.of_size(definition, base, SEVERAL, long=True)
        params = {**several.params, OTHER_SCALARS: True}
        yield Case(f"{HIDDEN}scalars", base.size, several.axes, (seed + SEVERAL) % (1 << 31), params)
    few = op.of_size(definition, base, FEW, long=False)
    for value in op.unusual(definition):
        params = {**few.params, "unusual": value}
        yield Case(f"{HIDDEN}{value}", base.size, few.axes, (seed + FEW) % (1 << 31), params)


def _most(definition: Definition, op: Op, base: Case, *, long: bool) -> int:
    """The largest power of two that fits as a size."""
    room = op.memory(definition, base) + MOST_BYTES
    shapes = [spec.shape or () for spec in definition.inputs.values()]
    const = definition.const_axes
    weights = max((math.prod(const[axis] for axis in one) for one in shapes if const.keys() >= {*one}), default=1)
    powers = (one for one in range(MOST_POWER, 0, -1) if weights * 2**one <= MOST_PRODUCTS)
    cases = ((one, op.of_size(definition, base, 2**one, long=long)) for one in powers)
    return next((one for one, case in cases if op.memory(definition, case) <= room), 0)
