"""Package versions that a statement is true for: PEP 440 specifiers, held against an environment's versions."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches

from packaging.requirements import InvalidRequirement, Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from traceproof.environments.probe import PACKAGES
from traceproof.errors import TraceproofError

EXAMPLE = "flashinfer-python<0.7"


@dataclass(frozen=True, slots=True)
class Window:
    """Versions of one package."""

    package: str
    specifiers: SpecifierSet

    def __str__(self) -> str:
        return f"{self.package}{self.specifiers}"

    def holds(self, versions: Mapping[str, str]) -> bool | None:
        """Whether the package's version is inside; None: it is a checkout's, which has no released version.

        Raises TraceproofError: there is no such package among `versions`, or its version is not one of PEP 440.
        """
        found = versions.get(self.package)
        if found is None:
            held = ", ".join(sorted(versions)) or "nothing known"
            raise TraceproofError(f"versions: {self}: that environment holds no {self.package}, but {held}")
        try:
            version = Version(found)
        except InvalidVersion as error:
            raise TraceproofError(f"versions: {self}: {found!r} is no version of PEP 440") from error
        if version.public == "0":  # bumps.source describes what was never released so
            return None
        return self.specifiers.contains(version, prereleases=True)


def windows(given: object) -> tuple[Window, ...]:
    """Read one specifier, or a list of them that all have to hold.

    Raises ValueError: one is not of the form `package<version`, or names a package that no stack's record has.
    """
    texts = [given] if isinstance(given, str) else given
    if not isinstance(texts, list) or not texts or not all(isinstance(text, str) for text in texts):
        raise ValueError(f"{given!r} is neither a specifier nor a list of some; write e.g. {EXAMPLE}")
    return tuple(map(_window, texts))


def _window(text: str) -> Window:
    try:
        read = Requirement(text)
    except InvalidRequirement as error:
        raise ValueError(
            f"{text!r} is no specifier ({str(error).splitlines()[0]}); write e.g. {EXAMPLE}"
        ) from error
    if not read.specifier or read.extras or read.marker is not None or read.url is not None:
        raise ValueError(f"{text!r} must be a package and versions of it, nothing else; write e.g. {EXAMPLE}")
    name = canonicalize_name(read.name)
    if name not in PACKAGES:
        close = get_close_matches(name, PACKAGES, n=1)
        hint = f"did you mean {close[0]!r}? " if close else ""
        raise ValueError(f"{text!r} names an unknown package; {hint}known: {', '.join(PACKAGES)}")
    return Window(name, read.specifier)


def said(found: Iterable[Window]) -> str:
    """` (flashinfer-python<0.7)`; empty where nothing limits the versions."""
    text = ", ".join(map(str, found))
    return f" ({text})" if text else ""
