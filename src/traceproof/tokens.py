"""The hub's token: only the process that publishes may have it."""

from __future__ import annotations

import os

# Where huggingface_hub looks for one in the environment.
HUB_TOKENS = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")


def forget() -> None:
    """Take the token out of this process's environment, and so out of every program that it starts."""
    for name in HUB_TOKENS:
        os.environ.pop(name, None)
