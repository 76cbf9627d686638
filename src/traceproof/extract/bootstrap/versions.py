"""Which SGLang versions are supported, and the module that knows each."""

from collections.abc import Mapping
from types import MappingProxyType

from packaging.version import InvalidVersion, Version

# A version is added here only with a golden reading of its own in tests/extract_golden.
SUPPORTED: Mapping[str, str] = MappingProxyType({"0.5.22": "sglang_0_5_22", "0.5.23": "sglang_0_5_22"})


def base_version(version: str) -> str:
    """`0.5.23` of `0.5.23`, `0.5.23.post1`, `0.5.23+cpu`, `0.5.23.dev4`: the release a build belongs to."""
    try:
        return Version(version).base_version
    except InvalidVersion:
        return ""
