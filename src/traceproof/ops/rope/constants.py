"""What states which channels a rotary embedding pairs."""

from traceproof.dataset.constants import Rule

RULES = (
    Rule(
        name="pairing",
        label="pairing of channels",
        reader="pairing",
        read="whether halves are cut or joined, or every second channel is taken, viewed, stacked or repeated",
        described=((r"\bneox\b|\bhalves\b", "halves"), (r"\bgpt-?j\b|\bneighbours\b", "interleaved")),
        named=((r"_neox_style(?:_|$)", "halves"), (r"_gptj_style(?:_|$)", "interleaved")),
        defaults={
            "rope.apply_rope_with_cos_sin_cache": ("is_neox", "halves"),
            "rope.apply_rope_with_cos_sin_cache_inplace": ("is_neox", "halves"),
        },
    ),
)
