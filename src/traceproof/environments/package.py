"""What a stack is, and its package taken from a checkout instead of the one that its environment has.

The environment still gives everything else: torch, the compilers, the package's own requirements.
"""

import json
import shutil
from pathlib import Path

import traceproof
from traceproof.checkouts.gitrun import Git
from traceproof.checkouts.tree import Tree
from traceproof.environments.building import Installation, probe
from traceproof.errors import TraceproofError
from traceproof.files import sealed, write_text
from traceproof.ops.registry import ground_truth, known
from traceproof.stacks import PACKAGES, STACKS, truths_of

PLACES = ("", "src", "python")  # where repositories keep their package


def importable(checkout: Path, stack: str, scratch: Path) -> Path:
    """A folder of links from which a checkout's package can be imported, its kernels' sources and traceproof too.

    traceproof is among them because workers see one folder beside their interpreter's own: the one it lies in.
    Raises TraceproofError: the checkout holds no such package.
    """
    package, origin = STACKS[stack].package, STACKS[stack].origin
    checkout = checkout.absolute()
    place = next((checkout / one for one in PLACES if (checkout / one / package / "__init__.py").is_file()), None)
    if place is None:
        raise TraceproofError(f"{checkout} holds no package {package}")
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    (scratch / "traceproof").symlink_to(Path(traceproof.__file__).resolve().parent)
    about = list(place.glob("*.dist-info"))
    for one in about:
        (scratch / one.name).symlink_to(one)
    if not about:
        _describe(checkout, stack, scratch)
    data = {name: checkout / path for name, path in (origin.data if origin else {}).items()}
    if (place / package / "data").exists() or not any(path.is_dir() for path in data.values()):
        (scratch / package).symlink_to(place / package)
        return scratch
    (scratch / package / "data").mkdir(parents=True)
    for entry in (place / package).iterdir():
        (scratch / package / entry.name).symlink_to(entry)
    for name, path in data.items():
        (scratch / package / "data" / name).symlink_to(path)
    return scratch


def _describe(checkout: Path, stack: str, scratch: Path) -> None:
    """Say which version the package is, where it was never built: its commit, or that it is nobody's release."""
    label = "edited"
    if (checkout / ".git").exists():
        label = f"g{Git(checkout).local('rev-parse', '--short=12', 'HEAD').strip()}"
    name = STACKS[stack].distribution
    folder = scratch / f"{name.replace('-', '_')}-0+{label}.dist-info"
    write_text(folder / "METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 0+{label}\n")


def record_stack(stack: Installation, checkout: Path | None, *, linked: Path, out: Path) -> None:
    """Write a stack's record. Its digest is that of versions, device and the content of its packages.

    Where a checkout takes the place of the installed package, `linked`, from where it is imported, is written.
    Raises TraceproofError: the interpreter can not be used, or the checkout holds no such package.
    """
    path = [importable(checkout, stack.name, linked)] if checkout else []
    record = {**probe(stack, root=Path.cwd(), path=path), "cuda_home": stack.cuda_home}
    write_text(out, sealed(json.dumps(record, indent=1)))


def stack_of(tree: Tree) -> str | None:
    """The stack whose package a tree holds; None: it is none of theirs."""
    for stack, package in PACKAGES.items():
        if any(str(Path(place, package, "__init__.py")) in tree.files for place in PLACES):
            return stack
    return None


def source_paths(stack: str) -> list[str]:
    """Where a repository may hold what is imported and compiled of a stack's package."""
    package, origin = STACKS[stack].package, STACKS[stack].origin
    return [*(str(Path(place, package)) for place in PLACES), *(origin.data.values() if origin else ())]


def of_package(stack: str, name: str) -> bool:
    """Whether a repository's file is among them."""
    return any(name == path or name.startswith(f"{path}/") for path in source_paths(stack))


def op_types(stack: str) -> list[str]:
    """The op_types that a ground truth of a stack has adapters for."""
    return [name for name in known() if any(ground_truth(name, truth) for truth in truths_of(stack))]
