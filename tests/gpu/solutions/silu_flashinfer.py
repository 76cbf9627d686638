"""FlashInfer's gated activation."""

import flashinfer


def run(input):  # noqa: A002 - the definition's name
    return flashinfer.activation.silu_and_mul(input)
