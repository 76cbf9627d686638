"""The gated delta rule in models, and its definitions."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from traceproof.models.evidence import Evidence
from traceproof.models.kernel import Kernel
from traceproof.models.reading import Module, Reading
from traceproof.ops.drafts import Axes, Draft, Tensors, const, fill, scalar, tensor, var
from traceproof.ops.extraction import Extraction, Facts, call_of, dtype_name


def _delta_net(module: Any, parent: Any) -> Facts:  # noqa: ANN401
    if not hasattr(parent, "A_log"):
        return {"form": type(parent).__name__}
    return {
        "form": "gated_delta_net",
        "q_heads": module.num_q_heads,
        "k_heads": module.num_k_heads,
        "v_heads": module.num_v_heads,
        "k_dim": module.head_k_dim,
        "v_dim": module.head_v_dim,
        "dt_bias_dtype": dtype_name(parent.dt_bias),
    }


SCALE: Tensors = {"scale": scalar("float32", "Factor of the output. Default is 1/sqrt(head_size).")}
GDN_CONSTRAINTS = ("num_v_heads >= num_q_heads", "num_v_heads % num_q_heads == 0", "num_k_heads == num_q_heads")
BUFFER = "Scratch for the state after each token; may be overwritten."


def gdn(call: Kernel) -> Iterator[Draft]:
    """Decode, verification of draft tokens, prefill."""
    heads, v_heads, dim = call["q_heads"], call["v_heads"], call["dim"]
    constants = {"num_q_heads": heads, "num_v_heads": v_heads, "head_size": dim}
    name = f"qk{heads}_v{v_heads}_d{dim}_k_last"
    yield _decode(name, constants)
    yield _mtp(name, constants)
    yield _prefill(name, constants)


def _heads(constants: dict[str, int]) -> Axes:
    heads = constants["num_q_heads"]
    return {
        "num_q_heads": const(heads, "Number of query heads on one rank."),
        "num_k_heads": const(heads, "Number of key heads on one rank."),
        "num_v_heads": const(constants["num_v_heads"], "Number of value heads on one rank."),
        "head_size": const(constants["head_size"], "Channels of a head."),
    }


def _gates(rows: str) -> Tensors:
    return {
        "A_log": tensor(
            "num_v_heads", "float32", "Logarithm of the decay: exp(-exp(A_log) * softplus(a + dt_bias))."
        ),
        "a": tensor(f"{rows} num_v_heads", "bfloat16", "Input-dependent decay."),
        "dt_bias": tensor("num_v_heads", "float32", "Bias of the decay, added to a before softplus."),
        "b": tensor(f"{rows} num_v_heads", "bfloat16", "Update gate: beta = sigmoid(b)."),
    }


def _qkv(rows: str) -> Tensors:
    return {
        "q": tensor(f"{rows} num_q_heads head_size", "bfloat16", "Queries."),
        "k": tensor(f"{rows} num_k_heads head_size", "bfloat16", "Keys."),
        "v": tensor(f"{rows} num_v_heads head_size", "bfloat16", "Values."),
    }


def _state(rows: str, description: str, *, optional: bool = False) -> dict[str, object]:
    return tensor(f"{rows} num_v_heads head_size head_size", "float32", description, optional=optional)


def _draft(  # noqa: PLR0913 - what the three stages differ in
    stage: str,
    name: str,
    constants: dict[str, int],
    *,
    description: str,
    axes: Axes,
    constraints: Sequence[str],
    inputs: Tensors,
    after: Tensors,
    api: str,
) -> Draft:
    rows = "total_seq_len" if stage == "prefill" else "batch_size seq_len"
    return Draft(
        name=f"gdn_{stage}_{name}",
        description=description,
        axes=axes,
        constraints=constraints,
        inputs=_qkv(rows) | inputs,
        outputs={"output": tensor(f"{rows} num_v_heads head_size", "bfloat16", "Attention output."), **after},
        filled=fill(__package__, f"gdn_{stage}", **constants),
        stage=stage,
        fi_api=f"gdn.{api}",
        extra_tags=("layout:k-last",),
        tp=True,
    )


def _decode(name: str, constants: dict[str, int]) -> Draft:
    one = const(1, "Tokens a sequence: always one in decode.")
    old = "Recurrent state in k-last layout [B, H, V, K]; None counts as zeros."
    return _draft(
        "decode",
        name,
        constants,
        description="Gated delta net decode: one token per sequence, states in k-last layout.",
        axes={"batch_size": var("Number of sequences."), "seq_len": one, **_heads(constants)},
        constraints=GDN_CONSTRAINTS,
        inputs={"state": _state("batch_size", old, optional=True), **_gates("batch_size seq_len"), **SCALE},
        after={"new_state": _state("batch_size", "Updated state in k-last layout [B, H, V, K].")},
        api="gated_delta_rule_decode",
    )


def _mtp(name: str, constants: dict[str, int]) -> Draft:
    axes: Axes = {
        "batch_size": var("Number of sequences."),
        "seq_len": var("Draft tokens of a sequence, more than one."),
        **_heads(constants),
        "pool_size": var("Slots in the pool of states."),
    }
    buffer = tensor("pool_size seq_len num_v_heads head_size head_size", "float32", BUFFER, optional=True)
    inputs: Tensors = {
        "initial_state": _state("pool_size", "Pool of states in k-last layout [pool, H, V, K]."),
        "initial_state_indices": tensor("batch_size", "int32", "Slot of each sequence."),
        **_gates("batch_size seq_len"),
        **SCALE,
        "intermediate_states_buffer": buffer,
    }
    return _draft(
        "mtp",
        name,
        constants,
        description="Gated delta net over a few draft tokens a sequence, k-last states in slots of a pool.",
        axes=axes,
        constraints=(*GDN_CONSTRAINTS, "seq_len > 1"),
        inputs=inputs,
        after={"final_state": _state("pool_size", "The pool with each named slot after its last token.")},
        api="gated_delta_rule_mtp",
    )


def _prefill(name: str, constants: dict[str, int]) -> Draft:
    axes: Axes = {
        "total_seq_len": var("Total number of tokens."),
        "num_seqs": var("Number of sequences."),
        **_heads(constants),
        "len_cu_seqlens": var("Length of cu_seqlens (num_seqs + 1)."),
    }
    old = "Recurrent state in k-last layout [N, H, V, K]; None counts as zeros."
    inputs: Tensors = {
        "state": _state("num_seqs", old, optional=True),
        **_gates("total_seq_len"),
        "cu_seqlens": tensor("len_cu_seqlens", "int64", "Offsets of the sequences."),
        **SCALE,
    }
    return _draft(
        "prefill",
        name,
        constants,
        description="Gated delta net prefill over whole sequences, states in k-last layout.",
        axes=axes,
        constraints=("len_cu_seqlens == num_seqs + 1", "total_seq_len == cu_seqlens[-1].item()"),
        inputs=inputs,
        after={"new_state": _state("num_seqs", "Updated state in k-last layout [N, H, V, K].")},
        api="chunk_gated_delta_rule",
    )


def _call(module: Module, _: Reading) -> Kernel | str:
    facts = module.facts
    if facts["form"] != "gated_delta_net" or facts["k_dim"] != facts["v_dim"]:
        return f"the dataset describes no linear attention of the form {facts['form']}"
    return call_of(module, "gdn", "q_heads", "v_heads", dim=facts["k_dim"])


def _differs(call: Kernel, evidence: Evidence) -> str | None:
    tp = evidence.parallel.attention

    def terms(facts: Mapping[str, Any]) -> Mapping[str, Any]:
        keys, values = facts.get("num_k_heads", 0), facts.get("num_v_heads", 0)
        widths = {"dim": facts.get("head_k_dim"), "v_dim": facts.get("head_v_dim")}
        return {"q_heads": keys // tp, "v_heads": values // tp} | widths

    return evidence.differs(call, "state", terms, v_dim=call["dim"])


EXTRACTION = Extraction(
    readers={"RadixLinearAttention": ("linear_attention", _delta_net)},
    calls={"linear_attention": _call},
    differs={"gdn": _differs},
    drafts={"gdn": lambda call, _: gdn(call)},
)
