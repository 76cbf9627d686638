"""Scoring suites by planted bugs: what asserts kills, what returns denies, what looks at shapes does neither."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
from definitions import GOOD, rmsnorm, write

from planting import Suite, existing, generated
from scorecard import Card, score, table
from traceproof.dataset.tree import read_tree
from traceproof.testgen.generate import PLACE, Divergences, GenerateOptions, generate

NAME = "rmsnorm_a"
MOST = 2
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


def card(root: Path, suite: Suite, seeds: int = 1) -> Card:
    entry = read_tree(root).definitions[NAME]
    return score(suite, entry.path, entry.definition, seeds=seeds, most=MOST)


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


def test_our_suite_kills(tmp_path: Path) -> None:
    root = dataset(tmp_path)
    generate(GenerateOptions(root=root, everything=True, sizes=("small",)), Divergences())
    found = card(root, Suite(root, generated, ("--seed={seed}", "--test-sizes=small")), seeds=2)
    assert (found.seeds, found.alarms) == (2, [])
    assert found.killed == found.total > 0
    assert "100.0%" in table([found])
