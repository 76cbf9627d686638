"""Definitions of the gated delta rule and the Mamba state update."""

from __future__ import annotations

from collections.abc import Iterator

from traceproof.extract.definitions.form import Axes, Draft, Tensors, const, scalar, tensor, var
from traceproof.extract.kernels import Kernel
from traceproof.extract.skeletons import fill

SCALE = "Factor of the output. Default is 1/sqrt(head_size)."
GDN_CONSTRAINTS = ("num_v_heads >= num_q_heads", "num_v_heads % num_q_heads == 0", "num_k_heads == num_q_heads")
BUFFER = "Scratch for the state after each token; may be overwritten."


def gdn(kernel: Kernel) -> Iterator[Draft]:
    """Decode, verification of draft tokens, prefill."""
    heads, v_heads, dim = kernel["q_heads"], kernel["v_heads"], kernel["dim"]
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


def _decode(name: str, constants: dict[str, int]) -> Draft:
    rows = "batch_size seq_len"
    axes: Axes = {
        "batch_size": var("Number of sequences."),
        "seq_len": const(1, "Tokens a sequence: always one in decode."),
        **_heads(constants),
    }
    old = "Recurrent state in k-last layout [B, H, V, K]; None counts as zeros."
    return Draft(
        name=f"gdn_decode_{name}",
        op_type="gdn",
        description="Gated delta net decode: one token a sequence, states in k-last layout.",
        axes=axes,
        constraints=GDN_CONSTRAINTS,
        inputs={
            **_qkv(rows),
            "state": _state("batch_size", old, optional=True),
            **_gates(rows),
            "scale": scalar("float32", SCALE),
        },
        outputs={
            "output": tensor(f"{rows} num_v_heads head_size", "bfloat16", "Attention output."),
            "new_state": _state("batch_size", "Updated state in k-last layout [B, H, V, K]."),
        },
        reference=fill("gdn_decode", **constants),
        stage="decode",
        fi_api="gdn.gated_delta_rule_decode",
        extra_tags=("layout:k-last",),
        tp=True,
    )


def _mtp(name: str, constants: dict[str, int]) -> Draft:
    rows = "batch_size seq_len"
    axes: Axes = {
        "batch_size": var("Number of sequences."),
        "seq_len": var("Draft tokens of a sequence, more than one."),
        **_heads(constants),
        "pool_size": var("Slots in the pool of states."),
    }
    buffer = tensor("pool_size seq_len num_v_heads head_size head_size", "float32", BUFFER, optional=True)
    return Draft(
        name=f"gdn_mtp_{name}",
        op_type="gdn",
        description="Gated delta net over a few draft tokens a sequence, k-last states in slots of a pool.",
        axes=axes,
        constraints=(*GDN_CONSTRAINTS, "seq_len > 1"),
        inputs={
            **_qkv(rows),
            "initial_state": _state("pool_size", "Pool of states in k-last layout [pool, H, V, K]."),
            "initial_state_indices": tensor("batch_size", "int32", "Slot of each sequence."),
            **_gates(rows),
            "scale": scalar("float32", SCALE),
            "intermediate_states_buffer": buffer,
        },
        outputs={
            "output": tensor(f"{rows} num_v_heads head_size", "bfloat16", "Attention output."),
            "final_state": _state("pool_size", "The pool with each named slot after its last token."),
        },
        reference=fill("gdn_mtp", **constants),
        stage="mtp",
        fi_api="gdn.gated_delta_rule_mtp",
        extra_tags=("layout:k-last",),
        tp=True,
    )


def _prefill(name: str, constants: dict[str, int]) -> Draft:
    rows = "total_seq_len"
    axes: Axes = {
        "total_seq_len": var("Total number of tokens."),
        "num_seqs": var("Number of sequences."),
        **_heads(constants),
        "len_cu_seqlens": var("Length of cu_seqlens (num_seqs + 1)."),
    }
    old = "Recurrent state in k-last layout [N, H, V, K]; None counts as zeros."
    return Draft(
        name=f"gdn_prefill_{name}",
        op_type="gdn",
        description="Gated delta net prefill over whole sequences, states in k-last layout.",
        axes=axes,
        constraints=("len_cu_seqlens == num_seqs + 1", "total_seq_len == cu_seqlens[-1].item()"),
        inputs={
            **_qkv(rows),
            "state": _state("num_seqs", old, optional=True),
            **_gates(rows),
            "cu_seqlens": tensor("len_cu_seqlens", "int64", "Offsets of the sequences."),
            "scale": scalar("float32", SCALE),
        },
        outputs={
            "output": tensor(f"{rows} num_v_heads head_size", "bfloat16", "Attention output."),
            "new_state": _state("num_seqs", "Updated state in k-last layout [N, H, V, K]."),
        },
        reference=fill("gdn_prefill", **constants),
        stage="prefill",
        fi_api="gdn.chunk_gated_delta_rule",
        extra_tags=("layout:k-last",),
        tp=True,
    )


def mamba(kernel: Kernel) -> Draft:
    """One token a sequence, states in the slots of a cache."""
    heads, dim, state, groups = (kernel[name] for name in ("heads", "head_dim", "state", "groups"))
    # The twin keeps how many heads share a group; a real slot is a million cells, in float64 seconds a case.
    twin = _mamba(2 * heads // groups, 8, 16, 2) if heads * dim * state > TWIN_CELLS else None
    return _mamba(heads, dim, state, groups, twin=twin)


TWIN_CELLS = 1 << 16


def _mamba(heads: int, dim: int, state: int, groups: int, *, twin: Draft | None = None) -> Draft:
    per_head = "batch_size nheads head_dim"
    return Draft(
        name=f"mamba_ssu_decode_h{heads}_d{dim}_s{state}_ng{groups}",
        op_type="mamba_ssu",
        description="Mamba-2 selective state update, one token a sequence.",
        axes={
            "batch_size": var("Number of sequences."),
            "state_cache_size": var("Slots in the cache of states."),
            "nheads": const(heads, "Number of heads on one rank."),
            "head_dim": const(dim, "Channels of a head."),
            "dstate": const(state, "Size of a channel's state."),
            "ngroups": const(groups, "Groups of heads on one rank that share B and C."),
        },
        constraints=("nheads % ngroups == 0", "state_cache_size >= batch_size"),
        inputs={
            "state": tensor("state_cache_size nheads head_dim dstate", "bfloat16", "Cache of states."),
            "x": tensor(per_head, "bfloat16", "Input."),
            "dt": tensor(per_head, "bfloat16", "Time step before its bias, the same over a head's channels."),
            "A": tensor("nheads head_dim dstate", "float32", "Decay, negative, the same over a head."),
            "B": tensor("batch_size ngroups dstate", "bfloat16", "Input matrix."),
            "C": tensor("batch_size ngroups dstate", "bfloat16", "Output matrix."),
            "D": tensor("nheads head_dim", "bfloat16", "Factor of the skip connection."),
            "dt_bias": tensor("nheads head_dim", "bfloat16", "Bias of the time step, added before softplus."),
            "state_batch_indices": tensor("batch_size", "int32", "Slot of each sequence; -1 for a padding row."),
        },
        outputs={
            "output": tensor(per_head, "bfloat16", "Output."),
            "new_state": tensor("state_cache_size nheads head_dim dstate", "bfloat16", "The cache, updated."),
        },
        reference=fill("mamba_ssu_decode", nheads=heads, head_dim=dim, dstate=state, ngroups=groups),
        stage="decode",
        fi_api="mamba.selective_state_update",
        tp=True,
        twin=twin,
    )
