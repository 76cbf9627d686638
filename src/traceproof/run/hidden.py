"""Hidden cases: inputs that nobody can compute beforehand, beside the fixed cases that everybody can.

The fixed cases are a public function of the definition. A reference that is right on those alone would pass; so it
is also run with a seed, and where its axes are free in a size, that follow from a number drawn for the results.
Only references and the oracle run them: what is pinned does not know our cases.
"""

import secrets
from collections.abc import Iterator
from pathlib import Path

from traceproof.dataset.definition import Definition
from traceproof.digests import digest_json
from traceproof.files import BorderError, read_regular, write_text
from traceproof.ops.cases import HIDDEN, Case

FILE = "hidden_seed.txt"  # below `results`
MOST_MORE = 11  # of an axis
BITS = 48


def hidden_seed(results: Path) -> int:
    """The number that a results folder's hidden cases follow from; drawn if there is none."""
    path = results / FILE
    try:
        return int(read_regular(path, most=100).decode("ascii")) % (1 << BITS)
    except (BorderError, ValueError):
        drawn = secrets.randbits(BITS)
        write_text(path, f"{drawn}\n")
        return drawn


def hidden_cases(definition: Definition, base: Case, nonce: int) -> Iterator[Case]:
    """Cases like an ordinary one: with another seed, and where nothing but sizes describes it, in another size."""
    number = int(digest_json([nonce, definition.name, base.seed]), 16)
    seed = number % (1 << 31)
    yield Case(f"{HIDDEN}0", base.size, base.axes, seed, base.params)
    if base.axes and not base.params:
        more = 1 + number // (1 << 31) % MOST_MORE
        yield Case(f"{HIDDEN}1", base.size, {name: size + more for name, size in base.axes.items()}, seed + 1)
