"""Secrets of the environment: who may have the hub's token, and what programs that are started get to know."""

import ctypes
import os
import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from traceproof.text import says_secret

# Where huggingface_hub looks for one in the environment.
HUB_TOKENS = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")
# All that a stranger's code gets to know of the user's environment: where programs are, the language, the devices.
HARMLESS = re.compile(
    r"PATH|LANG|LANGUAGE|LC_[A-Z]+|TZ|TERM|TMPDIR|LD_LIBRARY_PATH|CUDA_[A-Z_]+|NVIDIA_[A-Z_]+|OMP_[A-Z_]+|MKL_[A-Z_]+"
    r"|TORCH_[A-Z_]+|TRITON_[A-Z_]+|PYTHONPATH|PYTHONHASHSEED|PYTHONUTF8|PYTHONDONTWRITEBYTECODE|VIRTUAL_ENV"
)


def forget() -> None:
    """Take the token out of this process's environment, and so out of every program that it starts.

    Processes of the same user may read the environment that a process was started with: it is overwritten there.
    """
    for name in HUB_TOKENS:
        os.environ.pop(name, None)
    with suppress(OSError, ValueError, IndexError):  # not Linux, or no /proc
        _overwrite()


def _overwrite() -> None:
    """Blank the token in what /proc/<pid>/environ shows of this process: fields 50 and 51 of proc(5)'s stat."""
    fields = Path("/proc/self/stat").read_bytes().rpartition(b")")[2].split()
    start, end = int(fields[47]), int(fields[48])
    place = start
    for entry in ctypes.string_at(start, end - start).split(b"\0"):
        name, _, value = entry.partition(b"=")
        if name.decode(errors="replace") in HUB_TOKENS:
            ctypes.memset(place + len(name) + 1, ord("-"), len(value))
        place += len(entry) + 1


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
