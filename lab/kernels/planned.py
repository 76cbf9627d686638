"""A package's API whose objects are planned by a first call, so that a CUDA graph captures the rest."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any


class PlannedOnce:
    """Makes and plans objects of a package in a first round of calls; in the next, hands them out in order.

    What users of such packages do: plan by the sizes of a batch, and capture the run.
    """

    def __init__(self, api: Mapping[str, Any]) -> None:
        self._own = api
        self._made: list[Any] = []
        self._place: int | None = None

    @property
    def plans(self) -> bool:
        """Whether an object was made that is planned before it is run."""
        return any(hasattr(one, "plan") for one in self._made)

    def api(self) -> dict[str, Any]:
        """The API of the round."""
        return {key: _Class(self, own) if isinstance(own, type) else own for key, own in self._own.items()}

    def again(self) -> None:
        """Begin the next round."""
        self._place = 0

    def make(self, kind: Callable[..., Any], *args: Any, **options: Any) -> Any:  # noqa: ANN401 - a package's
        """An object of a class: a new one in the first round, then the one that was made at this place."""
        if self._place is None:
            self._made.append(kind(*args, **options))
            return self._made[-1]
        found = _Planned(self._made[self._place])
        self._place += 1
        return found


class _Class:
    """A class of a package, whose objects `PlannedOnce` makes."""

    def __init__(self, once: PlannedOnce, own: type) -> None:
        self._once, self._own = once, own

    def __call__(self, *args: Any, **options: Any) -> Any:  # noqa: ANN401 - a package's
        return self._once.make(self._own, *args, **options)

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - a package's
        return getattr(self._own, name)


class _Planned:
    """An object whose plan stands."""

    def __init__(self, value: Any) -> None:  # noqa: ANN401 - a package's
        self._value = value

    def plan(self, *args: Any, **options: Any) -> None:  # noqa: ANN401 - whatever it takes
        """Do nothing: it has been planned by the same sizes."""

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - a package's
        return getattr(self._value, name)
