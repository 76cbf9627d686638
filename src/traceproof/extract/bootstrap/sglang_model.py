"""SGLang's model of a config.json: laid out on the meta device in a pretended parallel world, and written down.

This is the only module that knows how SGLang starts up. It goes through SGLang's own loader: building the model
class directly skips decisions that the loader makes (0.5.22 then lays out 257 experts instead of 256).

Classes are recognised by names in their inheritance (SGLang's own layers), so that a model's subclass of a layer
counts as that layer. Everything else is a `block`. How a norm is called is read off the stages of SGLang's layers,
or off the source of the class that holds it. A norm that is called with a second argument adds that first; in a
stage it adds if it reads a plain sum of the last output and the residual.
"""

import ast
import inspect
import logging
import re
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from traceproof.extract.bootstrap.transformers_model import towers_left_out
from traceproof.models.drafts import Facts
from traceproof.ops.registry import extractions

BACKENDS = ("fa3", "triton")  # attention backends for a GPU, since some models refuse a CPU's
QUIET = logging.ERROR  # SGLang warns about all that a CPU lacks; none of it affects shapes


class PretendGroup:
    """A process group in which this process is rank 0. It can not communicate, and laying out a model must not.

    A real group, even a fake one, would wait for message queues for ever.
    """

    rank = rank_in_group = local_rank = first_rank = 0
    device_group = cpu_group = None
    is_first_rank = True
    device = torch.device("cpu")

    def __init__(self, world_size: int) -> None:
        self.world_size, self.ranks = world_size, list(range(world_size))
        self.is_last_rank, self.last_rank = world_size == 1, world_size - 1


class OnMeta(TorchFunctionMode):
    """A mode that moves tensors that a model creates on "cuda" to the meta device."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: ANN401
        """Replace a GPU as `device` by the meta device."""
        options = dict(kwargs or {})
        if "cuda" in str(options.get("device")):
            options["device"] = "meta"
        return func(*args, **options)


def prepare() -> None:
    """Import all that building a model needs."""
    logging.disable(QUIET)
    for name in ("model_loader.loader", "configs.load_config", "configs.model_config", "server_args"):
        import_module(f"sglang.srt.{name}")
    architectures()


def build_model(folder: Path, *, tp: int, ep: int, dp: int = 1, backend: str) -> nn.Module:
    """Lay out the model of `folder`/config.json as rank 0 of `tp` ranks, its experts spread over `ep` of them.

    Attention is computed by `dp` groups of ranks, each for its own tokens. Exceptions of SGLang pass through.
    """
    logging.disable(QUIET)
    # An H200's capability, and rotary embeddings as on a GPU: SGLang's CPU version of them supports a single kind.
    torch.cuda.get_device_capability = lambda *_: (9, 0)
    factory: Any = import_module("sglang.srt.layers.rotary_embedding.factory")
    variants: Any = import_module("sglang.srt.layers.rotary_embedding.rope_variant")
    variants.get_device = lambda *_: "cpu"
    factory.get_rope_cpu = lambda *arguments: factory.get_rope(*arguments[:8])  # without the device
    runtime_context = import_module("sglang.srt.runtime_context")
    load = import_module("sglang.srt.configs.load_config")
    loader = import_module("sglang.srt.model_loader.loader")
    configs = import_module("sglang.srt.configs.model_config")

    arguments = import_module("sglang.srt.server_args").ServerArgs(
        model_path=str(folder),
        device="cpu",
        tp_size=tp,
        ep_size=ep,
        dp_size=dp,
        enable_dp_attention=dp > 1,
        load_format="dummy",
        skip_tokenizer_init=True,
        attention_backend=backend,
        disable_radix_cache=True,  # otherwise hybrid models ask the platform for state snapshots
        trust_remote_code=False,
    )
    ranks = runtime_context.SpawnRanks(world_rank=0, gpu_id=0)
    runtime_context.publish(arguments, role="scheduler", ranks=ranks)
    groups = {"attn_tp": tp // dp, "moe_ep": ep, "moe_tp": tp // ep, "moe_dp": 1, "attn_cp": 1, "pp": 1}
    groups |= dict.fromkeys(("world", "tp", "shared_experts_tp"), tp)
    pretended = {f"{name}_group": PretendGroup(size) for name, size in groups.items()}
    runtime_context.get_parallel().override_permanently(**pretended)
    model_config = configs.ModelConfig.from_server_args(arguments)
    load_config = load.LoadConfig(load_format=load.LoadFormat.DUMMY)
    quantisation = loader._get_quantization_config(model_config, load_config)  # noqa: SLF001 - the loader's own step
    torch.set_default_dtype(model_config.dtype)
    with torch.device("meta"), OnMeta(), towers_left_out():
        model: nn.Module = loader._initialize_model(model_config, load_config, quantisation)  # noqa: SLF001
    return model


def loading(model: nn.Module) -> list[str]:
    """How the model's loader changes a checkpoint's weights, so that modules hold other numbers; [] if not.

    `norms plus one`: Gemma's factors are stored minus one. `rotary halves`: rows of queries and keys are
    reordered, so that neighbouring channels of a pair come to lie half a head apart.
    """
    loaders = (vars(cls)["load_weights"] for cls in _own_classes(type(model)) if "load_weights" in vars(cls))
    loader = next(loaders, None)
    nodes = list(ast.walk(ast.parse(textwrap.dedent(inspect.getsource(loader))))) if loader is not None else []
    added = [node.value for node in nodes if isinstance(node, ast.AugAssign) and isinstance(node.op, ast.Add)]
    plus_one = any(isinstance(value, ast.Constant) and value.value == 1.0 for value in added)
    reorders = any(isinstance(one, ast.Attribute) and one.attr == "permute_qk_weight_for_rotary" for one in nodes)
    return ["norms plus one"] * plus_one + ["rotary halves"] * reorders


def architectures() -> list[str]:
    """Names for a config.json's `architectures` whose modules can be imported here."""
    logging.disable(QUIET)
    registry = import_module("sglang.srt.models.registry").ModelRegistry
    return sorted(registry.get_supported_archs())


# Describing a laid-out model.
LAYER_INDEX = re.compile(r"(?<=\.)\d+(?=\.|$)")


def describe(model: nn.Module) -> list[dict[str, Any]]:
    """Every different module, with its count; layer numbers in paths are `*`.

    Modules differ by path, holder's class, class and facts. They come in model order. Shared instances (rotary
    embeddings) count at each place that holds them.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    entries: dict[str, dict[str, Any]] = {}
    for path, module in modules.items():
        if ".quant_method" in path:
            continue  # computes a layer's product, is no layer
        parent = path.rpartition(".")[0]
        holder = modules[parent] if path else None
        kind, facts = classify(module, holder)
        parts = path.split(".") if path else []
        holders = [(modules[".".join(parts[:at])], parts[at]) for at in reversed(range(len(parts)))]
        called = uses(holders) if kind == "norm" else []
        entry = {
            "path": LAYER_INDEX.sub("*", path),
            "parent": LAYER_INDEX.sub("*", parent) if path else None,
            "parent_class": type(holder).__name__ if holder is not None else None,
            "class_name": type(module).__name__,
            "kind": kind,
            "facts": facts,
            "uses": called,
        }
        key = repr(entry)
        entries.setdefault(key, entry | {"count": 0, "source": source(holder, path)})["count"] += 1
    return list(entries.values())


def source(holder: nn.Module | None, path: str) -> str:
    """File and line at which the class of `holder` creates the module; "": not found."""
    name = path.rpartition(".")[2]
    for ancestor in _own_classes(type(holder)):
        file, lines, start = lines_of(ancestor)
        for number, line in enumerate(lines):
            if re.match(rf"\s*self\.{re.escape(name)}\s*(:[^=]+)?=[^=]", line):
                return f"{file}:{start + number}"
    return ""


@cache
def lines_of(cls: type) -> tuple[str, list[str], int]:
    """File within SGLang, source lines and number of the first line of a class."""
    lines, start = inspect.getsourcelines(cls)
    return (inspect.getsourcefile(cls) or "").rpartition("/srt/")[2], lines, start


def classify(module: nn.Module, parent: nn.Module | None) -> tuple[str, Facts]:
    """Kind and facts (sizes, dtypes) of a module, by the reader of its nearest known class.

    Of no known class: a lone 2-D weight is read as a linear layer, other own weights give ("weights", shapes by
    name), none ("block", {}). Some readers look at `parent`, the module that holds it, too.
    """
    for ancestor in type(module).__mro__:
        if ancestor.__name__ in readers():
            kind, reader = readers()[ancestor.__name__]
            return kind, reader(module, parent)
    shapes = {name: list(param.shape) for name, param in module.named_parameters(recurse=False) if param.dim() > 1}
    if list(shapes) == ["weight"] and len(shapes["weight"]) == 2 and not list(module.children()):
        kind, reader = readers()["LinearBase"]  # such as a router that is none of SGLang's layers
        return kind, reader(module, parent)
    return ("weights", shapes) if shapes else ("block", {})


@cache
def readers() -> Mapping[str, tuple[str, Callable[[Any, Any], Facts]]]:
    """SGLang class name -> (kind of module, function that reads its facts), over all op_types."""

    def embedding(module: Any, _parent: Any) -> Facts:  # noqa: ANN401 - SGLang's objects
        vocab = getattr(module, "org_vocab_size", None) or module.num_embeddings
        return {"vocab": vocab, "hidden": module.embedding_dim}

    by_class = {"ParallelLMHead": ("lm_head", embedding)}
    by_class |= dict.fromkeys(("VocabParallelEmbedding", "Embedding"), ("embedding", embedding))
    for extraction in extractions():
        by_class |= extraction.readers
    return by_class


# How a norm is called.
ALONE, ADDING = "alone", "adding"
DEPTH = 4  # levels searched from a holder's attribute for the stage's object that holds a norm
FINAL = "final_norm"  # SGLang's function for the norm after the last stage


def uses(holders: Sequence[tuple[nn.Module, str]]) -> list[str]:
    """How a norm is called: `alone`, `adding` or both; `unknown`; []: nothing calls it.

    `holders` are (module, attribute) from the direct holder up to the model.
    """
    holder, name = holders[0]
    module = getattr(holder, name, None)
    written: nn.Module = holder
    place: tuple[str, ...] = (name,)
    for above, inner in holders[1:]:  # a list or a plain module has no source that calls what it holds
        if _own_classes(type(written)):
            break
        written, place = above, (inner, *place)
    staged = {how for value in vars(written).values() for how in _staged(value, module, DEPTH)}
    cls: Any = type(written)
    called, mentioned = _mentions(cls, place)
    if FINAL in called:
        called = (called - {FINAL}) | {_final(written)}
    ways = staged | called
    if ways or not mentioned:
        return sorted(ways) or ["unknown"] * (len(place) > 1)
    return [ALONE]


def _own_classes(cls: type) -> list[type]:
    return [ancestor for ancestor in cls.__mro__ if ancestor.__module__.startswith("sglang.")]


def _staged(value: Any, module: object, depth: int) -> Iterator[str]:  # noqa: ANN401 - SGLang's objects
    """How SGLang's stages in an attribute call a module."""
    if isinstance(value, nn.Module) or depth < 0:
        return
    plan = getattr(value, "plan", None)
    if plan is not None and getattr(plan, "norm", None) is module:
        for edges in plan.edges.values():
            edge = edges.incoming
            update = edge.produced.update
            plain = edge.arriving_plain_add if update is None else update.is_plain_add
            pending = plain and not plan.enters_stack and not edge.arrives_written
            yield ADDING if pending and edge.need.read.is_plain_norm else ALONE
        return
    for name in _fields(value):
        inner = getattr(value, name, None)
        if inner is module:
            yield ALONE  # on an output, before that is added
        else:
            yield from _staged(inner, module, depth - 1)


def _fields(value: object) -> list[str]:
    """Names of the attributes of an object of SGLang; [] for other objects."""
    if not type(value).__module__.startswith("sglang."):
        return []
    names = [*vars(value)] if hasattr(value, "__dict__") else []
    names += [name for name in getattr(type(value), "__slots__", ()) if isinstance(name, str)]
    return names + list(getattr(type(value), "__struct_fields__", ()))


def _final(holder: nn.Module) -> str:
    """How the norm after all stages is called: the last stage may have written its sum itself."""
    last = None
    for module in holder.modules():
        last = next((stage for stage in reversed(vars(module).values()) if hasattr(stage, "declaration")), last)
    update = getattr(getattr(last, "declaration", None), "update", None)
    written = update is not None and (not update.is_plain_add or getattr(update, "applied_at_exit", False))
    return ALONE if written else ADDING


@cache
def _mentions(cls: Any, place: tuple[str, ...]) -> tuple[frozenset[str], bool]:  # noqa: ANN401 - a class
    """How the source of a class, or else of its file, calls the module at `place`; and whether it mentions it."""
    classes = _own_classes(cls)
    texts = [textwrap.dedent(inspect.getsource(ancestor)) for ancestor in classes]
    for group in (texts, [inspect.getsource(inspect.getmodule(ancestor) or ancestor) for ancestor in classes[:1]]):
        nodes = [node for text in group for node in ast.walk(ast.parse(text))]
        if any(_is(node, place) for node in nodes):
            return frozenset(
                how for node in nodes if isinstance(node, ast.Call) for how in _call(node, place)
            ), True
    return frozenset(), False


def _is(node: ast.AST, place: Sequence[str]) -> bool:
    """Whether a node reads `.norm`, `.head.norm` or, in a list, `.norms[...]`."""
    *above, name = place
    if name.isdigit():
        return isinstance(node, ast.Subscript) and _is(node.value, above)
    if not isinstance(node, ast.Attribute) or node.attr != name or not isinstance(node.ctx, ast.Load):
        return False
    return not above or _is(node.value, above)


def _call(node: ast.Call, place: Sequence[str]) -> Iterator[str]:
    if _is(node.func, place):
        others = [*node.args, *(word.value for word in node.keywords)][1:]  # arguments beside the norm's input
        adds = any(not (isinstance(value, ast.Constant) and value.value is None) for value in others)
        yield ADDING if adds else ALONE
    elif getattr(node.func, "attr", getattr(node.func, "id", None)) == FINAL:
        yield from [FINAL] * any(_is(argument, place) for argument in node.args)
