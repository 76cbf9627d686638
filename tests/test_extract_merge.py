"""What extraction writes: definitions merged into a dataset, models.ts, and the whole way there."""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import forked
import pytest
from extract_support import GOLDEN, golden, named, reading_of, uses_of
from repository import Repository, own_dataset

from traceproof.config import Config, ModelChoice, read_config
from traceproof.dataset.definition import Definition
from traceproof.dataset.fetch import scan_digest
from traceproof.errors import TraceproofError
from traceproof.extract import hierarchy, pipeline
from traceproof.extract.merge import CheckResult, meaning_differences, merge, notes, write
from traceproof.extract.pipeline import (
    ExtractionResult,
    ExtractionSettings,
    Unmapped,
    collect,
    drafted,
    link,
    model_of,
    to_review,
    write_sharing,
)
from traceproof.extract.reading import ReaderEnvironment
from traceproof.models.drafts import Draft, draft
from traceproof.ops.families.norm import RMSNORM


def norm(eps: float) -> Draft:
    values = {"kind": RMSNORM.op_type, "hidden_size": 64, "eps": eps, "shown": f"{eps:g}", "note": ""}
    return draft(RMSNORM.op_type, RMSNORM.op_type, values)


def eps_norm(eps: float, *models: str) -> Definition:
    return drafted(norm(eps), [f"model:{model}" for model in models])


def alike(pairs: Sequence[tuple[Definition, str]]) -> list[CheckResult]:
    return [CheckResult(3, ()) for _ in pairs]


def saved(root: Path) -> dict[str, str]:
    return {path.name: path.read_text(encoding="utf-8") for path in sorted(root.rglob("*")) if path.is_file()}


def test_a_new_definition_is_written_and_again_nothing_is(tmp_path: Path) -> None:
    results = merge([eps_norm(1e-6, "a")], (tmp_path,), alike)
    assert [result.status for result in results] == ["new"]
    assert write(results, tmp_path) == [tmp_path / "definitions/rmsnorm/rmsnorm_h64.json"]
    again = merge([eps_norm(1e-6, "a")], (tmp_path,), alike)
    assert [result.status for result in again] == ["same"]
    assert write(again, tmp_path) == []


def test_new_models_are_added_and_nothing_else_changes(tmp_path: Path) -> None:
    write(merge([eps_norm(1e-6, "a")], (tmp_path,), alike), tmp_path)
    file = tmp_path / "definitions/rmsnorm/rmsnorm_h64.json"
    content = json.loads(file.read_text(encoding="utf-8")) | {"description": "an older text"}
    file.write_text(json.dumps(content, indent=2), encoding="utf-8")
    results = merge([eps_norm(1e-6, "a", "b")], (tmp_path,), alike)
    write(results, tmp_path)
    assert [result.status for result in results] == ["tags"]
    assert file.read_text(encoding="utf-8") == json.dumps(content | {"tags": ["model:a", "model:b"]}, indent=2)


def test_another_eps_under_the_same_name_is_saved_beside_the_old_one(tmp_path: Path) -> None:
    write(merge([eps_norm(1e-6, "a")], (tmp_path,), alike), tmp_path)
    before = saved(tmp_path)["rmsnorm_h64.json"]
    [result] = merge([eps_norm(1e-5, "b")], (tmp_path,), alike)
    write([result], tmp_path)
    assert result.status == "conflict"
    assert result.differences == ("reference: eps is 1e-05 and 1e-06",)
    files = saved(tmp_path)
    assert files["rmsnorm_h64.json"] == before
    assert json.loads(files["rmsnorm_h64_v2.json"])["name"] == "rmsnorm_h64_v2"
    [repeated] = merge([eps_norm(1e-5, "b")], (tmp_path,), alike)
    assert (repeated.name, repeated.text) == ("rmsnorm_h64_v2", None)


def test_what_the_output_folder_has_counts_before_the_dataset(tmp_path: Path) -> None:
    dataset, out = tmp_path / "dataset", tmp_path / "out"
    write(merge([eps_norm(1e-6, "a")], (out, dataset), alike), out)
    [result] = merge([eps_norm(1e-6, "b")], (out, dataset), alike)
    assert result.status == "tags"
    assert '"model:a",\n    "model:b"' in str(result.text)
    [result] = merge([eps_norm(1e-5, "b")], (out, dataset), alike)
    assert (result.status, result.name) == ("conflict", "rmsnorm_h64_v2")


@pytest.mark.parametrize("file", ["My-Llama/config.json", "my-llama.json", "my-llama/", "my-llama.json@"])
def test_a_model_without_a_name_is_called_by_its_file_or_its_folder(tmp_path: Path, file: str) -> None:
    path = tmp_path / file.removesuffix("@")
    target = path / "config.json" if file.endswith("/") else path
    if file.endswith("@"):  # a link, as in caches of downloads
        target = tmp_path / "0f3a"
        path.symlink_to(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(json.dumps(dict(model_of("llama").config)))
    assert model_of(None, config=path)[:2] == ("my_llama", ("my-llama",))


def test_a_reference_that_behaves_differently_is_a_conflict_but_not_on_an_edge_case(tmp_path: Path) -> None:
    write(merge([eps_norm(1e-6, "a")], (tmp_path,), alike), tmp_path)
    file = tmp_path / "definitions/rmsnorm/rmsnorm_h64.json"
    text = file.read_text(encoding="utf-8").replace("(x * x).mean", "x.square().mean")
    file.write_text(text, encoding="utf-8")

    def judged(problem: str) -> tuple[str, tuple[str, ...]]:
        [result] = merge(
            [eps_norm(1e-6, "a")], (tmp_path,), lambda them: [CheckResult(3, (problem,)) for _ in them]
        )
        return result.status, (*result.differences, *result.notes)

    status, said = judged("small-0: output: off")
    assert (status, said) == ("conflict", ("reference behaves differently: small-0: output: off",))
    status, said = judged("edge-empty: output: NaN")
    assert status == "same"
    assert "edge case: edge-empty" in said[0]


def test_a_dataset_file_that_can_not_be_read_stops_before_anything_is_written(tmp_path: Path) -> None:
    file = tmp_path / "definitions/rmsnorm/rmsnorm_h64.json"
    file.parent.mkdir(parents=True)
    file.write_text("{", encoding="utf-8")
    with pytest.raises(TraceproofError, match="cannot be read"):
        merge([eps_norm(1e-6, "a")], (tmp_path,), alike)
    assert saved(tmp_path) == {"rmsnorm_h64.json": "{"}
    deep = eps_norm(1e-6, "a").as_json() | {"reference": f"x = {'-' * 50_000}1\ndef run(x): return x\n"}
    file.write_text(json.dumps(deep), encoding="utf-8")
    with pytest.raises(TraceproofError, match="cannot be read: nested too deeply"):
        merge([eps_norm(1e-6, "a")], (tmp_path,), alike)


def test_a_write_that_fails_leaves_no_file_behind(tmp_path: Path) -> None:
    results = merge([eps_norm(1e-6, "a")], (tmp_path / "none",), alike)
    (tmp_path / "definitions").write_text("in the way", encoding="utf-8")
    with pytest.raises(OSError, match="definitions"):
        write(results, tmp_path)
    assert saved(tmp_path) == {"definitions": "in the way"}


def test_models_that_share_a_kernel_share_its_definition(tmp_path: Path) -> None:
    next_, qwen = uses_of(named("qwen3_next"), "qwen3-next"), uses_of(named("qwen3_30b"), "qwen3-30b-a3b")
    wanted, clashes = collect([*next_, *qwen])
    by_name = {item.name: item for item in wanted}
    assert clashes == []
    tags = by_name["top_k_sampling_from_probs_v151936"].definition().tags
    assert {"model:qwen3-next", "model:qwen3-30b-a3b"} <= set(tags)
    write_sharing(wanted, clashes, tmp_path, keep=False)
    table = (tmp_path / "sharing.md").read_text()
    assert "| gemm_n2048_k4096 | gemm | qwen3-next tp4 ep4 (48), qwen3-30b-a3b tp1 ep1 (48) |" in table


def test_the_table_of_shared_kernels_covers_earlier_calls_too(tmp_path: Path) -> None:
    for model in ("qwen3_next", "qwen3_30b", "qwen3_next"):
        wanted, clashes = collect(uses_of(named(model), model))
        write_sharing(wanted, clashes, tmp_path, keep=True)
    table = (tmp_path / "sharing.md").read_text()
    assert "| gemm_n2048_k4096 | gemm | qwen3_30b tp1 ep1 (48), qwen3_next tp4 ep4 (48) |" in table
    wanted, clashes = collect(uses_of(named("qwen3_next"), "qwen3-next"))
    write_sharing(wanted, clashes, tmp_path, keep=False)
    assert "qwen3-30b" not in (tmp_path / "sharing.md").read_text()


def test_a_family_s_name_means_its_only_bundled_model_its_alias_or_has_to_be_told_apart() -> None:
    names = {"mixtral": "mixtral_8x7b", "qwen2_moe": "qwen2_57b_a14b", "llama": "llama_3_1_8b"}
    assert {name: model_of(name)[0] for name in names} == names
    with pytest.raises(TraceproofError, match=re.escape("did you mean qwen3_30b_a3b or qwen3_next_80b_a3b?")):
        model_of("qwen3")


def test_what_no_definition_describes_is_said_by_kind() -> None:
    left = [Unmapped("a.0", "Rotary", 2, "rotation: no template")]
    left.append(Unmapped("a.1", "Rotary", 1, "rotation: no template", "llama.py:7"))
    extraction = ExtractionResult([], [], [], {"llama tp1 ep1": left}, {}, {"llama tp1 ep1": 14})
    assert to_review(extraction) == [
        "llama tp1 ep1: 14 of 16 kernel calls described; 2 not: 2 rotation",
        "not described: a.0: rotation: no template",
        "not described: a.1: rotation: no template [llama.py:7]",
    ]


def test_two_models_with_another_eps_clash_and_the_second_is_renamed() -> None:
    [(first, use), *_] = uses_of(named("llama_3_1_70b"), "llama")
    one, other = norm(1e-6), norm(1e-5)
    wanted, [clash] = collect([(one, use), (other, use), (other, use), (one, use)])
    assert [(item.name, len(item.uses)) for item in wanted] == [("rmsnorm_h64", 2), ("rmsnorm_h64_v2", 2)]
    assert clash.differences == ("reference: eps is 1e-06 and 1e-05",)
    assert first.name not in {item.name for item in wanted}


def test_descriptions_tags_and_spare_axes_do_not_make_another_kernel() -> None:
    one = eps_norm(1e-6, "a")
    content = one.as_json()
    content["axes"]["spare"] = {"type": "const", "value": 3}
    content["description"] = "other"
    content["constraints"] = ["hidden_size == 64"]
    other = Definition.model_validate(content)
    assert meaning_differences(one, other) == []
    assert notes(one, other) == [
        "axes that no tensor has, on one side only: spare",
        "constraints on one side only: hidden_size == 64",
    ]


@pytest.mark.parametrize(
    ("place", "value", "said"),
    [
        (("inputs", "weight", "dtype"), "float32", "inputs.weight.dtype: bfloat16 and float32"),
        (("inputs", "weight", "optional"), True, "inputs.weight.optional: False and True"),
        (("axes", "hidden_size", "value"), 65, "axes.hidden_size: 64 and 65"),
        (("outputs", "output", "shape"), ["batch_size"], "outputs.output.shape"),
    ],
)
def test_a_difference_is_named_by_its_field(place: tuple[str, str, str], value: object, said: str) -> None:
    one = eps_norm(1e-6, "a")
    content = one.as_json()
    content[place[0]][place[1]][place[2]] = value
    [difference] = meaning_differences(one, Definition.model_validate(content))
    assert said in difference


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
    for key, module in hierarchy.modules_of(reading_of(path), {}).items():
        assert module.get("parent") in {None, *seen}
        seen.add(key)
    assert len(seen) > 15


def test_dense_layers_and_experts_stand_apart_with_their_counts_and_definitions_go_by_path() -> None:
    modules = hierarchy.modules_of(reading_of(named("deepseek_v3")), {"model.norm": ["a"]})
    assert {key: modules[key]["count"] for key in ("DeepseekV2DecoderLayer", "gate_up_proj", "experts")} == {
        "DeepseekV2DecoderLayer": 61,
        "gate_up_proj": 3,
        "experts": 58,
    }
    assert modules[modules["experts"]["parent"]]["count"] == 58
    assert modules[modules["gate_up_proj"]["parent"]]["count"] == 3
    assert (modules["experts"]["type"], modules["self_attn"]["type"]) == ("layer", "block")
    assert [key for key, module in modules.items() if module["definitions"]] == ["norm"]


@pytest.mark.parametrize("newline", ["\n", "\r\n"])
def test_inserting_keeps_every_other_byte(newline: str) -> None:
    text = FILE.replace("\n", newline)
    result = hierarchy.inserted(text, MODEL)
    added = hierarchy.typescript(MODEL).replace("\n", newline)
    assert result.replace(added, "") == text
    assert result.index(added) < result.index("] satisfies")
    assert all(text in result for text in ("      lm_head: {", '      "odd name": {', '    name: "New \\"1\\"",'))


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


pytestmark = pytest.mark.slow

MODEL_PIPELINE = "llama_3_1_70b"
NORM = "rmsnorm_h8192"
OWN = "rmsnorm_h96"
# Answers as the bootstrap in the extract environment does, from a file beside it.
STAND_IN = """#!{python}
import json, pathlib, sys
given = dict(zip(sys.argv[5::2], sys.argv[6::2]))
answer = json.loads(pathlib.Path({reading!r}).read_text())
for number, job in enumerate(json.loads(pathlib.Path(given["--jobs"]).read_text())):
    assert job["config"]["architectures"] == [answer["architecture"]]
    pathlib.Path(given["--out"], f"{{number}}.json").write_text(json.dumps(answer))
"""


def stand_in(folder: Path) -> Path:
    """An interpreter that knows one reading."""
    stored = golden(named(MODEL_PIPELINE))
    costs = {"experts": "routed only", "seconds": 0.0, "peak_mb": 0, "transformers": "", "torch": ""}
    reading = folder / "reading.json"
    reading.write_text(json.dumps(stored | costs | {"sglang": stored["sglang"][-1]}))
    python = folder / "python"
    python.write_text(STAND_IN.format(python=sys.executable, reading=str(reading)))
    python.chmod(0o755)
    return python


def settings(folder: Path) -> ExtractionSettings:
    torch = Path(forked.interpreter())
    return ExtractionSettings(environment=ReaderEnvironment(stand_in(folder)), torch_python=torch)


def extracted(folder: Path, dataset: Path, *, tp: int = 4) -> Path:
    out = folder / "out"
    choice = ModelChoice(name=MODEL_PIPELINE, tp=(tp,))
    report = folder / "report"
    pipeline.run((choice,), settings(folder), dataset=dataset, out=out, report=report, say=lambda _: None)
    return out


@pytest.fixture
def dataset(tmp_path: Path) -> Path:
    """One definition of ours."""
    return own_dataset(tmp_path / "dataset", f"rmsnorm/{OWN}")


@pytest.fixture
def right(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every reference holds."""

    def check(definitions: Sequence[Definition], **_: object) -> list[CheckResult]:
        return [CheckResult(1, ()) for _ in definitions]

    monkeypatch.setattr(pipeline, "check", check)


@pytest.mark.usefixtures("right")
def test_the_stage_puts_a_models_definitions_beside_the_datasets(tmp_path: Path, dataset: Path) -> None:
    before = scan_digest(dataset)
    out = extracted(tmp_path, dataset)
    paths = list(out.glob("definitions/*/*.json"))
    assert {OWN, NORM, "gqa_paged_decode_h16_kv2_d128_ps64"} < {path.stem for path in paths}
    counted = Counter(path.parent.name for path in paths)
    wanted = {"gemm": 5, "gqa_paged": 4, "sampling": 3, "rmsnorm": 3, "rope": 1, "gqa_ragged": 1}
    assert {name: counted[name] for name in wanted} == wanted  # other op_types may be added
    assert scan_digest(dataset) == before
    stamp = json.loads((out / ".fetched.json").read_text())
    assert stamp["source"]["models"][0]["name"] == MODEL_PIPELINE
    written = {path: path.read_bytes() for path in out.glob("definitions/*/*.json")}
    extracted(tmp_path, dataset)
    assert {path: path.read_bytes() for path in out.glob("definitions/*/*.json")} == written


@pytest.mark.usefixtures("right")
def test_what_is_no_longer_made_goes_and_a_refusal_leaves_all_as_it_was(tmp_path: Path, dataset: Path) -> None:
    out = extracted(tmp_path, dataset)
    stale = out / "definitions" / "rmsnorm" / "stale.json"
    stale.write_text("{}")
    extracted(tmp_path, dataset)
    assert not stale.exists()
    held = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    with pytest.raises(TraceproofError, match="tp: 3 does not divide num_attention_heads = 64"):
        extracted(tmp_path, dataset, tp=3)
    assert {path: path.read_bytes() for path in out.rglob("*") if path.is_file()} == held


@pytest.fixture(scope="module")
def with_blob(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dataset with one definition and one blob."""
    folder = own_dataset(tmp_path_factory.mktemp("dataset"), f"rmsnorm/{OWN}")
    (folder / "blob").mkdir()
    (folder / "blob" / "one.bin").write_bytes(b"one")
    return folder


@pytest.fixture(scope="module")
def untouched(tmp_path_factory: pytest.TempPathFactory, with_blob: Path) -> Repository:
    """A copy in which nothing was run."""
    return Repository.copy(tmp_path_factory.mktemp("repository"), dataset={"path": str(with_blob)})


def first(jobs: list[str]) -> list[str]:
    """The jobs before the checkpoint, sorted: their order is Snakemake's."""
    return sorted(jobs[: jobs.index("cases")])


def test_with_models_they_are_extracted_before_anything_is_planned(untouched: Repository) -> None:
    ran = untouched.dry("--config", 'models=[{"name": "deepseek_v3", "tp": 8, "ep": 8}]')
    assert ran.code == 0, ran.out
    assert first(ran.jobs) == ["environment extract", "extract", "stack torch"]


def test_a_given_interpreter_spares_the_environment(untouched: Repository) -> None:
    stacks = 'stacks={"extract": {"python": "/opt/python"}}'
    ran = untouched.dry("--config", 'models=["llama_3_1_8b"]', stacks)
    assert ran.code == 0, ran.out
    assert first(ran.jobs) == ["extract", "stack torch"]


def test_a_name_alone_and_a_number_alone_are_short_forms() -> None:
    config = Config.model_validate(
        {"dataset": "x", "models": ["llama_3_1_8b", {"name": "mixtral_8x7b", "tp": "2"}]}
    )
    assert config.models == (ModelChoice(name="llama_3_1_8b"), ModelChoice(name="mixtral_8x7b", tp=(2,)))


def test_every_wrong_model_is_told(with_blob: Path) -> None:
    models = ["llama_9", {"config": "absent.json"}, {"tp": 2}, {"name": "mixtral_8x7b", "tpp": 2, "ep": [0]}]
    with pytest.raises(TraceproofError) as caught:
        read_config({"dataset": str(with_blob), "models": models}, root=with_blob)
    told = "\n".join(caught.value.problems)
    assert "models.0.name: 'llama_9' is not bundled, so give its config; did you mean" in told
    assert "models.1.config:" in told
    assert "models.2: give the 'name' of a bundled model" in told
    assert "models.3.tpp: unknown key; did you mean 'tp'?" in told
    assert "models.3.ep.0: 0: input should be greater than or equal to 1" in told


def test_what_is_beside_definitions_is_linked_and_what_was_written_stays(with_blob: Path, tmp_path: Path) -> None:
    link(with_blob, tmp_path)
    (tmp_path / "blob" / "own.bin").write_bytes(b"own")
    gone = tmp_path / "blob" / "gone.bin"
    gone.symlink_to(with_blob / "blob" / "gone.bin")
    link(with_blob, tmp_path)
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["blob", "one.bin", "own.bin"]
    assert (tmp_path / "blob" / "one.bin").read_bytes() == b"one"
    assert [path.name for path in (with_blob / "blob").iterdir()] == ["one.bin"]


def test_another_dataset_s_files_replace_those_of_the_one_before(with_blob: Path, tmp_path: Path) -> None:
    before, out = tmp_path / "before", tmp_path / "out"
    (before / "blob").mkdir(parents=True)
    (before / "blob" / "one.bin").write_bytes(b"older")
    (before / "blob" / "two.bin").write_bytes(b"older")
    link(before, out)
    link(with_blob, out)
    assert [(path.name, path.read_bytes()) for path in (out / "blob").iterdir()] == [("one.bin", b"one")]
