"""The rope op: pairing read from the reference, and cases that show wrong rotations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import op_support as ops
import pytest
import torch

from traceproof.dataset.definition import Definition
from traceproof.ops.base import Unsupported
from traceproof.ops.families.rotary import ROPE as OP

NEOX = ops.load("rope", "rope_with_cos_sin_cache_neox_style_d64_rd32")
GPTJ = ops.load("rope", "rope_with_cos_sin_cache_gptj_style_d32_rd32")
EVERY = pytest.mark.parametrize("definition", [NEOX, GPTJ], ids=["neox", "gptj"])


@EVERY
def test_channels_beyond_the_cache_pass_through_unchanged(definition: Definition) -> None:
    values = ops.inputs_of(definition, ops.case_named(definition, "small-1"))
    width = definition.const_axes["rotary_dim"]
    for name, out in OP.oracle(definition, values).items():
        given = ops.tensor(values, name[0]).double()
        assert torch.equal(out[..., width:], given[..., width:])
        assert not torch.equal(out[..., :width], given[..., :width])


@EVERY
def test_a_rotation_keeps_lengths(definition: Definition) -> None:
    values = ops.inputs_of(definition, ops.case_named(definition, "medium-0"))
    norms = OP.oracle(definition, values)["q_out"].norm(dim=-1)
    torch.testing.assert_close(norms, ops.tensor(values, "q").double().norm(dim=-1), rtol=1e-6, atol=0)


@EVERY
def test_the_cache_holds_points_of_the_circle_in_every_quarter(definition: Definition) -> None:
    values = ops.inputs_of(definition, ops.case_named(definition, "medium-0"))
    cos, sin = ops.tensor(values, "cos_sin_cache").double().chunk(2, -1)
    torch.testing.assert_close(cos**2 + sin**2, torch.ones_like(cos), rtol=0, atol=2e-7)
    assert bool((cos[0] == 1).all())
    assert bool((sin[0] == 0).all())
    quarters = (cos > 0).int() * 2 + (sin > 0).int()
    assert all(int((quarters == quarter).sum()) > quarters.numel() / 8 for quarter in range(4))


@EVERY
def test_positions_hold_the_first_the_last_and_a_repeat(definition: Definition) -> None:
    for case in ops.cases(definition, "medium", "large"):
        if case.size in {"medium", "large"}:
            values = ops.inputs_of(definition, case)
            positions = ops.tensor(values, "positions").tolist()
            assert {0, len(ops.tensor(values, "cos_sin_cache")) - 1} <= set(positions)
            assert len(set(positions)) < len(positions)


def with_reference(lines: str) -> Definition:
    body = "".join(f"    {line}\n" for line in lines.strip().splitlines())
    reference = f"import torch\n\ndef run(q, k, cos_sin_cache, positions):\n{body}    return q, k\n"
    silent = {
        "name": "rope",
        "description": None,
    }  # so that nothing but the reference says how channels are paired
    return NEOX.model_copy(update={"reference": reference, **silent})


@pytest.mark.parametrize(
    "lines",
    [
        "x1 = q[..., : q.shape[-1] // 2]\nx2 = q[..., q.shape[-1] // 2 :]",
        "x1, x2 = q.chunk(2, dim=-1)",
        "x1, x2 = torch.chunk(q, 2, dim=-1)",
        "half = 32 // 2\nx1 = q[..., :half]",
        "turned = torch.cat((-b, a), dim=-1)",
        "cos, sin = cos_sin_cache[positions].chunk(2, -1)\nout = torch.cat([a * cos, b * sin], -1)",
    ],
)
def test_halves_are_recognised(lines: str) -> None:
    assert with_reference(lines).constants.get("pairing") == "halves"


@pytest.mark.parametrize(
    "lines",
    [
        "x1 = q[..., ::2]\nx2 = q[..., 1::2]",
        "x1 = q[:, :, 0:32:2]",
        "pairs = q.reshape(*q.shape[:-1], -1, 2)",
        "pairs = q.view((4, 16, 2))",
        "pairs = q.unflatten(-1, (-1, 2))",
        "out = torch.stack([a, b], dim=-1).flatten(-2)",
        "out = torch.stack((a, b), -1)",
        "z = torch.view_as_complex(pairs)",
        "cos = cos.repeat_interleave(2, dim=-1)",
        "half = 32 // 2\ncos = cos_sin_cache[positions][:, :half]\nx1 = q[..., ::2]",
        "rows = torch.index_select(cos_sin_cache, 0, positions)\ncos, sin = rows.chunk(2, -1)\nx1 = q[..., ::2]",
        "x1 = q[..., ::2]\nout = torch.cat([turned, rest], dim=-1)",
    ],
)
def test_neighbours_are_recognised(lines: str) -> None:
    assert with_reference(lines).constants.get("pairing") == "interleaved"


@pytest.mark.parametrize(
    "lines",
    [
        "out = q * 2",
        "x1 = q[..., ::2]\ny1, y2 = q.chunk(2, dim=-1)",
        "if neox:\n    x1 = q[..., :16]\nelse:\n    x1 = q[..., ::2]",
        "x1 = q[..., ::2] if interleaved else q[..., : 32 // 2]",
        "cos, sin = cos_sin_cache[positions].chunk(2, -1)",
    ],
    ids=["neither", "both", "a branch", "an expression", "only the cache is cut"],
)
def test_an_unclear_pairing_has_no_oracle(lines: str) -> None:
    with pytest.raises(Unsupported):
        OP.check(with_reference(lines))


@pytest.mark.parametrize(
    "change",
    [
        lambda entry: entry["inputs"].update(offset={"shape": None, "dtype": "int32"}),
        lambda entry: entry["inputs"]["cos_sin_cache"].update(shape=["max_seq_len", "head_size", "rotary_dim"]),
        lambda entry: entry["axes"]["rotary_dim"].update(value=33),
        lambda entry: entry["axes"]["rotary_dim"].update(value=128),
        lambda entry: entry["axes"].update(head_size={"type": "var"}),
    ],
    ids=["an unknown input", "another cache", "odd", "too wide", "head_size is var"],
)
def test_an_unknown_form_has_no_oracle(change: Callable[[dict[str, Any]], None]) -> None:
    entry = NEOX.as_json()
    change(entry)
    with pytest.raises(Unsupported):
        OP.check(Definition.model_validate(entry))
