"""Scoring suites by planted bugs: what asserts kills, what returns denies, what looks at shapes does neither."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
from definitions import GOOD, rmsnorm, write

from planting import Suite, existing, generated
from scorecard import Card, Known, complete, score, table
from traceproof.dataset.tree import read_tree
from traceproof.testgen.generate import PLACE, Divergences, GenerateOptions, generate

NAME = "rmsnorm_a"
MOST = 2
KNOWN: Known = {}  # the same definition everywhere: judged once
CHECK = """
def inputs():
    torch.manual_seed(0)
    return 1e-3 * torch.randn(8, 32).bfloat16(), torch.randn(32).bfloat16()

def right(x, w):
    x = x.double()
    return x * (x.pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt() * w.double()

def test_correctness():
    x, w = inputs()
    close = torch.allclose(run(x, w).double(), right(x, w), atol=1e-2, rtol=1e-2)
"""


pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]


def dataset(root: Path, test: str = "") -> Path:
    write(root, rmsnorm(NAME))
    if test:
        path = root / PLACE / f"test_{NAME}.py"
        path.parent.mkdir(parents=True)
        path.write_text(GOOD + test)
    return root


def card(root: Path, suite: Suite) -> Card:
    entry = read_tree(root).definitions[NAME]
    return score(suite, entry.path, entry.definition, seeds=1, most=MOST, known=KNOWN)


@pytest.mark.parametrize(
    ("end", "killed", "denied"),
    [
        ("    assert close\n", True, False),
        ("    return close\n", False, True),
        ("    assert len(x)\n", False, False),
    ],
    ids=["asserts", "returns", "looks at shapes"],
)
def test_a_suite_is_scored_by_what_it_asserts(tmp_path: Path, end: str, *, killed: bool, denied: bool) -> None:
    root = dataset(tmp_path, CHECK + end)
    found = card(root, Suite(root, partial(existing, root=root)))
    assert found.tests == 1
    assert found.total
    assert (found.killed > 0, found.denied > 0) == (killed, denied)
    assert found.killed + len(found.survivors) == found.total
    assert (root / PLACE / f"test_{NAME}.py").read_text() == GOOD + CHECK + end  # as before


def test_our_suite_kills_and_what_there_was_no_time_for_is_said_and_completed(tmp_path: Path) -> None:
    root = dataset(tmp_path)
    generate(GenerateOptions(root=root, everything=True, sizes=("small",)), Divergences())
    suite = Suite(root, generated, ("--seed={seed}", "--test-sizes=small"))
    entry = read_tree(root).definitions[NAME]

    def go_on(seeds: int, until: float, earlier: Card | None) -> Card:
        return score(
            suite, entry.path, entry.definition, seeds=seeds, most=MOST, known=KNOWN, until=until, earlier=earlier
        )

    begun = go_on(2, 0.0, None)
    assert (begun.seeds, begun.total, begun.left) == (1, 0, MOST)
    assert not complete(begun, seeds=2, most=MOST)
    done = go_on(2, float("inf"), begun)
    assert (done.seeds, done.alarms, done.left) == (2, [], 0)
    assert done.killed == done.total > 0
    fates = next(iter(KNOWN.values()))
    assert len(fates) == done.total + done.equivalent
    assert "100.0%" in table([done])
    assert complete(done, seeds=2, most=MOST)
    assert not complete(done, seeds=2, most=MOST + 1)
    assert not complete(done, seeds=3, most=MOST)
    assert go_on(2, float("inf"), done) == done  # mutants are not run again
