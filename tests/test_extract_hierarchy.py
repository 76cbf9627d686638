"""The web interface's models.ts: modules from the reading, and every other byte as it was."""

from __future__ import annotations

from pathlib import Path

import pytest
from extract_support import GOLDEN, named, reading_of

from traceproof.errors import TraceproofError
from traceproof.extract import hierarchy

FILE = """import type { Model } from "@/lib/schemas"

const models: Model[] = [
  {
    id: "old",
    modules: {
      a: { definitions: ["x]",
      ] },
    },
  },
] satisfies Model[]

export default models
"""
MODEL = {
    "id": "new-1",
    "name": 'New "1"',
    "description": "d",
    "modules": {
        "lm_head": {"count": 1, "parent": "Top", "type": "layer", "definitions": []},
        "odd name": {"count": 2, "type": "block", "definitions": ["a" * 60, "b" * 60]},
    },
}


@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.stem)
def test_keys_are_unique_and_parents_come_first(path: Path) -> None:
    seen: set[str] = set()
    for node in hierarchy.nodes(reading_of(path), {}):
        assert node.key not in seen
        assert node.parent is None or node.parent in seen
        seen.add(node.key)
    assert len(seen) > 15


def test_dense_layers_and_experts_stand_apart_with_their_counts_and_definitions_go_by_path() -> None:
    nodes = {node.key: node for node in hierarchy.nodes(reading_of(named("deepseek_v3")), {"model.norm": ["a"]})}
    assert {key: nodes[key].count for key in ("DeepseekV2DecoderLayer", "gate_up_proj", "experts")} == {
        "DeepseekV2DecoderLayer": 61,
        "gate_up_proj": 3,
        "experts": 58,
    }
    assert nodes[nodes["experts"].parent or ""].count == 58
    assert nodes[nodes["gate_up_proj"].parent or ""].count == 3
    assert (nodes["experts"].type, nodes["self_attn"].type) == ("layer", "block")
    assert [node.key for node in nodes.values() if node.definitions] == ["norm"]


@pytest.mark.parametrize("newline", ["\n", "\r\n"])
def test_inserting_keeps_every_other_byte(newline: str) -> None:
    text = FILE.replace("\n", newline)
    result = hierarchy.inserted(text, MODEL)
    added = hierarchy.typescript(MODEL).replace("\n", newline)
    assert result.replace(added, "") == text
    assert result.index(added) < result.index("] satisfies")


def test_a_missing_comma_is_the_one_thing_added() -> None:
    text = 'const models = [\n  { id: "old" }\n]\n'
    assert hierarchy.inserted(text, MODEL).startswith('const models = [\n  { id: "old" },\n  {\n    id: "new-1",')


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (FILE.replace('"old"', '"new-1"'), "already has a model 'new-1'"),
        ("const models = []\n", "has 0 lines"),
        ("]\n]\n", "has 2 lines"),
    ],
)
def test_a_file_it_can_not_insert_into_is_left_alone(text: str, message: str) -> None:
    with pytest.raises(TraceproofError, match=message):
        hierarchy.inserted(text, MODEL)
