"""Every causal language model that both SGLang and transformers know, tried: what its kernel calls become.

    PYTHONPATH=src python lab/survey.py --extract-python .venvs/extract/bin/python --out results/survey

Each model is read with transformers' default config and, where that is no real model or lacks fields that SGLang
asks for, with the facts of `survey_facts.json` in addition. Nothing is fetched. Writes survey.md and survey.json.
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from traceproof.errors import TraceproofError
from traceproof.extract.pipeline import Choices, definitions_of, told
from traceproof.extract.reading import Environment, Listing
from traceproof.models import catalogue
from traceproof.models.catalogue import Parallel
from traceproof.models.reading import Reading

PARSER = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
PARSER.add_argument("--extract-python", type=Path, required=True)
PARSER.add_argument("--out", type=Path, required=True, help="folder of survey.md and survey.json")
PARSER.add_argument("--model-type", nargs="*", default=[], help="these alone")
FACTS = Path(__file__).with_name("survey_facts.json")


@dataclass(frozen=True, slots=True)
class Row:
    """One model.

    Attributes:
        config: "defaults" of transformers, or "own facts": with those of survey_facts.json.
        described: kernel calls with a definition.
        undescribed: those without, by what is missing.
        disagreed: those that the two readings do not have alike, or one does not know.
        refusal: why there is no reading; empty: there is one.
        definitions: names.
    """

    model_type: str
    architecture: str
    config: str
    described: int = 0
    undescribed: tuple[str, ...] = ()
    disagreed: tuple[str, ...] = ()
    refusal: str = ""
    definitions: tuple[str, ...] = ()
    seconds: float = 0.0
    peak_mb: int = 0

    @property
    def complete(self) -> bool:
        """Whether every call that has an op_type became a definition."""
        return not self.refusal and not self.disagreed and self.described > 0


def survey(listing: Listing, environment: Environment, only: Sequence[str]) -> list[Row]:
    """Read and describe every model once, those with facts of their own with these."""
    facts: dict[str, dict[str, Any]] = json.loads(FACTS.read_text(encoding="utf-8"))
    both = {
        kind: config
        for kind, config in listing.defaults.items()
        if config["architectures"][0] in listing.architectures and (not only or kind in only)
    }
    jobs = [_config(config, facts["*"], facts.get(kind, {})) for kind, config in both.items()]
    readings = environment.read_all([(config, Parallel(1, 1)) for config in jobs])
    return [
        row(kind, config, reading, own=kind in facts)
        for kind, config, reading in zip(both, jobs, readings, strict=True)
    ]


def _config(config: Mapping[str, Any], all_of_them: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """A default config with facts.

    `without` names fields that it does not have, `text_config+` what its language part has in addition,
    `catalogue` a bundled model in its place.
    """
    if "catalogue" in own:
        return dict(catalogue.entries()[own["catalogue"]].config)
    kept = {name: value for name, value in config.items() if name not in own.get("without", ())}
    found = {**kept, **all_of_them, **{name: own[name] for name in own if name not in {"without", "text_config+"}}}
    if "text_config+" in own:
        found["text_config"] = {**found["text_config"], **own["text_config+"]}
    return found


def row(kind: str, config: Mapping[str, Any], reading: Reading | TraceproofError, *, own: bool) -> Row:
    """What became of one model."""
    start = Row(kind, config["architectures"][0], "own facts" if own else "defaults")
    try:
        if isinstance(reading, TraceproofError):
            raise reading
        found = definitions_of(kind, reading, config, Choices())
    except TraceproofError as error:
        return replace(start, refusal=" ".join([*error.problems[:1], str(error)][0].split()))
    return replace(
        start,
        described=found.calls,
        undescribed=tuple(told(item) for item in found.left if not item.disagreed),
        disagreed=tuple(told(item) for item in found.left if item.disagreed),
        definitions=tuple(dict.fromkeys(draft.name for _, draft in found.made)),
        seconds=reading.seconds,
        peak_mb=reading.peak_mb,
    )


def kinds(rows: Sequence[Row]) -> Counter[str]:
    """How often each kind of call has no op_type, over all models."""
    return Counter(text.partition(": ")[2].partition(":")[0] for one in rows for text in one.undescribed)


def table(rows: Sequence[Row]) -> str:
    """Markdown."""
    lines = ["| architecture | model_type | config | described | no op_type | readings differ | why |"]
    lines += ["|---|---|---|---|---|---|---|"]
    for one in sorted(rows, key=lambda row: (row.architecture, row.model_type)):
        why = one.refusal or "; ".join(one.disagreed[:3]) or ", ".join(kinds([one]))
        numbers = ("-",) * 3 if one.refusal else (one.described, len(one.undescribed), len(one.disagreed))
        cells = [one.architecture, one.model_type, one.config, *map(str, numbers), why.replace("|", "/")[:300]]
        lines.append(f"| {' | '.join(cells)} |")
    lines += ["", "| call without an op_type | in modules of these models |", "|---|---|"]
    lines += [f"| {kind} | {count} |" for kind, count in kinds(rows).most_common()]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Survey, and say how many."""
    options = PARSER.parse_args()
    environment = Environment(options.extract_python.absolute())
    started = time.monotonic()
    listing = environment.listing()
    rows = survey(listing, environment, options.model_type)
    seconds = time.monotonic() - started
    for kind, why in listing.without_defaults.items():
        sys.stdout.write(f"not surveyed, transformers makes no default config: {kind}: {why}\n")
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "survey.json").write_text(json.dumps([asdict(one) for one in rows], indent=1) + "\n")
    (options.out / "survey.md").write_text(table(rows))
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss // 1024
    complete = {one.architecture for one in rows if one.complete}
    everything = {one.architecture for one in rows}
    sys.stdout.write(
        f"{len(rows)} models of {len(everything)} architectures: {len(complete)} architectures complete, "
        f"{sum(bool(one.refusal) for one in rows)} models refused; {seconds:.0f} s, {peak} MB\n"
    )


if __name__ == "__main__":
    main()
