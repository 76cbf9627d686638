"""A model's config.json: where it comes from, and its fields with their bounds checked."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from traceproof.errors import TraceproofError

LARGEST = 1 << 24  # no count or width of a model comes near; a larger number is a slip


def load(path: Path) -> dict[str, Any]:
    """Read a config.json, or the one inside a folder.

    Raises:
        TraceproofError: it is missing, cut off, no JSON object, or names no architecture.
    """
    file = path / "config.json" if path.is_dir() else path
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise TraceproofError(f"{file} cannot be read: {error}", todo="Give a model's config.json.") from error
    except json.JSONDecodeError as error:
        what = f"{file} is not JSON: {error.msg} at line {error.lineno}, column {error.colno}"
        raise TraceproofError(what, todo="The file may be cut off; fetch it again.") from error
    if not isinstance(value, dict):
        raise TraceproofError(f"{file} holds a {type(value).__name__}, not an object", todo="Give a config.json.")
    names = value.get("architectures")
    if not (isinstance(names, list) and names and all(isinstance(name, str) for name in names)):
        what = f"{file}: architectures is {names!r}; a list with the name of one model class is needed"
        raise TraceproofError(what, todo="`--list` names the architectures that can be read.")
    return value


def fetch(repository: str, revision: str | None) -> dict[str, Any]:
    """The config.json of a HuggingFace repository at a revision; only that one file is fetched.

    Raises:
        TraceproofError: it can not be fetched.
    """
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return load(Path(hf_hub_download(repository, "config.json", revision=revision)))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        first = str(error).strip().splitlines()[0]
        what = f"config.json of {repository} at {revision or 'its main revision'} cannot be fetched: {first}"
        raise TraceproofError(what, todo="Check the name and your access, or give --config PATH.") from error


class Fields:
    """Reads fields of a config.json and remembers everything that is wrong with them."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._config = config
        self.problems: list[str] = []

    def has(self, name: str) -> bool:
        """Whether the field is there and not null."""
        return self._config.get(name) is not None

    def count(self, *names: str, default: int | None = None) -> int:
        """The first of `names` that is there, an integer of at least 1; 1 stands in for a wrong one."""
        return int(self._number(names, default, (int,), lambda value: 1 <= value <= LARGEST, "an integer from 1"))

    def number(self, *names: str, default: float | None = None) -> float:
        """The first of `names` that is there, a positive number."""
        return float(self._number(names, default, (int, float), lambda value: value > 0, "a number above 0"))

    def flag(self, name: str, *, default: bool) -> bool:
        """A boolean field."""
        value = self._config.get(name, default)
        if not isinstance(value, bool):
            self.problems.append(f"{name}: {value!r}; allowed: true, false")
            return default
        return value

    def text(self, name: str, *, default: str) -> str:
        """A text field."""
        value = self._config.get(name, default)
        if not isinstance(value, str):
            self.problems.append(f"{name}: {value!r}; allowed: a string")
            return default
        return value

    def items(self, name: str) -> list[Any]:
        """A list field; empty where it is not there."""
        value = self._config.get(name) or []
        if not isinstance(value, list):
            self.problems.append(f"{name}: {value!r}; allowed: a list")
            return []
        return value

    def mapping(self, name: str) -> Mapping[str, Any]:
        """An object field; empty where it is not there."""
        value = self._config.get(name) or {}
        if not isinstance(value, dict):
            self.problems.append(f"{name}: {value!r}; allowed: an object")
            return {}
        return value

    def divides(self, what: str, divisor: int, name: str, value: int) -> None:
        """Note a problem unless `divisor` (`what`) divides the field `name`."""
        told = any(problem.startswith((f"{name}: ", f"{what}: ")) for problem in self.problems)
        if value % divisor and (not told or what in ("tp", "ep")):
            allowed = ", ".join(str(number) for number in range(1, value + 1) if value % number == 0)
            self.problems.append(f"{what}: {divisor} does not divide {name} = {value}; allowed: {allowed}")

    def check(self, where: str) -> None:
        """Raise what was noted.

        Raises:
            TraceproofError: some field is wrong.
        """
        if self.problems:
            problems = list(dict.fromkeys(self.problems))
            raise TraceproofError(f"{where} cannot be read", problems=problems, todo="Correct the fields named.")

    def _number(
        self,
        names: tuple[str, ...],
        default: float | None,
        types: tuple[type[int], ...] | tuple[type[int], type[float]],
        fits: Callable[[float], bool],
        allowed: str,
    ) -> int | float:
        for name in names:
            value: Any = self._config.get(name)
            if value is None:
                continue
            number: int | float = value if isinstance(value, types) and not isinstance(value, bool) else -1
            if not fits(number):
                self.problems.append(f"{name}: {value!r}; allowed: {allowed}")
                return 1
            return number
        if default is not None:
            return default
        self.problems.append(f"{' or '.join(names)}: missing; allowed: {allowed}")
        return 1
