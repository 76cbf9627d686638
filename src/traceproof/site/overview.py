"""Data of the overview: each definition by ground truth, GPU and version, in tables of words and their places."""

from collections.abc import Sequence
from typing import Any

from traceproof.names import path_part
from traceproof.reasons import Skip, Verdict
from traceproof.run.implementations import IMPLEMENTATIONS
from traceproof.site.tally import Place, Tally
from traceproof.site.view import View

NOW = "this run"


class Overview:
    """Collects a row per definition and one per result, beside `earlier` states; `tables.js` makes tables."""

    def __init__(self, earlier: Sequence[str]) -> None:
        self._earlier = earlier
        # of each kind, words in the order in which they are met
        self._words: dict[str, list[str]] = {
            "actors": list(IMPLEMENTATIONS),
            "states": [NOW],
            **{name: [] for name in ("devices", "versions", "verdicts", "reasons", "op_types", "outcomes")},
        }
        self._definitions: list[list[Any]] = []
        self._results: list[list[Any]] = []

    def add(self, view: View) -> None:
        """Add a definition."""
        name, slug = view.name, path_part(view.name)
        places = [self._place("op_types", view.op_type), self._place("outcomes", view.outcome)]
        self._definitions.append([name, *places, *([slug] if slug != name else [])])
        for place, tally in view.places.items():
            self._result(NOW, place, tally)
        for state, place, tally in view.trend:
            if state < len(self._earlier):
                self._result(self._earlier[state], place, tally)

    def _result(self, state: str, place: Place, tally: Tally) -> None:
        if tally.verdict == Verdict.SKIP and tally.reason == Skip.NO_ADAPTER:
            return  # it has nothing to do with the definition
        margin = None if tally.margin is None else float(f"{tally.margin:.2g}")
        reason = "" if tally.verdict == Verdict.PASS else tally.reason
        words = {"actors": place.actor, "devices": place.device, "versions": place.version, "states": state}
        places = [self._place(*one) for one in (words | {"verdicts": tally.verdict, "reasons": reason}).items()]
        self._results.append([len(self._definitions) - 1, *places[:-1], margin, places[-1]])

    def _place(self, kind: str, word: str) -> int:
        """Place of a word among those of its kind."""
        words = self._words[kind]
        if word not in words:
            words.append(word)
        return words.index(word)

    def data(self) -> dict[str, Any]:
        """All of it, as JSON."""
        return self._words | {"definitions": self._definitions, "results": self._results}
