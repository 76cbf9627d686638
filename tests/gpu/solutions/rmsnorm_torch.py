"""PyTorch's own norm."""

import torch


def run(hidden_states, weight):
    return torch.nn.functional.rms_norm(hidden_states, (hidden_states.shape[-1],), weight, 1e-5)
