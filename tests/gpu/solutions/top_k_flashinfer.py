"""FlashInfer's top-k sampler; its draws follow from PyTorch's generator."""

import flashinfer
import torch


def run(probs, top_k):
    generator = torch.Generator(device=probs.device).manual_seed(int(torch.randint(1 << 62, ())))
    return flashinfer.sampling.top_k_sampling_from_probs(probs, top_k, generator=generator).to(torch.int64)
