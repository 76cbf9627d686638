"""A stack's package taken from a checkout, instead of the one that is installed in the stack's environment.

The environment still gives everything else: torch, the compilers, the package's own requirements.
"""

import shutil
from pathlib import Path

import traceproof
from traceproof.checkouts.gitrun import Git
from traceproof.errors import TraceproofError
from traceproof.stacks import STACKS
from traceproof.store import write_text

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
