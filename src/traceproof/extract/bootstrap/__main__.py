"""`python -m traceproof.extract.bootstrap`: one reading (or the list of architectures) as JSON in a file.

SGLang prints to stdout, so the answer goes to `--out`: either the reading, or {"error": {...}} with exit status 3.
"""

from __future__ import annotations

import argparse
import importlib
import json
import resource
import sys
import time
import traceback
from pathlib import Path
from typing import Any

from traceproof.extract.bootstrap import stubs
from traceproof.extract.bootstrap.versions import SUPPORTED, base_version

REFUSED = 3  # the answer says why; anything else but 0 is a crash
FORMAT = 1  # of the reading


class Refused(Exception):  # noqa: N818 - an answer, not a fault
    """This reading can not be made; `answer` says why."""

    def __init__(self, reason: str, **details: Any) -> None:  # noqa: ANN401 - JSON
        super().__init__(reason)
        self.answer = {"reason": reason, **details}


def main(arguments: list[str] | None = None) -> int:
    """Read, write the answer, return the exit status."""
    parser = argparse.ArgumentParser(prog="traceproof.extract.bootstrap")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument(
        "--folder", type=Path, help="holds the model's config.json; without it: list architectures"
    )
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--ep", type=int, default=1)
    options = parser.parse_args(arguments)
    try:
        answer = read(options.folder, tp=options.tp, ep=options.ep)
    except Refused as refused:
        options.out.write_text(json.dumps({"error": refused.answer}), encoding="utf-8")
        return REFUSED
    options.out.write_text(json.dumps(answer, indent=1) + "\n", encoding="utf-8")
    return 0


def read(folder: Path | None, *, tp: int, ep: int) -> dict[str, Any]:
    """The reading of `folder`/config.json, or the architectures known if there is no folder.

    Raises:
        Refused: SGLang is absent, its version is not supported, or it does not accept the config.
    """
    started = time.monotonic()
    stubs.install()
    version, adapter = _adapter()
    if folder is None:
        return {"format": FORMAT, "sglang": version, "architectures": adapter.architectures()}
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    named = config.get("architectures") or [None]
    known = adapter.architectures()
    if named[0] not in known:
        raise Refused("unknown architecture", value=named[0], allowed=known, version=version)
    from traceproof.extract.bootstrap.facts import describe

    try:
        model = adapter.build_model(folder, tp=tp, ep=ep)
    except Exception as error:  # whatever SGLang raises about a config is the answer, told with its place
        place = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{Path(place.filename).name}:{place.lineno} in {place.name}"
        raise Refused("not accepted", message=f"{type(error).__name__}: {error}", where=where) from error
    versions = {name: importlib.import_module(name).__version__ for name in ("transformers", "torch")}
    return {
        "format": FORMAT,
        "sglang": version,
        **versions,
        "architecture": type(model).__name__,
        "tp": tp,
        "ep": ep,
        "experts": "routed only",
        "modules": describe(model),
        "seconds": round(time.monotonic() - started, 2),
        "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
    }


def _adapter() -> tuple[str, Any]:
    try:
        version: str = importlib.import_module("sglang.version").__version__
    except ImportError as error:
        raise Refused("no sglang", message=str(error)) from error
    if base_version(version) not in SUPPORTED:
        raise Refused("unsupported version", value=version, allowed=list(SUPPORTED))
    module = SUPPORTED[base_version(version)]
    return version, importlib.import_module(f"traceproof.extract.bootstrap.{module}")


if __name__ == "__main__":
    sys.exit(main())
