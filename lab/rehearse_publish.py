"""Publish a finished run to a hub on this machine, and count what happened: docs/publishing.md has the figures.

    python lab/rehearse_publish.py --dataset results/dataset/<slug>/<folder> --scratch /tmp/hub rmsnorm gemm

The hub is the tests' own: real HTTP, LFS, pull requests. Its main branch starts as the dataset. For each op_type
the command is run as a user would: dry, with --push, and with --push again. Exit code: 0 as it should be, 1 not.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))

from hub_repository import Repository  # noqa: E402 - after the line above
from hub_server import TOKENS, WRITER, HubServer, serving  # noqa: E402 - after the line above

NAME = "flashinfer-ai/flashinfer-trace"
MARKER = "traceproof-bundle: "
PARSER = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
PARSER.add_argument("--dataset", type=Path, required=True, help="what the hub's main branch starts as")
PARSER.add_argument("--scratch", type=Path, required=True, help="folder for the hub; written anew")
PARSER.add_argument("op_types", nargs="+", help="published one after another")


def main(options: argparse.Namespace) -> int:
    """Rehearse; 1 if anything is not as it should be."""
    shutil.rmtree(options.scratch, ignore_errors=True)
    with serving(options.scratch) as hub:
        repository = hub.create(NAME)
        before = repository.seed(options.dataset)
        requests: dict[str, list[dict[str, Any]]] = {"dry run": [], "first push": [], "second push": []}
        said = ""
        for op_type in options.op_types:
            for step, flags in (("dry run", ()), ("first push", ("--push",)), ("second push", ("--push",))):
                start = len(hub.log)
                said += _publish(hub, op_type, *flags)
                requests[step] += hub.log[start:]
        for step, log in requests.items():
            verbs = Counter(item["request"].partition(" ")[0] for item in log)
            commits = sum("/commit/" in item["request"] for item in log)
            _say(f"{step}: {len(log)} requests {dict(verbs)}, {commits} commits")
        right = _read_back(repository)
        untouched = repository.head("main") == before
        _say(f"main {'untouched' if untouched else 'CHANGED'}")
        found = _tokens(options.scratch, said, hub)
    silent = not requests["dry run"]
    again = not any("/commit/" in item["request"] for item in requests["second push"])
    return int(not (right and untouched and silent and again and not found))


def _publish(hub: HubServer, op_type: str, *flags: str) -> str:
    environment = {**os.environ, "HF_TOKEN": WRITER, "HF_ENDPOINT": hub.endpoint, "HF_HUB_DISABLE_XET": "1"}
    command = [sys.executable, "-m", "traceproof", "publish", "--op-type", op_type, *flags]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    _say(f"traceproof {' '.join(command[3:])}: exit code {done.returncode}")
    if done.returncode:
        _say(done.stderr)
    return done.stdout + done.stderr


def _read_back(repository: Repository) -> bool:
    """Whether each pull request has one commit and holds its dry run's files byte for byte."""
    wrong = files = size = 0
    found = repository.discussions()
    for discussion in found:
        reference = f"refs/pr/{discussion['num']}"
        wrong += int(repository.git("rev-list", "--count", f"main..{reference}")) != 1
        lines = discussion["events"][0]["data"]["latest"]["raw"].splitlines()
        slug = next(line.removeprefix(MARKER) for line in lines if line.startswith(MARKER))
        folder = ROOT / "results" / "publish" / slug
        for item in json.loads((folder / "files.json").read_text(encoding="utf-8"))["files"]:
            data = (folder / "files" / item["path"]).read_bytes()
            files, size = files + 1, size + len(data)
            wrong += repository.read(reference, item["path"]) != data
    _say(f"{len(found)} pull requests, {files} files of {size} bytes read back, {wrong} wrong")
    return bool(found) and not wrong


def _tokens(scratch: Path, said: str, hub: HubServer) -> int:
    """How many files, request bodies and outputs hold a token of the hub."""
    folders = (ROOT / "results", ROOT / ".snakemake", scratch)
    paths = [path for folder in folders for path in folder.rglob("*") if path.is_file()]
    texts = [said.encode(), *(item["body"].encode("latin-1") for item in hub.log)]
    found = sum(any(token.encode() in text for token in TOKENS) for text in texts)
    found += sum(any(token.encode() in path.read_bytes() for token in TOKENS) for path in paths)
    _say(f"a token in {found} of {len(paths)} files and {len(hub.log)} request bodies")
    return found


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    raise SystemExit(main(PARSER.parse_args()))
