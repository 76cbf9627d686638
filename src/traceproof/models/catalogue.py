"""Bundled models: facts of their config.json that decide shapes, and their usual parallelisms.

They are in catalogue.json. It holds facts only, no text of the original files; `modules_to_not_convert` has `*`
for the layer number, which is expanded on reading.
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
    """Numbers of tensor parallel ranks, of ranks that share the experts, and of groups that split tokens."""

    tp: int
    ep: int
    dp: int = 1

    @property
    def attention(self) -> int:
        """Ranks over which a group splits attention heads."""
        return self.tp // self.dp

    def __str__(self) -> str:
        """Return `tp8 ep8 dp8`, the last only if above 1."""
        return f"tp{self.tp} ep{self.ep}" + (f" dp{self.dp}" if self.dp > 1 else "")


@dataclass(frozen=True, slots=True)
class BundledModel:
    """A model whose config is bundled."""

    slug: str  # on the command line, with underscores
    title: str  # for people
    tags: tuple[str, ...]  # its `model:` tags in the dataset
    aliases: tuple[str, ...]  # names of its family, where several of that are bundled
    repository: str  # on the HuggingFace Hub
    parallel: tuple[Parallel, ...]  # used if none is given
    config: Mapping[str, Any]  # facts of its config.json


@cache
def entries() -> Mapping[str, BundledModel]:
    """All bundled models, by slug, sorted."""
    models = {}
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
        models[slug] = BundledModel(
            slug=slug,
            title=raw["title"],
            tags=tuple(raw["tags"]),
            aliases=tuple(raw.get("aliases", ())),
            repository=raw["repository"],
            parallel=parallel,
            config=MappingProxyType(config),
        )
    return MappingProxyType(models)


def slug_of(name: str) -> str:
    """The slug of the bundled model that `deepseek-v3`, `DeepSeek_V3` or `deepseek-r1` means; else the plain name.

    A `model:` tag counts as a name, and so does a family (`mixtral`) if one bundled model alone is of it, or has
    it as alias (`llama`).
    """
    plain = _plain(name)
    for slug, entry in entries().items():
        if plain in {slug, *map(_plain, (*entry.tags, *entry.aliases))}:
            return slug
    members = family(plain)
    return members[0] if len(members) == 1 else plain


def family(name: str) -> tuple[str, ...]:
    """Slugs of the bundled models with this `model_type`, such as `llama` or `qwen2_moe`."""
    return tuple(slug for slug, entry in entries().items() if entry.config["model_type"] == _plain(name))


def suggestion(name: str) -> str:
    """A hint at the bundled models that an unknown name may mean, and a list of all."""
    plain = _plain(name)
    alike = [slug for slug in entries() if slug.startswith(plain) or plain.startswith(slug)]
    near = family(plain) or alike or get_close_matches(plain, entries(), n=3)
    meant = f"did you mean {' or '.join(near)}? " if near else ""
    return f"{meant}bundled: {', '.join(entries())}"


def _plain(name: str) -> str:
    return name.lower().replace("-", "_").replace(".", "_")
