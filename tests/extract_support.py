"""Golden readings for the extraction tests: what SGLang said of a model, stored once a supported version."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from traceproof.extract import pipeline
from traceproof.extract.pipeline import Use, drafts
from traceproof.extract.reading import parse
from traceproof.models.drafts import Choice, Draft
from traceproof.models.reading import Reading

GOLDEN = sorted((Path(__file__).parent / "extract_golden").glob("*.json"))


def golden(path: Path) -> dict[str, Any]:
    """The stored file."""
    value: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return value


def reading_of(path: Path) -> Reading:
    """The stored reading."""
    stored = golden(path)
    costs = {"experts": "routed only", "seconds": 0.0, "peak_mb": 0, "transformers": "", "torch": ""}
    return parse(stored | costs | {"sglang": stored["sglang"][-1]})


def named(name: str) -> Path:
    """The stored file of a model."""
    return min((path for path in GOLDEN if path.stem.startswith(name)), key=lambda path: len(path.stem))


def drafts_of(path: Path, *, per_rank: bool = False) -> dict[str, Draft]:
    """A stored model's definitions by name."""
    calls, _ = pipeline.from_reading(reading_of(path))
    made, _ = drafts(pipeline.joined(calls), Choice(per_rank=per_rank))
    return {draft.name: draft for _, draft in made}


def uses_of(path: Path, model: str) -> list[tuple[Draft, Use]]:
    """A stored model's definitions with their uses."""
    reading = reading_of(path)
    calls, _ = pipeline.from_reading(reading)
    made, _ = drafts(pipeline.joined(calls), Choice())
    return [(draft, Use(model, (model,), reading.parallel, call.count)) for call, draft in made]
