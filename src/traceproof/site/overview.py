"""Data of the overview: each definition by ground truth, GPU and version, in tables of words and their places."""

from collections.abc import Mapping, Sequence
from typing import Any

from traceproof.actors.registry import ACTORS
from traceproof.pipeline.records import ORACLE
from traceproof.reasons import Skip, Verdict
from traceproof.site.tally import Place, Tally
from traceproof.site.view import View
from traceproof.untrusted.names import path_part

NOW = "this run"


class Words:
    """Words by the order in which they are met."""

    def __init__(self, *first: str) -> None:
        self._places = {word: place for place, word in enumerate(first)}

    def place(self, word: str) -> int:
        """Place of a word."""
        return self._places.setdefault(word, len(self._places))

    @property
    def all(self) -> list[str]:
        """All of them."""
        return list(self._places)


class Overview:
    """Collects a row per definition and one per result, beside `earlier` states; `tables.js` makes tables."""

    def __init__(self, earlier: Sequence[str]) -> None:
        self._earlier = earlier
        self._words: Mapping[str, Words] = {
            "actors": Words(*(name for name in ACTORS if name != ORACLE)),
            "states": Words(NOW),
            **{name: Words() for name in ("devices", "versions", "verdicts", "reasons", "op_types", "outcomes")},
        }
        self._definitions: list[list[Any]] = []
        self._results: list[list[Any]] = []

    def add(self, view: View) -> None:
        """Add a definition."""
        words, name = self._words, view.name
        slug = path_part(name)
        places = [words["op_types"].place(view.op_type), words["outcomes"].place(view.outcome)]
        self._definitions.append([name, *places, *([slug] if slug != name else [])])
        for place, tally in view.places.items():
            self._result(NOW, place, tally)
        for state, place, tally in view.trend:
            if state < len(self._earlier):
                self._result(self._earlier[state], place, tally)

    def _result(self, state: str, place: Place, tally: Tally) -> None:
        if tally.verdict == Verdict.SKIP and tally.reason == Skip.NO_ADAPTER:
            return  # it has nothing to do with the definition
        words = self._words
        margin = None if tally.margin is None else float(f"{tally.margin:.2g}")
        self._results.append(
            [
                len(self._definitions) - 1,
                words["actors"].place(place.actor),
                words["devices"].place(place.device),
                words["versions"].place(place.version),
                words["states"].place(state),
                words["verdicts"].place(tally.verdict),
                margin,
                words["reasons"].place("" if tally.verdict == Verdict.PASS else tally.reason),
            ]
        )

    def data(self) -> dict[str, Any]:
        """All of it, as JSON."""
        words = {name: found.all for name, found in self._words.items()}
        return words | {"definitions": self._definitions, "results": self._results}
