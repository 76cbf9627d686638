"""A model's config.json: where it comes from, and its fields with their bounds checked."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from traceproof.errors import TraceproofError

LARGEST = 1 << 24  # no count or width of a model comes near; a larger number is a slip


def load(path: Path) -> dict[str, Any]:
    """Read a config.json, or the one in a folder. Raises TraceproofError: it is missing, damaged or no model's."""
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
    """Only config.json of a HuggingFace repository at a revision. Raises TraceproofError: it can not be had."""
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

    def named(self, names: Sequence[str]) -> str:
        """The first of `names` that is there, else the first of all."""
        return next((name for name in names if self._config.get(name) is not None), names[0])

    def count(self, names: Sequence[str], *, needed: bool = True) -> int | None:
        """An integer of at least 1; None: it is wrong, which is noted, absent, or differs from layer to layer."""
        name = self.named(names)
        value: Any = self._config.get(name)
        if isinstance(value, list) or (value in (None, 0) and not needed and value is not False):
            return None
        if value is None:
            self.problems.append(f"{' or '.join(names)}: missing; allowed: an integer from 1")
            return None
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= LARGEST:
            self.problems.append(f"{name}: {value!r}; allowed: an integer from 1")
            return None
        return value

    def positive(self, name: str) -> None:
        """Note a problem unless a number above 0 is there, or nothing."""
        value: Any = self._config.get(name)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int | float) or value <= 0):
            self.problems.append(f"{name}: {value!r}; allowed: a number above 0")

    def divides(self, what: str, divisor: int, names: Sequence[str], value: int | None) -> None:
        """Note a problem unless `divisor` (`what`) divides the field."""
        if value is not None and value % divisor:
            allowed = ", ".join(str(number) for number in range(1, value + 1) if value % number == 0)
            self.problems.append(
                f"{what}: {divisor} does not divide {self.named(names)} = {value}; allowed: {allowed}"
            )
