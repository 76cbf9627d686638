"""Replay bundles: all that a failing case needs to be looked at again, elsewhere and later."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from traceproof.names import path_part
from traceproof.reasons import Verdict
from traceproof.stages.dispute import Dispute
from traceproof.store import Store, disk_errors, write_json


@dataclass(frozen=True, slots=True)
class Bundles:
    """Writes `<root>/<definition>/<case>-<actor>/`: `replay.json`, and the outputs of the actor and of the oracle.

    `replay.json` holds the definition, the case with its seed (inputs are a pure function of these), the failing
    rows with digests, versions and device, and the command that repeats it.

    Attributes:
        run: the run's folder; rows name their bundle relative to it.
        root: where this op_type's bundles go.
        outputs: the store that tensors are linked from.
    """

    run: Path
    root: Path
    outputs: Store

    def write(self, rows: Sequence[dict[str, Any]], entry: Mapping[str, Any], dispute: Dispute) -> None:
        """Write the bundles of one definition's failing rows; each row gets `replay`, where its bundle lies.

        Raises:
            TraceproofError: the disk is full.
        """
        failing: dict[tuple[str, str], list[dict[str, Any]]] = {}
        for row in rows:
            if row["verdict"] == Verdict.FAIL and row["actor"] in dispute.records:
                failing.setdefault((row["case"], row["actor"]), []).append(row)
        cases = {planned["case"]["id"]: planned["case"] for planned in entry["cases"]}
        for (case, actor), about in failing.items():
            folder = self.root / path_part(entry["definition"]["name"]) / path_part(f"{case}-{actor}")
            folder.mkdir(parents=True)
            self._link(dispute.records[actor].get(case, {}), folder / "outputs.safetensors")
            self._link(dispute.oracle.get(case, {}), folder / "oracle.safetensors")
            for row in about:
                row["replay"] = folder.relative_to(self.run).as_posix()
            content = {"repeat": about[0]["repeat"], "case": cases[case], "rows": about}
            write_json(folder / "replay.json", content | {"definition": entry["definition"]})

    def _link(self, record: Mapping[str, Any], target: Path) -> None:
        source = self.outputs.tensors_path(str(record.get("key")))
        if not source.is_file():
            return
        try:
            os.link(source, target)
        except OSError:  # another file system, or one without links
            with disk_errors(target):
                shutil.copyfile(source, target)
