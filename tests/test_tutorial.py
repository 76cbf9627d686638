"""docs/tutorial.md's commands, word for word, but for the first: a submission is checked by that one."""

from __future__ import annotations

import re
import sys

import pytest
from repository import DEFINITIONS, ROOT, Ran, Repository

pytestmark = pytest.mark.slow
PAGE = (ROOT / "docs" / "tutorial.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```bash\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Repository:
    """What the first command leaves: a dataset, and an environment that has traceproof."""
    root = tmp_path_factory.mktemp("tutorial")
    place = "results/dataset/flashinfer-bench-1"
    copy = Repository.copy(root, dataset={"path": place}, test_sizes=["small", "medium"])
    for folder in (root / ".venv" / "bin", root / place / "definitions" / "rmsnorm"):
        folder.mkdir(parents=True)
    text = (DEFINITIONS / "rmsnorm" / "rmsnorm_h96.json").read_text(encoding="utf-8").replace("96", "4096")
    (root / place / "definitions" / "rmsnorm" / "rmsnorm_h4096.json").write_text(text)
    (root / ".venv" / "bin" / "activate").write_text(f'traceproof() {{ {sys.executable} -m traceproof "$@"; }}\n')
    return copy


def shell(repository: Repository, block: str) -> Ran:
    """A block of commands in the activated environment; the first one that fails ends it."""
    command = ("bash", "-ec", f". .venv/bin/activate\n{block}")
    return Ran.of(*command, cwd=repository.root, env=repository.environment)


def test_the_tutorials_commands_do_what_it_says(repository: Repository) -> None:
    first, look, broken, judge = BLOCKS
    assert first == "python3 scripts/verify_all.py\n"
    assert (ROOT / ".ci" / "run").read_text(encoding="utf-8").count(first) == 1
    ran = shell(repository, look)
    assert ran.code == 0, ran.out
    assert "VERIFIED: 1 definition" in ran.out
    assert "case medium-1" in ran.out
    ran = shell(repository, broken)
    assert ran.code == 2, ran.out
    assert "hidden_size + 1" in ran.out
    ran = shell(repository, judge)
    assert ran.code == 0, ran.out
    assert "ACCEPTED: my_rmsnorm for rmsnorm_h4096" in ran.out
    assert list((repository.root / "results" / "judged").glob("my_rmsnorm-rmsnorm_h4096.*"))
