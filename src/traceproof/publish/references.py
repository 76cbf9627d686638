"""Generated reference tests of a bundle: one class per definition, and the support package that they need."""

from collections.abc import Sequence
from pathlib import Path

from traceproof.dataset.tree import Tree
from traceproof.files import write_text
from traceproof.names import fresh_folder
from traceproof.testgen.generate import PLACE, Divergences, GenerateOptions, generate
from traceproof.testgen.texts import MARKER, classes, render, state


def write_tests(tree: Tree, names: Sequence[str], out: Path, *, generated: Path) -> list[str]:
    """Write tests of the definitions that have none into `out`, in the dataset's layout; what was left out.

    Tests that were generated before are taken as they are, with the settings that they were generated with. Raises
    TraceproofError: a definition's file can not be read, or something else is in the way.
    """
    fresh_folder(out, within=out.parent)
    folder = tree.root / PLACE
    if state(folder / "conftest.py") == "foreign":
        return [f"no tests: {PLACE / 'conftest.py'} of the dataset is another's"]
    tested = [name for name in names if (folder / f"test_{name}.py").is_file()]
    fresh = [name for name in names if name not in tested]
    if fresh:
        _take(generated / PLACE, out / PLACE, frozenset(fresh))
        order = GenerateOptions(root=tree.root, out=out, definitions=tuple(fresh))
        generate(order, Divergences(verdicts=None, known=None))
    return [f"{name}: no generated test, the dataset has {PLACE / f'test_{name}.py'}" for name in tested]


def _take(generated: Path, out: Path, names: frozenset[str]) -> None:
    """Copy the classes of some definitions from generated files."""
    for path in sorted(generated.glob("test_*.py")):
        text = path.read_text(encoding="utf-8")
        wanted = {name: block for name, block in classes(text).items() if MARKER in text and name in names}
        if wanted:
            write_text(out / path.name, render(path.stem.removeprefix("test_"), (), wanted))


def joined_tests(path: str, old: bytes, new: bytes) -> bytes | None:
    """A generated file with the classes of both, those that are there as they are; None: one is not generated."""
    before, after = old.decode(errors="replace"), new.decode()
    if MARKER not in before or MARKER not in after or not classes(after):
        return None
    both = classes(after) | classes(before)
    if both == classes(before):
        return old
    return render(Path(path).stem.removeprefix("test_"), (), both).encode()
