"""Definitions of grouped-query attention over ragged keys and values."""

from traceproof.models.reading import Kernel
from traceproof.ops.drafts import Draft, draft
from traceproof.ops.extraction import Extraction


def gqa_ragged(call: Kernel) -> Draft:
    """Whole sequences, keys and values side by side; causal."""
    sizes = {"num_qo_heads": call["heads"], "num_kv_heads": call["kv_heads"]}
    return draft(__package__, "gqa_ragged", sizes | dict.fromkeys(("qk_dim", "vo_dim"), call["dim"]))


EXTRACTION = Extraction(drafts={"gqa": lambda call, _: [gqa_ragged(call)]})
