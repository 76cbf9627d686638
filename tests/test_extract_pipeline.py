"""`models:` in config.yaml, run: a model is extracted beside the dataset, and only news runs again.

SGLang's part is played by a stored reading, and the check of references is told the answer; the rest is what
a user runs.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest
from extract_support import golden, named
from repository import Repository, own_dataset

from traceproof.config import Config, ModelChoice, read_config
from traceproof.dataset.definition import Definition
from traceproof.dataset.fetch import scan_digest
from traceproof.errors import TraceproofError
from traceproof.extract import pipeline
from traceproof.extract.merge import CheckResult
from traceproof.extract.pipeline import ExtractionSettings, link
from traceproof.extract.reading import ReaderEnvironment

pytestmark = pytest.mark.slow

MODEL = "llama_3_1_70b"
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
    stored = golden(named(MODEL))
    costs = {"experts": "routed only", "seconds": 0.0, "peak_mb": 0, "transformers": "", "torch": ""}
    reading = folder / "reading.json"
    reading.write_text(json.dumps(stored | costs | {"sglang": stored["sglang"][-1]}))
    python = folder / "python"
    python.write_text(STAND_IN.format(python=sys.executable, reading=str(reading)))
    python.chmod(0o755)
    return python


def settings(folder: Path) -> ExtractionSettings:
    return ExtractionSettings(environment=ReaderEnvironment(stand_in(folder)), torch_python=Path(sys.executable))


def extracted(folder: Path, dataset: Path, *, tp: int = 4) -> Path:
    out = folder / "out"
    choice = ModelChoice(name=MODEL, tp=(tp,))
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
    assert stamp["source"]["models"][0]["name"] == MODEL
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
