"""The second reading: transformers' own model of a config.json, on the meta device, read by shapes and behaviour.

It is independent of SGLang and of the names of model families. Parameters tell projections, experts and widths.
The model is run once on tokens without values. Its attention function is replaced by ours, which notes what it
gets (heads, widths, scale, window, cap, sinks), and so are its rotary functions. What shapes can not tell is tried
with values on a CPU: norms on a few rows, rotary functions on one head, activations on a few numbers, routers on a
few tokens.
"""

import copy
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from traceproof.models.drafts import Facts

Theirs = Any  # objects of transformers
NAME = "traceproof"  # name of our attention function in transformers' table
TOKENS = 11  # number of tokens that is the width of no head
ROTARY = re.compile(r"\w*apply_\w*(rotary|rope)\w*")
MASKS = re.compile(r"create_\w*mask\w*")
CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
ACTIVATIONS = {functional.silu: "silu", functional.gelu: "gelu", functional.relu: "relu"}
PRODUCTS = (torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__)


@dataclass(slots=True)
class Notes:
    """What was noted while the model ran, by id of the module."""

    attention: dict[int, Facts] = field(default_factory=dict)
    rotary: dict[int, list[Facts]] = field(default_factory=dict)
    routing: dict[int, Facts] = field(default_factory=dict)
    widths: dict[int, int] = field(default_factory=dict)
    pointwise: dict[int, list[Facts]] = field(default_factory=dict)
    pending: list[Facts] = field(default_factory=list)


class ReplacedFunctions:
    """While entered, replaces functions that modules of the model call: attention, rotary, masks, experts."""

    def __init__(self, model: nn.Module, notes: Notes, mask: torch.Tensor | None) -> None:
        self._model, self._notes, self._mask = model, notes, mask
        self._undo = ExitStack()
        self._tried: dict[object, Facts | None] = {}

    def __enter__(self) -> None:
        import_module("transformers.modeling_utils").ALL_ATTENTION_FUNCTIONS.register(NAME, self._attention)
        names = {type(module).__module__ for module in self._model.modules()}
        for source in (import_module(name) for name in names if name.startswith("transformers.models.")):
            for function, value in [item for item in vars(source).items() if callable(item[1])]:
                if ROTARY.fullmatch(function):
                    self._replace(source, function, partial(self._rotary, value))
                elif MASKS.fullmatch(function):  # our attention ignores the masks, which depend on values
                    self._replace(source, function, lambda *_, **__: self._mask)
        for module in self._model.modules():
            if is_experts(module):
                self._replace(module, "forward", lambda hidden, *_, **__: hidden)

    def __exit__(self, *_: object) -> None:
        self._undo.close()

    def _replace(self, holder: Theirs, name: str, value: Theirs) -> None:
        before = vars(holder).get(name)
        undo = partial(delattr, holder, name) if before is None else partial(setattr, holder, name, before)
        self._undo.callback(undo)
        setattr(holder, name, value)

    def _attention(
        self, module: Theirs, query: Theirs, key: Theirs, value: Theirs, *_: Theirs, **options: Theirs
    ) -> Theirs:
        notes = self._notes
        notes.attention[id(module)] = attention_facts(module, query, key, value, options)
        notes.rotary[id(module)], notes.pending = notes.pending, []
        return query.new_empty(query.shape[0], query.shape[2], query.shape[1], value.shape[-1]), None

    def _rotary(self, original: Callable[..., Theirs], *arguments: Theirs, **options: Theirs) -> Theirs:
        key = (original, *(getattr(argument, "shape", None) for argument in arguments))
        if key not in self._tried:
            self._tried[key] = rotary_facts(original, arguments, options)
        facts = self._tried[key]
        self._notes.pending += [facts] if facts else []
        return original(*arguments, **options)


class Functions(TorchFunctionMode):
    """A mode that notes functions which are no modules: activations, and attention by two products.

    They are noted for the innermost running module. A module that can not go on without values returns its input.
    """

    def __init__(self, model: nn.Module, notes: Notes) -> None:
        super().__init__()
        self._notes = notes
        self._running: list[nn.Module] = []
        self._queries: dict[int, torch.Tensor] = {}  # by id of the module that multiplied them with keys
        self._hooks = ExitStack()
        for module in model.modules():
            self._hooks.callback(module.register_forward_pre_hook(self._enter).remove)
            self._hooks.callback(module.register_forward_hook(self._leave, always_call=True).remove)
            self._hooks.callback(partial(setattr, module, "forward", module.forward))
            module.forward = partial(_forward_or_input, module.forward)

    def __exit__(self, *error: object) -> None:
        self._hooks.close()
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    def _enter(self, module: nn.Module, _given: object) -> None:
        self._running.append(module)

    def _leave(self, module: nn.Module, _given: object, _out: object) -> None:
        while self._running and self._running.pop() is not module:
            pass

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: ANN401
        """Note the call, and make it."""
        options = kwargs or {}
        if self._running and func in ACTIVATIONS:
            self._activation(ACTIVATIONS[func], args[0] if args else options["input"], options)
        elif self._running and func in PRODUCTS and len(args) > 1:
            self._product(*args[:2])
        return func(*args, **options)

    def _activation(self, name: str, tensor: torch.Tensor, options: Any) -> None:  # noqa: ANN401
        module = self._running[-1]
        if list(module.children()):  # leaf modules are activations themselves
            kind = "gelu_tanh" if options.get("approximate") == "tanh" else name
            noted = self._notes.pointwise.setdefault(id(module), [])
            facts = {"function": kind, "width": tensor.shape[-1]}
            noted += [facts] * (facts not in noted)

    def _product(self, left: torch.Tensor, right: torch.Tensor) -> None:
        """Record a product of attention: queries and keys give scores, scores and values complete the facts."""
        module, notes = self._running[-1], self._notes
        if left.dim() != 4 or right.dim() != 4 or left.shape[-2] != TOKENS:
            return
        if right.shape[-1] == TOKENS:
            self._queries[id(module)] = left
        elif left.shape[-1] == TOKENS and id(module) in self._queries:
            query = self._queries.pop(id(module))
            notes.attention[id(module)] = attention_facts(module, query, right, right, {})
            notes.rotary[id(module)], notes.pending = notes.pending, []


def _forward_or_input(original: Callable[..., Theirs], *arguments: Theirs, **options: Theirs) -> Theirs:
    """A module's forward; it returns its input where it needs values."""
    try:
        return original(*arguments, **options)
    except NotImplementedError:
        first = next((argument for argument in arguments if isinstance(argument, torch.Tensor)), None)
        if first is None:
            raise
        return first


def run(model: nn.Module, notes: Notes) -> None:
    """Run the model once on tokens without values, and note what its modules and functions get."""

    def width(module: nn.Module, arguments: tuple[Any, ...]) -> None:
        if arguments and isinstance(arguments[0], torch.Tensor) and arguments[0].dim():
            notes.widths[id(module)] = arguments[0].shape[-1]

    for module in model.modules():
        if not list(module.children()):
            module.register_forward_pre_hook(width)
    tokens = torch.zeros(1, TOKENS, dtype=torch.long, device="meta")
    try:
        with ReplacedFunctions(model, notes, None), Functions(model, notes), torch.no_grad():
            model.eval()(input_ids=tokens, use_cache=False)
    except (AttributeError, TypeError):  # it unpacks the mask itself
        mask = torch.zeros(1, 1, TOKENS, TOKENS, device="meta")
        with ReplacedFunctions(model, notes, mask), Functions(model, notes), torch.no_grad():
            model(input_ids=tokens, use_cache=False)


def is_experts(module: nn.Module) -> bool:
    """Whether a module holds all experts' weights: 3-D parameters with equal first axes; no convolution."""
    weights = [w for w in module.parameters(recurse=False) if w.dim() == 3]
    return bool(weights) and not isinstance(module, CONVOLUTIONS) and len({w.shape[0] for w in weights}) == 1


NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")
STATES = ("kv_lora_rank", "qk_rope_head_dim", "num_k_heads", "num_v_heads", "head_k_dim", "head_v_dim")
MAMBA = {"heads": "num_heads", "head_dim": "head_dim", "state": "ssm_state_size", "groups": "n_groups"}


class Absent(Exception):  # noqa: N818 - an answer, not a fault
    """Transformers has no model for this config.json; the text says why."""


def read(config: Mapping[str, Any]) -> dict[str, Any]:
    """Modules of transformers' model, with `*` for numbers in paths, and why some could not be run, as JSON.

    Raises Absent: there is no such model, or it does not accept the config.
    """
    try:
        model = _build(config)
    except Absent:
        raise
    except Exception as error:  # transformers' exception is the answer
        raise Absent(f"transformers does not accept it: {type(error).__name__}: {error}"[:300]) from error
    notes, problem = Notes(), None
    hidden = model.get_input_embeddings().weight.shape[-1]
    _try_routers(model, notes, hidden)
    try:
        run(model, notes)
    except Exception as error:  # noqa: BLE001 - what ran until then is kept; the rest is unknown, and reported
        problem = f"{type(error).__name__}: {error}"[:300]
    entries: dict[str, dict[str, Any]] = {}
    modules = model.named_modules(remove_duplicate=False)
    facts_by_path = [(path, *row) for path, module in modules for row in _facts(module, notes, hidden)]
    for path, kind, facts in [*facts_by_path, *_projections(model)]:
        entry = {"path": NUMBER.sub("*", path), "kind": kind, "facts": facts}
        entries.setdefault(repr(entry), entry | {"count": 0})["count"] += 1
    return {"architecture": type(model).__name__, "modules": list(entries.values()), "problem": problem}


def defaults() -> tuple[dict[str, dict[str, Any]], dict[str, str]]:
    """Default configs of transformers' causal language models, and errors of those without; by `model_type`."""
    auto = import_module("transformers.models.auto.modeling_auto")
    configs, without = {}, {}
    for kind, name in auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items():
        try:
            plain = json.loads(json.dumps(_configuration(kind)().to_dict(), default=str))
        except Exception as error:  # noqa: BLE001 - the error is reported with the class's name
            without[kind] = " ".join(f"{name}: {type(error).__name__}: {error}".split())[:300]
            continue
        configs[kind] = plain | {"architectures": [name]}
    return configs, without


def _configuration(kind: str) -> Any:  # noqa: ANN401 - a class of transformers
    """Transformers' own config class: `AutoConfig` reads a table into which SGLang puts its classes."""
    names = import_module("transformers.models.auto.configuration_auto").CONFIG_MAPPING_NAMES
    return getattr(import_module("transformers"), names[kind])


def _build(config: Mapping[str, Any]) -> Theirs:
    """Build transformers' model of a config, on the meta device. Raises Absent: there is none."""
    package = import_module("transformers")
    names = import_module("transformers.models.auto.modeling_auto").MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    known = import_module("transformers.models.auto.configuration_auto").CONFIG_MAPPING_NAMES
    name, kind = config["architectures"][0], config.get("model_type")
    if kind not in known:
        kind = next((key for key, named in names.items() if named == name), None)
    if kind is None:
        raise Absent(f"transformers has no model {config.get('model_type')!r} and no {name}")
    maker = getattr(package, name, None) or getattr(package, names.get(kind, ""), None)
    if maker is None:
        raise Absent(f"transformers has no language model of {kind}")
    package.AutoModel._model_mapping._extra_content.clear()  # noqa: SLF001 - SGLang puts classes of its own there
    import_module("transformers.modeling_utils").AttentionInterface.register(NAME, lambda *_, **__: None)

    def made(**options: str) -> nn.Module:
        conf = _configuration(kind).from_dict(dict(config) | {"model_type": kind})
        if not isinstance(conf, maker.config_class):  # the language model of a config with several modalities
            conf = conf.get_text_config()
        with torch.device("meta"), towers_left_out():
            model: nn.Module = maker._from_config(conf, **options)  # noqa: SLF001 - there is no public way
        return model

    try:
        return made(attn_implementation=NAME)
    except (ValueError, KeyError):  # the oldest models compute attention in the module itself
        return made()


def _try_routers(model: nn.Module, notes: Notes, hidden: int) -> None:
    """Note how blocks of experts route, tried once per class of block, as layers of a model have equal routers.

    Notes the width of the experts' activation, too, which no run records.
    """
    known: dict[type, Facts | None] = {}
    for holder in model.modules():
        for child in holder.children():
            if not is_experts(child):
                continue
            if type(holder) not in known:
                known[type(holder)] = routing(holder, child, hidden)
            notes.routing[id(child)] = known[type(holder)] or {}
            for inner in child.children():
                notes.widths[id(inner)] = int(_experts(child, hidden)["intermediate"])


def _facts(module: nn.Module, notes: Notes, hidden: int) -> Iterator[tuple[str, Facts]]:
    """(kind, facts) of each computation that is recognised in a module."""
    weight = getattr(module, "weight", None)
    shape = tuple(weight.shape) if isinstance(weight, torch.Tensor) else ()
    if id(module) in notes.attention:
        extra = {name: getattr(module, name) for name in STATES if isinstance(getattr(module, name, None), int)}
        yield "attention", notes.attention[id(module)] | extra
    for rotation in notes.rotary.get(id(module), ()):
        yield "rotary", rotation
    for activation in notes.pointwise.get(id(module), ()):
        yield "pointwise", activation
    if isinstance(getattr(module, "index_topk", None), int) and hasattr(module, "n_heads"):
        yield "indexer", {"heads": module.n_heads, "dim": module.head_dim, "topk": module.index_topk}
    if isinstance(module, nn.Embedding):
        yield "embedding", {"vocab": shape[0], "hidden": shape[1]}
    elif is_experts(module):
        yield "experts", _experts(module, hidden) | notes.routing.get(id(module), {})
    elif hasattr(module, "A_log"):
        names = {name: name for name in STATES} | MAMBA
        sizes = {name: getattr(module, at, None) for name, at in names.items()}
        yield "state", {name: value for name, value in sizes.items() if isinstance(value, int)}
    elif isinstance(module, CONVOLUTIONS):
        yield "conv", {"channels": shape[0], "width": shape[-1]}
    elif not list(module.children()):
        yield from leaf(module, notes.widths.get(id(module)))


def _experts(module: nn.Module, hidden: int) -> Facts:
    """Facts of experts, by their parameters: the smallest has experts * hidden * intermediate elements."""
    sizes = {name: weight.numel() for name, weight in module.named_parameters(recurse=False) if weight.dim() == 3}
    count = next(module.parameters(recurse=False)).shape[0]
    down = min(sizes.values())
    return {
        "experts": count,
        "hidden": hidden,
        "intermediate": down // (count * hidden),
        "gated": sum(sizes.values()) == 3 * down,
    }


def _projections(model: nn.Module) -> Iterator[tuple[str, str, Facts]]:
    """(path, "projections", name -> [rows, columns]) for each part of a layer, as SGLang fuses some of them."""
    parts: dict[str, Facts] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        weight = getattr(module, "weight", None)
        if isinstance(module, nn.Embedding) or not isinstance(weight, torch.Tensor) or weight.dim() != 2:
            continue
        words = path.split(".")
        # A part is what a layer holds, such as `model.layers.3.mlp`; elsewhere, the module that holds the weight.
        numbers = [index for index, word in enumerate(words) if word.isdigit()]
        depth = numbers[0] + 2 if numbers and numbers[0] + 2 < len(words) else len(words) - 1
        shape = list(weight.shape)
        transposed = type(module).__name__ == "Conv1D"  # GPT-2 stores it transposed
        name = NUMBER.sub("*", ".".join(["", *words[depth:]]))[1:]
        parts.setdefault(".".join(words[:depth]), {})[name] = shape[::-1] if transposed else shape
    for path, facts in parts.items():
        yield path, "projections", facts


@contextmanager
def towers_left_out() -> Iterator[None]:
    """Replace encoders that transformers can not build, for lack of a package, by empty modules.

    SGLang and transformers both get some encoders of images and sound from `AutoModel`.
    """
    factory: Any = import_module("transformers").AutoModel
    original = factory.from_config

    def from_config(config: Any, **options: Any) -> Any:  # noqa: ANN401 - of transformers
        try:
            return original(config, **options)
        except ImportError:
            return nn.Module()

    factory.from_config = from_config
    try:
        yield
    finally:
        factory.from_config = original


# Behaviour of modules and functions, found by trying them with values on a CPU.
Tried = (AttributeError, IndexError, KeyError, NotImplementedError, RuntimeError, TypeError, ValueError)
PROBED_ACTIVATIONS: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "relu": functional.relu,
    "relu2": lambda x: functional.relu(x).square(),
}
STRICT = 1e-5  # the two forms of gelu differ by 5e-4 at most
LOOSE = 1e-3  # between float32 formulas; different formulas differ by more
ROWS = 6  # tokens for trying a router
GROUPS = {"groups": ("n_group", "num_group", "num_expert_group"), "kept_groups": ("topk_group",)}


def attention_facts(module: Any, query: Any, key: Any, value: Any, options: Mapping[str, Any]) -> Facts:  # noqa: ANN401
    """Facts of attention from the arguments of its function."""
    scale = options.get("scaling")
    window = options.get("sliding_window", getattr(module, "sliding_window", None))
    return {
        "heads": query.shape[1],
        "kv_heads": key.shape[1],
        "qk_dim": query.shape[-1],
        "vo_dim": value.shape[-1],
        "scale": float(scale) if isinstance(scale, int | float) else None,
        "window": window if isinstance(window, int) else None,
        "logit_cap": options.get("softcap"),
        "sinks": options.get("s_aux") is not None,
    }


def rotary_facts(function: Callable[..., Any], example: Sequence[Any], options: Mapping[str, Any]) -> Facts | None:
    """Facts of a rotary function: head width, number of rotated channels, how they pair; None: it does not run."""
    generator = torch.Generator().manual_seed(0)
    try:
        arguments = [_real(value, generator) for value in example]
        named = {name: _real(value, generator) for name, value in options.items()}
        place, first = next((at, value) for at, value in enumerate(arguments) if isinstance(value, torch.Tensor))
        width = first.shape[-1]

        def run(query: torch.Tensor) -> torch.Tensor:
            out = function(*arguments[:place], query, *arguments[place + 1 :], **named)
            row = out[0] if isinstance(out, tuple) else out
            last: torch.Tensor = row.reshape(-1, width)[-1]
            return last

        moves = (run(first.clone()) - first.reshape(-1, width)[-1]).abs().gt(1e-6)
        turned, start = int(moves.sum()), int(moves.int().argmax())
        pair = []  # offsets from the first rotated channel to the others that its result depends on
        for channel in range(width):
            moved = first.clone()
            moved[..., channel] += 1.0
            if channel != start and (run(moved) - run(first.clone()))[start].abs() > 1e-6:
                pair.append(channel - start)
    except (*Tried, StopIteration):
        return None
    style = "gptj" if pair == [1] and turned > 2 else "neox" if pair == [turned // 2] else None
    # Channels after unrotated ones are a slice of the head, which SGLang rotates separately.
    return {"head_dim": turned if start else width, "rotary_dim": turned, "style": style}


def _real(value: Any, generator: torch.Generator) -> Any:  # noqa: ANN401 - a tensor or an option
    """A tensor with random values for one on the meta device; other values unchanged."""
    if not isinstance(value, torch.Tensor):
        return value
    if value.is_complex():
        return torch.complex(*(torch.rand(value.shape, generator=generator) + 0.1 for _ in range(2)))
    if not value.is_floating_point():
        return torch.zeros(value.shape, dtype=value.dtype)
    return torch.rand(value.shape, generator=generator) + 0.1


def routing(block: nn.Module, experts: nn.Module, hidden: int) -> Facts | None:
    """How a mixture's router chooses, found by running its block on tokens: top_k, scores, groups of experts.

    None: the block does not run by itself, or its experts do not get the chosen ids and weights.
    """
    watched = _watched(block, experts, hidden)
    if watched is None:
        return None
    trial, tokens, arguments = watched
    tensors = [value for value in arguments if isinstance(value, torch.Tensor)]
    chosen = next((tensor for tensor in tensors if tensor.dtype == torch.long), None)
    weights = next((tensor for tensor in tensors if tensor.is_floating_point()), None)
    if chosen is None or weights is None or chosen.shape != weights.shape or chosen.shape[0] != ROWS:
        return None  # experts do not get chosen ids and weights, both [ROWS, top_k]
    count = next(experts.parameters(recurse=False)).shape[0]
    scoring: Facts = {"scoring": None, "renormalise": None}
    for module in trial.modules():  # one of them is the router
        weight = getattr(module, "weight", None)
        if isinstance(weight, torch.Tensor) and weight.shape == (count, hidden):
            tried = _scoring(tokens[0] @ weight.float().T, chosen, weights.float())
            scoring = tried if tried["scoring"] else scoring
    # groups from which experts are chosen, by the router's attributes
    groups: Facts = {"groups": 1, "kept_groups": 1}
    for module in trial.modules():
        for fact, names in GROUPS.items():
            values = [getattr(module, name, None) for name in names]
            groups[fact] = next((value for value in values if isinstance(value, int)), groups[fact])
    return {"top_k": chosen.shape[1], **scoring, **groups}


def _watched(
    block: nn.Module, experts: nn.Module, hidden: int
) -> tuple[nn.Module, torch.Tensor, list[Any]] | None:
    """A copy of a block with random weights, its input tokens [1, ROWS, hidden], and arguments of its experts.

    None: its experts are not its child, or got nothing.
    """
    arguments: list[Any] = []
    try:
        trial = copy.deepcopy(block)
        pairs = zip(block.children(), trial.children(), strict=True)
        target = next(copied for child, copied in pairs if child is experts)
        of_experts = {id(inner) for inner in target.modules()}
        generator = torch.Generator().manual_seed(0)
        for child in trial.modules():
            if id(child) not in of_experts:
                _filled(child, generator)

        def record(tokens: Any, *rest: Any, **named: Any) -> Any:  # noqa: ANN401
            arguments.extend((*rest, *named.values()))
            return torch.zeros_like(tokens)

        target.forward = record
        tokens = torch.randn(1, ROWS, hidden, generator=generator)
        with torch.no_grad():
            trial.eval()(tokens)
    except Tried:
        if not arguments:  # it is enough that its experts were called
            return None
    except StopIteration:
        return None
    return trial, tokens, arguments


def _filled(module: nn.Module, generator: torch.Generator) -> None:
    """Give a module random parameters, and buffers of zeros."""
    for name, tensor in [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]:
        value = torch.zeros(tensor.shape)
        if isinstance(tensor, nn.Parameter):
            if tensor.dim() > 1:
                value = torch.randn(tensor.shape, generator=generator) * 2 * tensor.shape[-1] ** -0.5
            setattr(module, name, nn.Parameter(value, requires_grad=False))
        else:
            module.register_buffer(name, value)


def _scoring(logits: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> Facts:
    """The scores that the weights are proportional to, and whether they are renormalised; None: neither."""
    for scoring, scores in (("softmax", logits.softmax(-1)), ("sigmoid", logits.sigmoid())):
        picked = scores.gather(1, chosen)
        for renormalise in (True, False):
            ratio = weights / (picked / picked.sum(-1, keepdim=True) if renormalise else picked)
            if float((ratio / ratio.mean() - 1).abs().max()) < LOOSE:
                return {"scoring": scoring, "renormalise": renormalise}
    return {"scoring": None, "renormalise": None}


def leaf(module: nn.Module, width: int | None) -> Iterator[tuple[str, Facts]]:
    """Kind and facts of a module without children, if it is a norm or an activation."""
    parameters = list(module.parameters(recurse=False))
    if any(parameter.dim() > 1 for parameter in parameters) or width is None:
        return
    if not parameters:
        numbers = torch.linspace(-6.0, 6.0, 3 * width).reshape(3, width)
        for name, function in PROBED_ACTIVATIONS.items():
            if _alike(module, numbers, function(numbers), within=STRICT):
                yield "pointwise", {"function": name, "width": width}
                return
    yield from _norm(module, width, weighted=bool(parameters))


def _norm(module: nn.Module, width: int, *, weighted: bool) -> Iterator[tuple[str, Facts]]:
    """("norm", facts) if a module is RMSNorm or LayerNorm, found by trying weights of one and zero."""
    rows = torch.randn(3, width, generator=torch.Generator().manual_seed(0)) + 0.5
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if eps is not None and not isinstance(eps, float):
        return
    scaled = functional.rms_norm(rows, (width,), eps=eps)
    for weight in (1.0, 0.0):
        trial = copy.deepcopy(module)
        for name, parameter in list(trial.named_parameters(recurse=False)):
            value = torch.full(parameter.shape, weight if name == "weight" else 0.0)
            setattr(trial, name, nn.Parameter(value, requires_grad=False))
        facts = {"hidden": width, "eps": eps, "weight": weighted}
        if _alike(trial, rows, scaled):
            yield "norm", facts | {"variant": "plain" if weight or not weighted else "gemma"}
            return
        if _alike(trial, rows, functional.layer_norm(rows, (width,), eps=eps or 0.0)):
            variant = "layer" if weight or not weighted else "layer plus one"
            yield "norm", facts | {"variant": variant, "bias": getattr(module, "bias", None) is not None}
            return


def _alike(module: nn.Module, rows: torch.Tensor, expected: torch.Tensor, within: float = LOOSE) -> bool:
    """Whether a module's output for `rows` is close to `expected`."""
    try:
        with torch.no_grad():
            out = module(rows.clone())
        return (
            isinstance(out, torch.Tensor)
            and out.shape == expected.shape
            and torch.allclose(out.float(), expected, atol=within, rtol=within)
        )
    except Tried:
        return False
