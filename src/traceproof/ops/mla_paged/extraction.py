"""Multi-head latent attention in models, and its absorbed definitions over a paged cache."""

from traceproof.models.reading import Kernel, Module, Reading
from traceproof.ops.common import attention_extraction as attention
from traceproof.ops.extraction import Extraction


def _call(module: Module, _: Reading) -> Kernel | str | None:
    if not module.facts.get("absorbed"):
        return None
    return attention.called(module, "mla_absorbed", heads="heads", ckv="kv_lora_rank", kpe="rope_dim")


EXTRACTION = Extraction(
    readers=attention.READERS,
    calls={"attention": _call},
    differs={"mla_absorbed": attention.against_latent},
    drafts={"mla_absorbed": attention.paged(__package__, "mla_paged")},
)
