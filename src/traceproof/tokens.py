"""Secrets of the environment: who may have the hub's token, and what programs that are started get to know."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

from traceproof.text import says_secret

# Where huggingface_hub looks for one in the environment.
HUB_TOKENS = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")
# All that a stranger's code gets to know of the user's environment: where programs are, the language, the devices.
HARMLESS = re.compile(
    r"PATH|LANG|LANGUAGE|LC_[A-Z]+|TZ|TERM|TMPDIR|LD_LIBRARY_PATH|CUDA_[A-Z_]+|NVIDIA_[A-Z_]+|OMP_[A-Z_]+|MKL_[A-Z_]+"
    r"|TORCH_[A-Z_]+|TRITON_[A-Z_]+|PYTHONPATH|PYTHONHASHSEED|PYTHONUTF8|PYTHONDONTWRITEBYTECODE|VIRTUAL_ENV"
)


def forget() -> None:
    """Take the token out of this process's environment, and so out of every program that it starts."""
    for name in HUB_TOKENS:
        os.environ.pop(name, None)


def without_secrets(environment: Mapping[str, str] | None = None) -> dict[str, str]:
    """An environment (this process's) for a program that has no business with tokens: pip, git, our own code."""
    given = os.environ if environment is None else environment
    return {name: value for name, value in given.items() if not says_secret(name)}


def for_strangers(environment: Mapping[str, str] | None = None) -> dict[str, str]:
    """An environment (of this process's) for a program that runs strangers' code: what is known to be harmless.

    HOME, where credentials lie, is not in it.
    """
    given = os.environ if environment is None else environment
    return {name: value for name, value in given.items() if HARMLESS.fullmatch(name) and not says_secret(name)}
