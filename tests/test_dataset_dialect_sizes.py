"""Sizes that a dump leaves open: told by init, names, descriptions, tags and scales in tiles."""

from __future__ import annotations

import pytest
from dialect_samples import APPEND, changed

from traceproof.dataset.dialects import entry_of, read
from traceproof.dataset.hints import stated


def test_a_size_that_nothing_fixes_is_that_of_init_and_a_wide_one_an_eighth_of_it() -> None:
    axes = {name: {"type": "const"} for name in ("heads", "hidden", "derived", "lost")}
    init = (
        "def made(*, rows, heads=8, hidden=7168, derived=0, device='cuda'):\n    return {}\n\n\n"
        "def init(**kwargs):\n    return made(**kwargs)\n"
    )
    reading = read(changed(APPEND, axes=APPEND["axes"] | axes, init=init))
    assert {name: reading.definition.const_axes.get(name) for name in axes} == {
        "heads": 8,
        "hidden": 896,
        "derived": None,
        "lost": None,
    }
    assert any("axes.hidden is const and has no value: read as 896" in note for note in reading.notes)
    entries = [entry_of(init, handed_on=handed_on) for handed_on in (True, False)]
    assert [entry and entry.required for entry in entries] == [("rows",), ()]


def test_what_names_and_descriptions_state_of_sizes_is_a_constraint() -> None:
    names = (
        "K",
        "K_div_2",
        "rows_plus_1_kv",
        "rows",
        "hidden_size",
        "num_fp4_hidden_blocks",
        "num_packed_hidden",
        "hidden_size_padded",
    )
    experts = ("num_local_experts", "num_experts", "top_k", "intermediate_size", "num_intermediate_blocks")
    axes = {name: {"type": "var"} for name in (*names, *experts)}
    mode = {"shape": None, "dtype": "int32", "description": "2=MxFp8."}
    scales = {
        "shape": ["num_intermediate_blocks"],
        "dtype": "unknown",
        "description": "UE8M0 scales over 32 values along K.",
    }
    packed = {"shape": ["num_packed_hidden"], "dtype": "unknown"}
    described = changed(
        APPEND,
        axes=APPEND["axes"] | axes,
        inputs=APPEND["inputs"] | {"kind": mode, "scales": scales, "packed": packed},
        constraints=["rows_plus_1_kv > rows"],
    )
    reading = read(described)
    definition = reading.definition
    assert definition.constraints == (
        "rows_plus_1_kv > rows",  # which speaks of these axes: their names are not asked
        "K == K_div_2 * 2",
        "hidden_size == 16 * num_fp4_hidden_blocks",
        "hidden_size == 2 * num_packed_hidden",
        "hidden_size_padded >= hidden_size",
        "intermediate_size == 32 * num_intermediate_blocks",
        "hidden_size % 32 == 0",
        "intermediate_size % 32 == 0",
        "num_local_experts <= num_experts",
        "top_k <= num_experts",
        "top_k <= num_local_experts",
        "kind == 2",
    )
    assert str(definition.inputs["scales"].dtype) == "float8_e8m0fnu"
    assert str(definition.inputs["packed"].dtype) == "uint8"
    assert "kind == 2: taken from the description of inputs.kind" in reading.notes


def test_the_sizes_of_scales_in_tiles_are_those_of_what_they_scale() -> None:
    names = ("N", "K_packed", "SF", "q_numel", "tokens", "heads", "dim_half", "tiles", "columns", "one")
    axes = {name: {"type": "var"} for name in (*names, "width", "width_padded")}
    swizzled, tiled = "Contiguous 128x4-swizzled E4M3 buffer.", "Flat e4m3 scales, cuBLAS 128x4 tiled layout."
    sized = "The view (32, N//128, K_packed//8//4, 1) of them; (a, b) and (N, 1) say nothing."
    tensors = {
        "B": ["N", "K_packed"],
        "b_descale": ["SF"],
        "q_fp4": ["tokens", "heads", "dim_half"],
        "q_scale": ["q_numel"],
        "view": ["32", "tiles", "columns", "one"],
        "padded": ["width_padded"],
        "plain": ["width"],
    }
    told = {"b_descale": swizzled, "q_scale": tiled, "view": sized}
    inputs = {
        name: {"shape": shape, "dtype": "unknown", "description": told.get(name)}
        for name, shape in tensors.items()
    }
    definition = read(
        changed(APPEND, axes=APPEND["axes"] | axes, inputs=APPEND["inputs"] | inputs, constraints=[])
    ).definition
    found = set(definition.constraints or ())
    for size, rows, last in (("SF", "N", "K_packed"), ("q_numel", "tokens * heads", "dim_half")):
        stated_size = f"{size} == (({rows} + 127) // 128 * 128) * (({last} // 8 + 3) // 4 * 4)"
        assert f"{stated_size} and {last} % 8 == 0 and {last} >= 8" in found
    assert {"tiles == N//128", "columns == K_packed//8//4", "one == 1", "width_padded >= width"} <= found
    assert str(definition.inputs["b_descale"].dtype) == "float8_e4m3fn"
    assert str(definition.inputs["B"].dtype) == "uint8"


@pytest.mark.parametrize("shape", [None, 3, "N", [3], [["N"]], ["N", "K_packed"], ["absent"]])
@pytest.mark.parametrize("text", ["128x4-swizzled E4M3", "(N, , 1)", "(" * 5000, "(" + "," * 5000, "(N//0, 1)"])
def test_a_description_that_says_nothing_of_sizes_is_no_error(shape: object, text: str) -> None:
    scales = {"shape": shape, "dtype": "unknown", "description": text}
    axes = {"N": {"type": "var"}, "K_packed": {"type": "var"}}
    inputs = {"b": {"shape": ["N", "K_packed"], "dtype": "unknown"}, "b_scale": scales}
    assert all(isinstance(one, str) for one, _ in stated(axes, inputs))


def test_a_description_that_states_an_axis_s_only_size_is_a_constraint() -> None:
    told = {
        "rows": "Tokens (1-16).",
        "K": "Model-X hidden dim (24).",
        "planes": "Planes; required to be 2.",
        "steps": "Query length (must be 1).",
        "pad": "Always 1; a singleton.",
    }
    axes = {name: {"type": "var", "description": text} for name, text in told.items()}
    wide = {"shape": list(axes), "dtype": "float32"}
    definition = read(
        changed(APPEND, axes=APPEND["axes"] | axes, inputs=APPEND["inputs"] | {"x": wide})
    ).definition
    const = {name: size for name, size in definition.const_axes.items() if name in axes}
    assert const == {"K": 24, "planes": 2, "steps": 1, "pad": 1}


def test_a_tag_that_states_a_text_is_a_constraint() -> None:
    texts = {name: {"shape": None, "dtype": "string"} for name in ("weight_split", "layout")}
    wanted = changed(
        APPEND, inputs=APPEND["inputs"] | texts, tags=[*APPEND["tags"], "weight-split:tp_n_tp_k", "layout:'"]
    )
    reading = read(wanted)
    assert reading.definition.constraints == ("weight_split == 'tp_n_tp_k'",)
    assert "weight_split == 'tp_n_tp_k': taken from the tag weight-split:tp_n_tp_k" in reading.notes


def test_names_that_contradict_the_sizes_state_nothing() -> None:
    axes = {
        "K": {"type": "const", "value": 7},
        "K_half": {"type": "var"},
        "K_div_2": {"type": "const", "value": 5},
    }
    assert read(changed(APPEND, axes=APPEND["axes"] | axes)).definition.constraints is None
