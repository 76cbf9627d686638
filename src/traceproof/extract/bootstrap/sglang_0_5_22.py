"""SGLang 0.5.22 and 0.5.23: build a model on the meta device inside a pretended parallel world.

This is the only module that knows how SGLang starts up. It goes through SGLang's own loader: building the model
class directly skips decisions that the loader makes (0.5.22 then lays out 257 experts instead of 256).
"""

import ast
import inspect
import logging
import textwrap
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from traceproof.extract.bootstrap import start

BACKENDS = ("fa3", "triton")  # of attention: those of a GPU, since some models refuse a CPU's
QUIET = logging.ERROR  # SGLang warns about everything a CPU lacks; none of it concerns shapes


@dataclass(slots=True)
class PretendGroup:
    """A process group of which this process is rank 0. It can not communicate: laying out a model must not.

    A real (even fake) group would wait for message queues for ever.
    """

    world_size: int
    rank: int = 0
    rank_in_group: int = 0
    local_rank: int = 0
    first_rank: int = 0
    device_group: None = None
    cpu_group: None = None
    is_first_rank: bool = True
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    @property
    def is_last_rank(self) -> bool:
        """Whether the group is this process alone."""
        return self.world_size == 1

    @property
    def last_rank(self) -> int:
        """The highest rank."""
        return self.world_size - 1

    @property
    def ranks(self) -> list[int]:
        """All ranks."""
        return list(range(self.world_size))


class OnMeta(TorchFunctionMode):
    """Puts tensors that a model asks for on a GPU by name on the meta device."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: ANN401
        """Replace a `device` that names a GPU."""
        options = dict(kwargs or {})
        if "cuda" in str(options.get("device")):
            options["device"] = "meta"
        return func(*args, **options)


def prepare() -> None:
    """Import what building any model needs."""
    logging.disable(QUIET)
    for name in ("model_loader.loader", "configs.load_config", "configs.model_config", "server_args"):
        import_module(f"sglang.srt.{name}")
    architectures()


def build_model(  # noqa: PLR0913 - the parallelism, the kernel, and which part
    folder: Path, *, tp: int, ep: int, dp: int = 1, backend: str, draft: bool = False
) -> nn.Module:
    """Lay out the model of `folder`/config.json as rank 0 of `tp` ranks, its experts spread over `ep` of them.

    Attention is done by `dp` groups of ranks, each for its own tokens. With `draft`, the layers that SGLang
    speculates with in the model's place. Whatever SGLang raises about the config passes through.
    """
    logging.disable(QUIET)
    _pretend_gpu()
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
        disable_radix_cache=True,  # hybrid models ask the platform for state snapshots otherwise
        trust_remote_code=False,
    )
    ranks = runtime_context.SpawnRanks(world_rank=0, gpu_id=0)
    runtime_context.publish(arguments, role="scheduler", ranks=ranks)
    runtime_context.get_parallel().override_permanently(**_groups(tp, ep, dp))
    model_config = configs.ModelConfig.from_server_args(arguments, is_draft_model=draft)
    load_config = load.LoadConfig(load_format=load.LoadFormat.DUMMY)
    quantisation = loader._get_quantization_config(model_config, load_config)  # noqa: SLF001 - the loader's own step
    torch.set_default_dtype(model_config.dtype)
    with torch.device("meta"), OnMeta(), start.towers_left_out():
        model: nn.Module = loader._initialize_model(model_config, load_config, quantisation)  # noqa: SLF001
    return model


def _pretend_gpu() -> None:
    """Answer as an H200 where SGLang asks for its capability, and have rotary embeddings made as on a GPU.

    SGLang's makers of them for a CPU take one kind alone.
    """
    torch.cuda.get_device_capability = lambda *_: (9, 0)
    factory: Any = import_module("sglang.srt.layers.rotary_embedding.factory")
    variants: Any = import_module("sglang.srt.layers.rotary_embedding.rope_variant")
    variants.get_device = lambda *_: "cpu"
    factory.get_rope_cpu = lambda *given: factory.get_rope(*given[:8])  # but for its device


def _groups(tp: int, ep: int, dp: int) -> dict[str, Any]:
    sizes = {
        "world_group": tp,
        "tp_group": tp,
        "attn_tp_group": tp // dp,
        "shared_experts_tp_group": tp,
        "moe_ep_group": ep,
        "moe_tp_group": tp // ep,
        "moe_dp_group": 1,
        "attn_cp_group": 1,
        "pp_group": 1,
    }
    return {name: PretendGroup(size) for name, size in sizes.items()}


def loading(model: nn.Module) -> list[str]:
    """What the model's loader changes in a checkpoint's weights, so that its modules hold other numbers.

    `norms plus one`: Gemma's factors, stored minus one. `rotary halves`: rows of queries and keys, reordered so
    that neighbouring channels of a pair come to lie half a head apart.
    """
    found = []
    for cls in type(model).__mro__:
        loader = vars(cls).get("load_weights")
        if loader is None or not cls.__module__.startswith("sglang."):
            continue
        nodes = list(ast.walk(ast.parse(textwrap.dedent(inspect.getsource(loader)))))
        added = [one.value for one in nodes if isinstance(one, ast.AugAssign) and isinstance(one.op, ast.Add)]
        if any(isinstance(value, ast.Constant) and value.value == 1.0 for value in added):
            found.append("norms plus one")
        if any(isinstance(one, ast.Attribute) and one.attr == "permute_qk_weight_for_rotary" for one in nodes):
            found.append("rotary halves")
        break
    return found


def architectures() -> list[str]:
    """Names that a config.json's `architectures` may hold, as far as their modules import here."""
    logging.disable(QUIET)
    registry = import_module("sglang.srt.models.registry").ModelRegistry
    return sorted(registry.get_supported_archs())
