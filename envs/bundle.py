"""Write what environments are installed from to a folder, for a machine without an index (`nox -s bundle`)."""

from __future__ import annotations

import argparse
import hashlib
import platform
import re
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from packaging.markers import Marker

from traceproof import programs
from traceproof.checkouts.packages import download_sdist
from traceproof.environments.building import CPU_WHEELS, PINS
from traceproof.errors import TraceproofError
from traceproof.stacks import ENVIRONMENTS, KERNELS, UNHASHED

ROOT = Path(__file__).resolve().parent.parent
DRIVER = "driver"
PARSER = argparse.ArgumentParser(description=__doc__)
PARSER.add_argument("--python", required=True, metavar="X.Y", help="version of Python there, e.g. 3.12")
PARSER.add_argument("--out", type=Path, required=True, help="folder that gets the files")
PARSER.add_argument(
    "--stack",
    action="append",
    choices=(DRIVER, *ENVIRONMENTS),
    help="more than once for several; else what a GPU machine uses",
)


def main() -> int:
    """Exit code 2: a file can not be had."""
    options = PARSER.parse_args()
    for name in options.stack or (DRIVER, *KERNELS):
        try:
            sources = bundle(name, options.out, root=ROOT, python=options.python)
        except TraceproofError as error:
            sys.stderr.write(f"{error}\n")
            return 2
        built = f"; built where they are installed: {', '.join(sources)}" if sources else ""
        sys.stdout.write(f"{name:11} all of its packages are in {options.out}{built}\n")
    return 0


# Of wheels, as their names end; the newest is Debian 13's. SGLang's wheel wants 2.34.
GLIBC = ("2014", *(f"_2_{minor}" for minor in range(5, 42)))
BUILDERS = ("setuptools==", "wheel==")  # what a source package is built with, pinned with the driver
BUILDER_PINS = "driver.txt"
NO_WHEEL = re.compile(r"No matching distribution found for (\S+==\S+)")


@dataclass(frozen=True, slots=True)
class PinnedPackage:
    """A package that an environment names, `name==version`, and the sha256 digests of its files if it has them."""

    pin: str
    digests: tuple[str, ...]

    def line(self) -> str:
        """The pin as pip reads it."""
        return " ".join([self.pin, *(f"--hash=sha256:{digest}" for digest in self.digests)])


def bundle(environment: str, folder: Path, *, root: Path, python: str) -> list[str]:
    """Download what an environment's pins name for a version of Python; gives the pins that travel as source.

    A package without a wheel keeps its pinned digest that way, and what builds it travels too. What the folder
    holds already stays. Raises TraceproofError: a file can not be had.
    """
    folder.mkdir(parents=True, exist_ok=True)
    wanted = list(pins(root / PINS / f"{environment}.txt", python=python))
    sources: list[PinnedPackage] = []
    while True:
        said = _download(wanted, folder, python=python, cpu=environment in UNHASHED)
        if said is None:
            break
        absent = NO_WHEEL.findall("\n".join(said))
        lacking = [pin for pin in wanted if pin.pin in absent]
        if not lacking or not lacking[0].digests:
            raise TraceproofError(
                f"the packages of {environment!r} can not be had for Python {python}",
                problems=said,
                todo="Check the package index that pip is set up for.",
            )
        sources += lacking
        wanted = [pin for pin in wanted if pin not in lacking]
    for source in sources:
        _fetch_source(source, folder)
    if sources:
        builders = [pin for pin in pins(root / PINS / BUILDER_PINS, python=python) if pin.pin.startswith(BUILDERS)]
        _download(builders, folder, python=python, cpu=False)
    return [source.pin for source in sources]


def pins(path: Path, *, python: str) -> Iterator[PinnedPackage]:
    """The pins of a file that hold on this machine's kind of Linux for a version of Python.

    pip would judge their conditions by the Python that runs it.
    """
    place = {"python_version": python, "python_full_version": f"{python}.0"}
    for entry in re.split(r"\n(?=\S)", path.read_text(encoding="utf-8").strip()):
        if entry.startswith("#"):
            continue
        named, *hashes = entry.replace("\\\n", " ").split("--hash=sha256:")
        pin, _, condition = named.partition(";")
        if not condition.strip() or Marker(condition).evaluate(place):
            yield PinnedPackage(pin.strip(), tuple(digest.strip() for digest in hashes))


def _download(wanted: Sequence[PinnedPackage], folder: Path, *, python: str, cpu: bool) -> list[str] | None:
    """Fetch wheels with pip; None: all are there, else the last lines that it says.

    The CPU's torch is looked for at PyTorch's own index too.
    """
    platforms = ["any", *(f"manylinux{glibc}_{platform.machine()}" for glibc in GLIBC)]
    with tempfile.NamedTemporaryFile("w", suffix=".txt", encoding="utf-8") as file:
        file.write("\n".join(pin.line() for pin in wanted) + "\n")
        file.flush()
        command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--quiet", "--no-deps"]
        command += ["--only-binary=:all:", "--implementation", "cp", "--python-version", python]
        command += [part for name in platforms for part in ("--platform", name)]
        command += ["--dest", str(folder), "--requirement", file.name]
        attempts = [command, [*command, "--extra-index-url", CPU_WHEELS]] if cpu else [command]
        for attempt in attempts:
            done = programs.run(attempt)
            if done.returncode == 0:
                return None
    return programs.last_lines(done.stderr)


def _fetch_source(source: PinnedPackage, folder: Path) -> None:
    name, _, version = source.pin.partition("==")
    file = download_sdist(name, version, folder)
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    if digest not in source.digests:
        file.unlink()
        problems = [f"its sha256 is {digest}"]
        todo = "Find out why first: the pins name the public registry's files."
        raise TraceproofError(f"{file.name} is not the file that was pinned", problems=problems, todo=todo)


if __name__ == "__main__":
    sys.exit(main())
