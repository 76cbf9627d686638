"""The constants of a survey's definitions, held against shapes of transformers' models.

    PYTHONPATH=lab .venvs/extract/bin/python lab/survey_constants.py results/survey

A reading of its own: parameters of transformers' model on the meta device and fields of its config alone, without
SGLang, without running the model, and without a line of the extraction. For each model and definition it says
whether some module has all constants of the definition together. Exits with 1 if one has not. tp is 1. `--slips`
changes each constant in turn, and says how many of these it would have seen.
"""

import argparse
import ast
import json
import logging
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import nn

PARSER = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
PARSER.add_argument("survey", type=Path, help="folder of survey.json and its dataset")
PARSER.add_argument("--slips", action="store_true")
Theirs = Any  # transformers' objects and JSON


def _made(cls: Theirs, config: Theirs) -> nn.Module:
    if not isinstance(config, cls.config_class):
        config = config.get_text_config()
    with torch.device("meta"):
        model: nn.Module = cls._from_config(config)
    return model


class Shapes:
    """A model of transformers, by the shapes of its weights."""

    def __init__(self, fields: Mapping[str, Any]) -> None:
        names = import_module("transformers.models.auto.configuration_auto").CONFIG_MAPPING_NAMES
        causal = import_module("transformers.models.auto.modeling_auto").MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
        package = import_module("transformers")
        kind, name = fields["model_type"], fields["architectures"][0]
        kind = kind if kind in names else next(one for one, cls in causal.items() if cls == name)
        whole = getattr(package, names[kind]).from_dict({**fields, "model_type": kind})
        cls = getattr(package, causal.get(kind, name))
        try:
            self.model, self.config = _made(cls, whole), whole.get_text_config()
        except ImportError:  # a tower wants a package; the language model alone does not
            self.config = whole.get_text_config()
            cls = getattr(package, causal[self.config.model_type])
            self.model = _made(cls, self.config)
        self.modules = dict(self.model.named_modules())
        self.seen = set(self.runs())
        self.text = Path(sys.modules[cls.__module__].__file__ or "").read_text(encoding="utf-8")

    def runs(self) -> Iterator[tuple[int, int]]:
        """Rows and columns of each weight of two axes, and of neighbours in a module that share their columns."""
        for module in self.modules.values():
            held = [*module.named_children(), ("", module)]
            weights = [w for _, one in held for _, w in one.named_parameters(recurse=False) if w.dim() == 2]
            turned = any(type(one).__name__ == "Conv1D" for _, one in held)
            shapes = [(w.shape[1], w.shape[0]) if turned else (w.shape[0], w.shape[1]) for w in weights]
            for columns in {shape[1] for shape in shapes}:
                rows = [shape[0] for shape in shapes if shape[1] == columns]
                for first in range(len(rows)):
                    yield from ((sum(rows[first:last]), columns) for last in range(first + 1, len(rows) + 1))

    def number(self, *names: str) -> set[int]:
        """Values of a config's fields, of those of parts that it holds too."""
        found = set()
        for part in (self.config, *vars(self.config).values()):
            held = vars(part) if hasattr(part, "__dict__") else part if isinstance(part, dict) else {}
            values = [held.get(name) for name in names]
            values += [one for value in values if isinstance(value, list) for one in value]
            found |= {value for value in values if isinstance(value, int) and not isinstance(value, bool)}
        layers = getattr(self.config, "per_layer_config", None) or {}
        for layer in layers.values() if isinstance(layers, Mapping) else ():
            held = layer if isinstance(layer, Mapping) else vars(layer)
            found |= {held[name] for name in names if isinstance(held.get(name), int)}
        return found

    def attributes(self, *names: str) -> set[float]:
        """Numbers that modules have under these names."""
        found = {getattr(one, name, None) for one in self.modules.values() for name in names}
        return {value for value in found if isinstance(value, int | float) and not isinstance(value, bool)}

    def weights(self, axes: int) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Parameters of so many axes."""
        for path, weight in self.model.named_parameters():
            if weight.dim() == axes:
                yield path, tuple(weight.shape)


def _gemm(it: Shapes, of: Mapping[str, Any]) -> bool:
    wanted = of["N"], of["K"]
    experts = {tuple(order) for _, (_, *shape) in it.weights(3) for order in (shape, shape[::-1])}
    return wanted in it.seen or wanted in experts


def _norm(it: Shapes, of: Mapping[str, Any]) -> bool:
    for module in it.modules.values():
        own = [one.shape for one in module.parameters(recurse=False)]
        eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
        if eps is None and isinstance(module, nn.RMSNorm | nn.LayerNorm):
            eps = module.eps
        widths = {tuple(one) for one in own} or {(getattr(module, "hidden_size", of["hidden_size"]),)}
        if (of["hidden_size"],) in widths and eps == of["EPS"]:
            return True
    return False


def _rope(it: Shapes, of: Mapping[str, Any]) -> bool:
    turned = {2 * buffer.shape[-1] for path, buffer in it.model.named_buffers() if path.endswith("inv_freq")}
    turned |= it.number("rotary_dim", "qk_rope_head_dim") | {int(one) for one in it.attributes("rotary_dim")}
    heads = _widths(it) | it.number("qk_rope_head_dim", "index_head_dim", "qk_head_dim")
    pairs = {
        "neox": r"\.shape\[-1\] // 2|chunk\((\w+, )?2",
        "gptj": r"::2|view_as_complex|interleave|\(-1, 2\)|-1, 2\)",
    }
    return of["rotary_dim"] in turned and of["head_size"] in heads and bool(re.search(pairs[of["style"]], it.text))


def _widths(it: Shapes) -> set[int]:
    found = it.number("head_dim", "global_head_dim", "swa_head_dim", "attention_head_dim", "v_head_dim")
    found |= {int(one) for one in it.attributes("head_dim", "head_size")}
    hidden = it.number("hidden_size", "n_embd", "d_model")
    heads = it.number("num_attention_heads", "n_head", "n_heads")
    return found | {width // count for width in hidden for count in heads}


def _gqa(it: Shapes, of: Mapping[str, Any]) -> bool:
    """Widths of a head, and weights of queries and keys in one module that have so many heads of them."""
    heads, kv, dim = of["num_qo_heads"], of["num_kv_heads"], of["head_dim"]
    if dim not in _widths(it):
        return False
    for module in it.modules.values():
        held = [w for one in module.children() for w in one.parameters(recurse=False) if w.dim() == 2]
        sizes = {size for weight in held for size in weight.shape}
        gated = 2 * heads * dim in sizes  # queries with a gate for the output
        fused = {(heads + 2 * kv) * dim, (heads + kv) * dim}
        if ((heads * dim in sizes or gated) and kv * dim in sizes) or fused & sizes:
            return True
    return False


def _mla(it: Shapes, of: Mapping[str, Any]) -> bool:
    sizes = {"head_dim_ckv": "kv_lora_rank", "head_dim_kpe": "qk_rope_head_dim", "vo_dim": "v_head_dim"}
    named = all(of[axis] in it.number(name) for axis, name in sizes.items() if axis in of)
    if "qk_dim" in of:
        inner, turned = it.number("qk_nope_head_dim"), it.number("qk_rope_head_dim")
        named &= of["qk_dim"] in {a + b for a in inner for b in turned}
    rows = [shape for path, shape in it.weights(2) if re.search(r"kv_b_proj|kv_up", path)]
    each = {a + b for a in it.number("qk_nope_head_dim") for b in it.number("v_head_dim")}
    return named and any(shape[0] == of["num_qo_heads"] * one for shape in rows for one in each)


def _dsa(it: Shapes, of: Mapping[str, Any]) -> bool:
    if of["topk"] not in it.number("index_topk"):
        return False
    if "num_index_heads" in of:
        heads, dim = of["num_index_heads"], of["index_head_dim"]
        rows = {shape[0] for path, shape in it.weights(2) if ".indexer." in path}
        return {heads * dim, heads, dim} <= rows and dim in it.number("index_head_dim")
    return _mla(it, of)


def _moe(it: Shapes, of: Mapping[str, Any]) -> bool:
    experts = of.get("num_experts", of["num_local_experts"])
    hidden, inner = of["hidden_size"], of["intermediate_size"]
    if of["num_local_experts"] != experts or of["TOP_K"] not in it.number(*TOP_K):
        return False
    groups = {"N_GROUP": ("n_group", "num_expert_group"), "TOPK_GROUP": ("topk_group",)}
    if any(of[name] not in it.number(*fields) | {1} for name, fields in groups.items() if name in of):
        return False
    shapes = {tuple(sorted(shape)) for _, shape in it.weights(3) if shape[0] == experts}
    if tuple(sorted((experts, hidden, inner))) in shapes:
        return True
    lists = [one for one in it.modules.values() if isinstance(one, nn.ModuleList) and len(one) == experts]
    return any((hidden, inner) in {tuple(w.shape) for w in one[0].parameters()} for one in lists)


TOP_K = ("num_experts_per_tok", "moe_topk", "top_k_experts", "moe_k", "num_experts_per_token", "moe_top_k")


def _activation(it: Shapes, of: Mapping[str, Any]) -> bool:
    width = of["hidden_size"]
    rows = {size for _, shape in (*it.weights(2), *it.weights(3)) for size in shape}
    names = {
        "gelu_tanh": {"gelu_pytorch_tanh", "gelu_new", "gelu_tanh"},
        "gelu": {"gelu"},
        "silu": {"silu", "swish"},
    }
    given = {getattr(it.config, name, None) for name in ("hidden_act", "hidden_activation", "activation_function")}
    given |= {part.get("name") for part in [getattr(getattr(it.config, "ffn_config", None), "ffn_act_fn", {})]}
    written = of["kind"] == "silu" and "F.silu" in it.text
    return bool({width, 2 * width} & rows) and (bool(names[of["kind"]] & given) or written)


def _gdn(it: Shapes, of: Mapping[str, Any]) -> bool:
    keys, values = it.number("linear_num_key_heads"), it.number("linear_num_value_heads")
    widths = it.number("linear_key_head_dim") & it.number("linear_value_head_dim")
    return of["num_q_heads"] in keys and of["num_v_heads"] in values and of["head_size"] in widths


def _mamba(it: Shapes, of: Mapping[str, Any]) -> bool:
    decays = {shape[0] for path, shape in it.weights(1) if path.endswith("A_log")}
    states = it.number("ssm_state_size", "state_size", "mamba_d_state")
    groups = it.number("n_groups", "mamba_n_groups")
    widths = it.number("mamba_head_dim", "head_dim", "mamba_d_head")
    return (
        of["nheads"] in decays and of["dstate"] in states and of["ngroups"] in groups and of["head_dim"] in widths
    )


def _sampling(it: Shapes, of: Mapping[str, Any]) -> bool:
    tables = [one for one in it.modules.values() if isinstance(one, nn.Embedding)]
    return of["vocab_size"] in {one.num_embeddings for one in tables}


CHECKS: Mapping[str, Callable[[Shapes, Mapping[str, Any]], bool]] = {
    "gemm": _gemm, "rmsnorm": _norm, "rope": _rope, "gqa_paged": _gqa, "gqa_ragged": _gqa, "mla_paged": _mla,
    "mla_ragged": _mla, "moe": _moe, "activation": _activation, "gdn": _gdn, "mamba_ssu": _mamba,
    "sampling": _sampling, "dsa_paged": _dsa,
}  # fmt: skip


def constants(definition: Mapping[str, Any]) -> dict[str, Any]:
    """A definition's const axes, and numbers at the top of its reference."""
    found = {name: axis["value"] for name, axis in definition["axes"].items() if axis["type"] == "const"}
    for node in ast.parse(definition["reference"]).body:
        match node:
            case ast.Assign(targets=[ast.Name(id=constant)], value=ast.Constant(value=value)):
                found[constant] = value
    name = str(definition["name"])
    return found | {"style": "gptj" if "_gptj_" in name else "neox", "kind": name.partition("_and_mul")[0]}


def slips(definition: Mapping[str, Any], given: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The constants with one of them wrong: an axis that a tensor has a fifth larger, ten times an eps."""
    shapes = [spec["shape"] or [] for part in ("inputs", "outputs") for spec in definition[part].values()]
    own = {axis for shape in shapes for axis in shape} - NAMED
    for axis in own & {name for name, axis in definition["axes"].items() if axis["type"] == "const"}:
        yield {**given, axis: given[axis] + max(1, given[axis] // 5)}
    if "EPS" in given:
        yield {**given, "EPS": given["EPS"] * 10}


# Sizes that follow from others, and those that no model has.
NAMED = {
    *("page_size", "gemm1_out_size", "input_size", "num_k_heads", "num_hidden_blocks", "num_intermediate_blocks"),
    *("num_gemm1_out_blocks", "seq_len", "kv_cache_num_heads", "head_dim_with_scale"),
}


def main() -> None:
    """Check every model's definitions, and say how many constants were found."""
    options = PARSER.parse_args()
    logging.disable(logging.ERROR)
    files = {path.stem: path for path in (options.survey / "dataset").rglob("*.json")}
    right: Counter[str] = Counter()
    wrong: dict[str, list[str]] = defaultdict(list)
    planted: Counter[str] = Counter()
    seen: Counter[str] = Counter()
    unread = []
    for row in json.loads((options.survey / "survey.json").read_text(encoding="utf-8")):
        try:
            shapes = Shapes(row["fields"])
        except (ImportError, AttributeError, KeyError, TypeError, ValueError) as error:
            unread.append(f"{row['model_type']}: {type(error).__name__}: {error}"[:160])
            continue
        for name in row["definitions"]:
            definition = json.loads(files[name].read_text(encoding="utf-8"))
            kind, given = definition["op_type"], constants(definition)
            for slip in slips(definition, given) if options.slips else ():
                planted[kind] += 1
                seen[kind] += not CHECKS[kind](shapes, slip)
            if CHECKS[kind](shapes, given):
                right[kind] += 1
            else:
                wrong[kind].append(f"{row['model_type']}: {name}")
    for kind in sorted({*right, *wrong}):
        sys.stdout.write(f"{kind}: {right[kind]} found, {len(wrong[kind])} not\n")
    sys.stdout.writelines(
        f"{kind}: {seen[kind]} of {count} slips seen\n" for kind, count in sorted(planted.items())
    )
    sys.stdout.writelines(f"not found: {one}\n" for names in wrong.values() for one in names)
    sys.stdout.writelines(f"no model: {one}\n" for one in unread)
    total = sum(map(len, wrong.values()))
    sys.stdout.write(f"{sum(right.values())} uses of definitions by models found, {total} not\n")
    sys.exit(1 if total else 0)


if __name__ == "__main__":
    main()
