"""A model's config.json: getting it, checking its fields, and the parallelisms that fit it."""

import json
import re
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

from traceproof.errors import TraceproofError
from traceproof.models.catalogue import Parallel

LARGEST = 1 << 24  # any larger count or width is a mistake


def load(path: Path) -> dict[str, Any]:
    """Read a config.json, or the one in a folder. Raises TraceproofError: it is missing, damaged or no model's."""
    file = path / "config.json" if path.is_dir() else path
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, RecursionError) as error:
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
    """Fetch only config.json of a HuggingFace repository at a revision. Raises TraceproofError: not there."""
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return load(Path(hf_hub_download(repository, "config.json", revision=revision)))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        first = [*str(error).strip().splitlines(), type(error).__name__][0]
        what = f"config.json of {repository} at {revision or 'its main revision'} cannot be fetched: {first}"
        raise TraceproofError(what, todo="Check the name and your access, or give --config PATH.") from error


class Fields:
    """Reads fields of a config.json, and collects everything that is wrong with them."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._config = config
        self.problems: list[str] = []

    def named(self, names: Sequence[str]) -> str:
        """The first of `names` that is present, else the first one."""
        return next((name for name in names if self._config.get(name) is not None), names[0])

    def count(self, names: Sequence[str], *, needed: bool = True) -> int | None:
        """An integer from 1; None: it is wrong (then noted), absent, or a list per layer."""
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
        """Note a problem if the field is present and no number above 0."""
        value: Any = self._config.get(name)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int | float) or value <= 0):
            self.problems.append(f"{name}: {value!r}; allowed: a number above 0")

    def divides(self, what: str, divisor: int, names: Sequence[str], value: int | None) -> None:
        """Note a problem unless `divisor`, called `what`, divides the field's value."""
        if value is not None and value % divisor:
            allowed = ", ".join(str(number) for number in range(1, value + 1) if value % number == 0)
            problem = f"{what}: {divisor} does not divide {self.named(names)} = {value}; allowed: {allowed}"
            self.problems.append(problem)


# Names of the same number in different config.json files.
HIDDEN = ("hidden_size", "n_embd", "d_model")
LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads")
KV_HEADS = ("num_key_value_heads",)
EXPERTS = ("n_routed_experts", "num_experts", "num_local_experts")
CHOSEN = ("num_experts_per_tok", "moe_topk")
EPSILONS = ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_eps")
LANGUAGE = ("text_config", "llm_config", "language_config", "thinker_config")


def language(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The language model's part of a config.json: all of it, except in models of several modalities."""
    inner = next((config[name] for name in LANGUAGE if isinstance(config.get(name), dict)), None)
    return config if inner is None else language(inner)


def check(config: Mapping[str, Any], parallel: Parallel, *, where: str) -> None:
    """Refuse a config.json that lacks what decides shapes, or that the parallelism does not fit.

    SGLang and transformers both fill in the same defaults for missing fields, so only this check notices. Raises
    TraceproofError, with all fields that are missing or impossible.
    """
    fields = Fields(language(config))
    for names in (HIDDEN, LAYERS, ("vocab_size",)):
        fields.count(names)
    heads, kv_heads = fields.count(HEADS), fields.count(KV_HEADS, needed=False)
    ranks = parallel.attention
    fields.divides("tp", ranks, HEADS, heads)
    if kv_heads is not None and heads is not None:
        fields.divides("num_key_value_heads", kv_heads, HEADS, heads)
        if kv_heads % ranks and ranks % kv_heads:
            problem = f"tp: {ranks} neither divides num_key_value_heads = {kv_heads} nor is a multiple of it"
            fields.problems.append(problem)
    experts, chosen = fields.count(EXPERTS, needed=False), fields.count(CHOSEN, needed=False)
    fields.divides("ep", parallel.ep, EXPERTS, experts)
    if experts is not None and chosen is not None and chosen > experts:
        problem = f"{fields.named(CHOSEN)}: {chosen}; allowed: 1 to {fields.named(EXPERTS)} = {experts}"
        fields.problems.append(problem)
    for name in EPSILONS:
        fields.positive(name)
    if fields.problems:
        problems = list(dict.fromkeys(fields.problems))
        raise TraceproofError(f"{where} cannot be read", problems=problems, todo="Correct the fields named.")


ALL = "all"
MOST_RANKS = 4096  # that `all` may stand for; a wrong config.json may have any number of heads


def parallelisms(
    config: Mapping[str, Any],
    tp: Sequence[int | str],
    ep: Sequence[int | str],
    usual: Sequence[Parallel],
    *,
    dp: int = 1,
) -> tuple[Parallel, ...]:
    """The parallelisms of `--tp`, `--ep` and `--dp-attention`: every pair in which ep divides tp.

    `all` stands for every number that fits the config; the usual parallelisms are taken if both are empty. Raises
    TraceproofError: one is no number from 1, or does not fit.
    """
    sizes = [*product(["tp"], tp), *product(["ep"], ep)]
    wrong = [(name, size) for name, size in sizes if size != ALL and not re.fullmatch("[1-9][0-9]*", str(size))]
    if wrong:
        problems = [f"--{name}: {size!r}; allowed: 1 and up, or all" for name, size in wrong]
        raise TraceproofError("the parallelism cannot be used", problems=problems)
    pairs = _pairs(config, tp, ep) if tp or ep else tuple(usual)
    if dp == 1:
        return pairs
    if bad := [pair.tp for pair in pairs if dp < 1 or pair.tp % dp]:
        what = f"dp-attention: {dp} does not divide tp of {bad}"
        raise TraceproofError(what, todo="Attention is spread over the ranks of tp.")
    return tuple(pair._replace(dp=dp) for pair in pairs)


def _pairs(config: Mapping[str, Any], tp: Sequence[int | str], ep: Sequence[int | str]) -> tuple[Parallel, ...]:
    """Every pair of ranks (tp, ep) in which ep divides tp; `all` stands for divisors of the number of heads.

    Raises TraceproofError: no pair fits the model, or an ep divides no tp.
    """
    fields = language(config)
    heads = next((fields[name] for name in HEADS if isinstance(fields.get(name), int)), 1)
    every = [number for number in range(1, min(heads, MOST_RANKS) + 1) if heads % number == 0]
    spread = every if ALL in ep else list(map(int, ep)) or [1]  # ranks that experts are spread over
    ranks = [size for size in every if _fits(config, Parallel(size, 1))] if ALL in tp else list(map(int, tp))
    ranks = ranks or ([1] if ALL in ep else [max(spread)])
    pairs = tuple(Parallel(t, e) for t, e in product(ranks, spread) if t % e == 0)
    if ALL in ep:
        pairs = tuple(pair for pair in pairs if _fits(config, pair))
        for size in () if pairs else ranks:  # none fits, which raises the reason
            check(config, Parallel(size, 1), where="config.json")
    elif unused := [size for size in dict.fromkeys(spread) if size not in {pair.ep for pair in pairs}]:
        todo = "SGLang spreads the experts over the tensor parallel ranks, so ep must divide tp."
        raise TraceproofError(f"ep {unused} divides no tp of {ranks}", todo=todo)
    return pairs


def _fits(config: Mapping[str, Any], parallel: Parallel) -> bool:
    try:
        check(config, parallel, where="config.json")
    except TraceproofError:
        if parallel == Parallel(1, 1):
            raise  # the fault is not the parallelism's
        return False
    return True
