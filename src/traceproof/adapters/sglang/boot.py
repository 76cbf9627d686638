"""Bringing SGLang up as a library: no server, no model, one rank. What breaks first when SGLang moves on.

Checked with 0.5.22 and 0.5.23.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import sys
import tempfile
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace

KERNELS = "sgl_kernel"
# The smallest model description that SGLang's argument check accepts; nothing of it is used.
MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "num_hidden_layers": 1,
    "vocab_size": 128,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-6,
    "torch_dtype": "bfloat16",
}


def stand_in_for_kernels() -> None:
    """Let the Triton kernels and native forms import where SGLang's compiled kernel package is absent.

    Their modules import names of it that they do not call here, but for one, of which SGLang has a Triton version.
    """
    if importlib.util.find_spec(KERNELS) is None:
        sys.meta_path.append(_Finder())


class _Finder(MetaPathFinder, Loader):
    """Finds the kernel package and any module in it."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        del path, target
        return ModuleSpec(name, self, is_package=True) if name.partition(".")[0] == KERNELS else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _StandIn(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        del module


class _StandIn(ModuleType):
    """A module that has every name."""

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Name(f"{self.__name__}.{name}")


class _Name:
    """Has every attribute; what is called raises, but for the one with a Triton version."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Name(f"{self._name}.{name}")

    def __call__(self, *arguments: object) -> None:
        if self._name != f"{KERNELS}.moe_sum_reduce":
            raise RuntimeError(f"{self._name} was called, and the package {KERNELS} is not installed")
        triton = importlib.import_module("sglang.kernels.ops.moe.fused_moe_triton_kernels")
        triton.moe_sum_reduce_triton(*arguments)


def publish() -> None:
    """Give the process a configuration: kernels read flags out of it. Once is enough."""
    context = importlib.import_module("sglang.srt.runtime_context")
    if context.publish_role() is not None:
        return
    arguments = importlib.import_module("sglang.srt.server_args")
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(MODEL))
        server = arguments.ServerArgs(
            model_path=folder,
            device="cpu",
            load_format="dummy",
            skip_tokenizer_init=True,
            disable_radix_cache=True,
        )
        context.publish(server, role="scheduler", ranks=context.SpawnRanks(world_rank=0, gpu_id=0))
    parallel = context.get_parallel()
    alone = SimpleNamespace(
        world_size=1, rank_in_group=0, rank=0, ranks=[0], is_first_rank=True, is_last_rank=True
    )
    groups = [name for name in dir(type(parallel)) if name.endswith("_group")]
    parallel.override_permanently(**dict.fromkeys(groups, alone))
