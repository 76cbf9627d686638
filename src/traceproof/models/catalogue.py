"""Bundled models: the facts of their config.json that decide shapes, and the parallelism they are usually run at.

They stand in catalogue.json. Facts only, no text of the original files; `modules_to_not_convert` is written with
`*` for the layer number and expanded on reading.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple


class Parallel(NamedTuple):
    """Tensor parallel ranks, over how many of them experts are spread, and groups with attention of their own."""

    tp: int
    ep: int
    dp: int = 1

    @property
    def attention(self) -> int:
        """Ranks that attention is split over."""
        return self.tp // self.dp

    def __str__(self) -> str:
        """Say `tp8 ep8 dp8`, the last where attention is spread."""
        return f"tp{self.tp} ep{self.ep}" + (f" dp{self.dp}" if self.dp > 1 else "")


@dataclass(frozen=True, slots=True)
class BundledModel:
    """A bundled model."""

    slug: str  # its name on the command line, with underscores
    title: str  # its name for people
    tags: tuple[str, ...]  # the dataset's `model:` tags of it
    aliases: tuple[str, ...]  # its family, where others of that are bundled, too
    repository: str  # on the HuggingFace Hub
    parallel: tuple[Parallel, ...]  # its usual parallelism, used when none is asked for
    config: Mapping[str, Any]  # what its config.json says


@cache
def entries() -> Mapping[str, BundledModel]:
    """All bundled models by slug, sorted."""
    found = {}
    for slug, raw in json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8")).items():
        config = raw["config"]
        quantisation = config.get("quantization_config", {})
        if "modules_to_not_convert" in quantisation:
            names = []
            for name in quantisation["modules_to_not_convert"]:
                layers = range(config["num_hidden_layers"]) if "*" in name else (0,)
                names += [name.replace("*", str(layer)) for layer in layers]
            config |= {"quantization_config": quantisation | {"modules_to_not_convert": names}}
        parallel = tuple(Parallel(**item) for item in raw["parallel"])
        found[slug] = BundledModel(
            slug=slug,
            title=raw["title"],
            tags=tuple(raw["tags"]),
            aliases=tuple(raw.get("aliases", ())),
            repository=raw["repository"],
            parallel=parallel,
            config=MappingProxyType(config),
        )
    return MappingProxyType(found)


def slug_of(name: str) -> str:
    """The slug of the bundled model that `deepseek-v3`, `DeepSeek_V3` or `deepseek-r1` names; else `name`.

    A tag of a model counts as its name, and its family does (`mixtral`) where no other bundled one is of it, or
    one has it as an alias (`llama`).
    """
    plain = _plain(name)
    for slug, entry in entries().items():
        if plain in {slug, *map(_plain, (*entry.tags, *entry.aliases))}:
            return slug
    members = family(plain)
    return members[0] if len(members) == 1 else plain


def family(name: str) -> tuple[str, ...]:
    """Slugs of the bundled models of an architecture, as SGLang and Transformers name it: `llama`, `qwen2_moe`."""
    return tuple(slug for slug, entry in entries().items() if entry.config["model_type"] == _plain(name))


def suggestion(name: str) -> str:
    """Which bundled models a name that means none of them may mean."""
    plain = _plain(name)
    alike = [slug for slug in entries() if slug.startswith(plain) or plain.startswith(slug)]
    near = family(plain) or alike or get_close_matches(plain, entries(), n=3)
    meant = f"did you mean {' or '.join(near)}? " if near else ""
    return f"{meant}bundled: {', '.join(entries())}"


def _plain(name: str) -> str:
    return name.lower().replace("-", "_").replace(".", "_")
