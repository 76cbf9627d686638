"""FlashInfer's sparse multi-head latent attention: kernels of SM 10.x, fetched as binaries."""

import torch

from traceproof.ops.adapter import Adapter, Api, Definition, Outputs, Values, dim, scalar, tensor
from traceproof.ops.attention import workspace
from traceproof.ops.dsa_paged.ground_truths import SPARSE

NOPE = 128  # width of a query head before absorption in the models that use this kernel


def _accepts(definition: Definition) -> bool:
    """The kernel returns no log-sum-exp by which a definition could be told apart; all outputs must be its own."""
    return bool(dim(definition, "ckv_cache", 1)) and bool(dim(definition, "sparse_indices", 1))


def _call(api: Api, definition: Definition, inputs: Values) -> Outputs:
    """Keys and rotated parts of a token lie side by side in one cache; a row of indices is a row's page table."""
    q = torch.cat([tensor(inputs, "q_nope"), tensor(inputs, "q_pe")], -1).unsqueeze(1)
    ckv, kpe = tensor(inputs, "ckv_cache"), tensor(inputs, "kpe_cache")
    indices = tensor(inputs, "sparse_indices")
    tokens, top_k = indices.shape
    lengths = (indices >= 0).sum(-1).to(torch.int32)
    output, lse = api["sparse_mla"](
        query=q,
        kv_cache=torch.cat([ckv, kpe], -1).unsqueeze(1),
        workspace_buffer=workspace(q.device),
        qk_nope_head_dim=NOPE,
        kv_lora_rank=ckv.shape[-1],
        qk_rope_head_dim=kpe.shape[-1],
        block_tables=indices.view(tokens, 1, top_k),
        seq_lens=lengths,
        max_seq_len=ckv.shape[0] * ckv.shape[1],
        sparse_mla_top_k=top_k,
        bmm1_scale=scalar(inputs, "sm_scale"),
        bmm2_scale=1.0,
        return_lse=True,
    )
    outputs = {"output": output.view(tokens, q.shape[2], -1), "lse": lse.view(tokens, q.shape[2])}
    return {name: outputs[name] for name in definition.outputs}


ADAPTERS = (
    Adapter(
        "trtllm_batch_decode_with_kv_cache_mla",
        SPARSE,
        _call,
        ("sparse_mla",),
        accepts=_accepts,
        sm=((10, 0), (10, 9)),
    ),
)
