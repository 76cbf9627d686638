"""Every causal language model that both SGLang and transformers know, tried: what its kernel calls become.

    PYTHONPATH=src python lab/survey.py --extract-python .venvs/extract/bin/python --out results/survey

Each model is read with transformers' default config and, where that is no real model or lacks fields that SGLang
asks for, with the facts of `survey_facts.json` in addition. Nothing is fetched. Writes survey.md, survey.json and
all definitions as a dataset (`dataset/`).
"""

from __future__ import annotations

import argparse
import json
import re
import resource
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from traceproof.errors import TraceproofError
from traceproof.extract.pipeline import Use, WantedDefinition, collect, definitions_of, unmapped_line
from traceproof.extract.reading import Listing, ReaderEnvironment
from traceproof.models import catalogue
from traceproof.models.catalogue import Parallel
from traceproof.models.drafts import Choice, Draft
from traceproof.models.reading import Reading

PARSER = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
PARSER.add_argument("--extract-python", type=Path, required=True)
PARSER.add_argument("--out", type=Path, required=True, help="folder of survey.md and survey.json")
PARSER.add_argument("--model-type", nargs="*", default=[], help="these alone")
SIZES = re.compile(r"\b(hidden|intermediate) \d+")  # in a kind's name
NO_FIELDS = ("catalogue", "without", "text_config+")  # of a config; they say how one is made
FACTS = Path(__file__).with_name("survey_facts.json")


@dataclass(frozen=True, slots=True)
class Row:
    """One model."""

    model_type: str
    architecture: str
    config: str  # "defaults" of transformers, or "own facts": with those of survey_facts.json
    fields: Mapping[str, Any]  # the config.json
    # by kind of kernel call, how many different ones have a definition, how many have none
    kinds: Mapping[str, Sequence[int]] = field(default_factory=dict)
    described: int = 0  # kernel calls with a definition
    undescribed: tuple[str, ...] = ()  # those without, by what is missing
    disagreed: tuple[str, ...] = ()  # those that the two readings do not have alike, or one does not know
    refusal: str = ""  # why there is no reading; empty: there is one
    definitions: tuple[str, ...] = ()  # names
    seconds: float = 0.0
    peak_mb: int = 0

    @property
    def complete(self) -> bool:
        """Whether every call that has an op_type became a definition."""
        return not self.refusal and not self.disagreed and self.described > 0


def survey(
    listing: Listing, environment: ReaderEnvironment, only: Sequence[str]
) -> tuple[list[Row], list[WantedDefinition]]:
    """Read and describe every model once, those with facts of their own with these; and all definitions."""
    facts: dict[str, dict[str, Any]] = json.loads(FACTS.read_text(encoding="utf-8"))
    base: Mapping[str, Any] = {"architectures": list(listing.architectures)}
    added = {kind: base for kind in facts if kind not in listing.defaults}
    both = {
        kind: config
        for kind, config in {**listing.defaults, **added}.items()
        if config["architectures"][0] in listing.architectures and kind != "*" and (not only or kind in only)
    }
    jobs = [_config(config, facts["*"], facts.get(kind, {})) for kind, config in both.items()]
    readings = environment.read_all([(config, Parallel(1, 1)) for config in jobs])
    found = [
        row(kind, config, reading, own=kind in facts)
        for kind, config, reading in zip(both, jobs, readings, strict=True)
    ]
    wanted, _ = collect(pair for _, pairs in found for pair in pairs)
    names: dict[str, list[str]] = {}
    for item in wanted:
        for use in item.uses:
            names.setdefault(use.model, []).append(item.name)
    rows = [replace(one, definitions=tuple(dict.fromkeys(names.get(one.model_type, ())))) for one, _ in found]
    return rows, wanted


def _config(config: Mapping[str, Any], all_of_them: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """A default config with facts.

    `without` names fields that it does not have, `text_config+` what its language part has in addition,
    `catalogue` a bundled model that stands in the default's place.
    """
    if "catalogue" in own:
        config, all_of_them = catalogue.entries()[own["catalogue"]].config, {}
    kept = {name: value for name, value in config.items() if name not in own.get("without", ())}
    found = {**kept, **all_of_them, **{name: own[name] for name in own if name not in NO_FIELDS}}
    if "text_config+" in own:
        found["text_config"] = {**found["text_config"], **own["text_config+"]}
    return found


def row(
    kind: str, config: Mapping[str, Any], reading: Reading | TraceproofError, *, own: bool
) -> tuple[Row, list[tuple[Draft, Use]]]:
    """What became of one model, and the definitions that it needs."""
    start = Row(kind, config["architectures"][0], "own facts" if own else "defaults", config)
    try:
        if isinstance(reading, TraceproofError):
            raise reading
        found = definitions_of(reading, config, Choice())
    except TraceproofError as error:
        return replace(start, refusal=" ".join([*error.problems[:1], str(error)][0].split())), []
    calls = {(call.kind, call.facts) for call, _ in found.made}
    counted = {name: [count, 0] for name, count in Counter(name for name, _ in calls).items()}
    for item in found.left:
        name = (
            f"{item.class_name} (readings differ)"
            if item.disagreed
            else SIZES.sub(r"\1 n", item.why.partition(":")[0])
        )
        counted.setdefault(name, [0, 0])[1] += 1
    uses = [(draft, Use(kind, (kind,), reading.parallel, call.count)) for call, draft in found.made]
    made = replace(
        start,
        kinds=counted,
        described=found.calls,
        undescribed=tuple(unmapped_line(item) for item in found.left if not item.disagreed),
        disagreed=tuple(unmapped_line(item) for item in found.left if item.disagreed),
        seconds=reading.seconds,
        peak_mb=reading.peak_mb,
    )
    return made, uses


def kinds(rows: Sequence[Row]) -> list[tuple[str, int, int, int]]:
    """Each kind of kernel call: how many different ones have a definition, how many none, in how many models."""
    found: dict[str, list[int]] = {}
    for one in rows:
        for name, (described, without) in one.kinds.items():
            count = found.setdefault(name, [0, 0, 0])
            found[name] = [count[0] + described, count[1] + without, count[2] + 1]
    return sorted(((name, a, b, c) for name, (a, b, c) in found.items()), key=lambda item: (-item[3], item[0]))


def table(rows: Sequence[Row]) -> str:
    """Markdown."""
    lines = ["| architecture | model_type | config | described | no op_type | readings differ | why |"]
    lines += ["|---|---|---|---|---|---|---|"]
    for one in sorted(rows, key=lambda row: (row.architecture, row.model_type)):
        missing = [name for name, (_, without) in one.kinds.items() if without]
        why = one.refusal or "; ".join(one.disagreed[:3]) or ", ".join(missing)
        numbers = ("-",) * 3 if one.refusal else (one.described, len(one.undescribed), len(one.disagreed))
        cells = [one.architecture, one.model_type, one.config, *map(str, numbers), why.replace("|", "/")[:300]]
        lines.append(f"| {' | '.join(cells)} |")
    lines += ["", "| kind of kernel call | with a definition | without | models |", "|---|---:|---:|---:|"]
    lines += [f"| {' | '.join(map(str, item))} |" for item in kinds(rows)]
    lines += ["", "| model_type | described | not described |", "|---|---|---|"]
    for one in sorted(rows, key=lambda row: row.model_type):
        made = ", ".join(f"{count} {kind}" for kind, (count, _) in one.kinds.items() if count)
        left = ", ".join(f"{count} {kind}" for kind, (_, count) in one.kinds.items() if count)
        lines.append(f"| {one.model_type} | {made} | {left} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Survey, and say how many."""
    options = PARSER.parse_args()
    environment = ReaderEnvironment(options.extract_python.absolute())
    started = time.monotonic()
    listing = environment.listing()
    rows, wanted = survey(listing, environment, options.model_type)
    seconds = time.monotonic() - started
    for kind, why in listing.without_defaults.items():
        sys.stdout.write(f"not surveyed, transformers makes no default config: {kind}: {why}\n")
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "survey.json").write_text(json.dumps([asdict(one) for one in rows], indent=1) + "\n")
    (options.out / "survey.md").write_text(table(rows))
    for item in wanted:
        made = item.definition()
        file = options.out / "dataset" / "definitions" / made.op_type / f"{made.name}.json"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(made.as_json(), indent=2) + "\n")
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss // 1024
    complete = {one.architecture for one in rows if one.complete}
    everything = {one.architecture for one in rows}
    sys.stdout.write(
        f"{len(rows)} models of {len(everything)} architectures: {len(complete)} architectures complete, "
        f"{sum(bool(one.refusal) for one in rows)} models refused; {seconds:.0f} s, {peak} MB\n"
    )


if __name__ == "__main__":
    main()
