"""What runs inside the extract environment: SGLang's model on the meta device, written down as a reading.

`python -m traceproof.extract.bootstrap` is started by `traceproof.extract.reading`. Only here is SGLang imported.
"""

from packaging.version import InvalidVersion, Version

# A version is added here only with a golden reading of its own in tests/extract_golden.
SUPPORTED = ("0.5.22", "0.5.23")


def base_version(version: str) -> str:
    """`0.5.23` of `0.5.23`, `0.5.23.post1`, `0.5.23+cpu`, `0.5.23.dev4`: the release a build belongs to."""
    try:
        return Version(version).base_version
    except InvalidVersion:
        return ""
