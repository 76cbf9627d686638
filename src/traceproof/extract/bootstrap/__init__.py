"""What runs in the extract environment: it lays out SGLang's model on the meta device and writes down a reading.

`python -m traceproof.extract.bootstrap` is started by `traceproof.extract.reading`. SGLang is imported only here.
"""

from packaging.version import InvalidVersion, Version

# A version is added here together with a golden reading in tests/extract_golden.
SUPPORTED = ("0.5.22", "0.5.23")


def base_version(version: str) -> str:
    """The release of a build: `0.5.23` for `0.5.23.post1`, `0.5.23+cpu`, `0.5.23.dev4`; "": no version."""
    try:
        return Version(version).base_version
    except InvalidVersion:
        return ""
