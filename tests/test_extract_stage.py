"""Models in the pipeline: what would be run with and without them, and the folder that is verified then."""

from __future__ import annotations

from pathlib import Path

import pytest
from repository import Repository, own_dataset

from traceproof.config.reading import read_config
from traceproof.config.schema import Config, ModelChoice
from traceproof.errors import TraceproofError
from traceproof.extract.pipeline import link

pytestmark = pytest.mark.slow

NORM = "rmsnorm/rmsnorm_h96"


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dataset with one definition and one blob."""
    folder = own_dataset(tmp_path_factory.mktemp("dataset"), NORM)
    (folder / "blob").mkdir()
    (folder / "blob" / "one.bin").write_bytes(b"one")
    return folder


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory, dataset: Path) -> Repository:
    """A copy in which nothing was run."""
    return Repository.copy(tmp_path_factory.mktemp("repository"), dataset={"path": str(dataset)})


def first(jobs: list[str]) -> list[str]:
    """The jobs before the checkpoint, sorted: their order is Snakemake's."""
    return sorted(jobs[: jobs.index("cases")])


def test_with_models_they_are_extracted_before_anything_is_planned(repository: Repository) -> None:
    ran = repository.dry("--config", 'models=[{"name": "deepseek_v3", "tp": 8, "ep": 8}]')
    assert ran.code == 0, ran.out
    assert first(ran.jobs) == ["environment extract", "extract", "stack torch"]


def test_a_given_interpreter_spares_the_environment(repository: Repository) -> None:
    stacks = 'stacks={"extract": {"python": "/opt/python"}}'
    ran = repository.dry("--config", 'models=["llama_3_1_8b"]', stacks)
    assert ran.code == 0, ran.out
    assert first(ran.jobs) == ["extract", "stack torch"]


def test_a_name_alone_and_a_number_alone_are_short_forms() -> None:
    config = Config.model_validate(
        {"dataset": "x", "models": ["llama_3_1_8b", {"name": "mixtral_8x7b", "tp": "2"}]}
    )
    assert config.models == (ModelChoice(name="llama_3_1_8b"), ModelChoice(name="mixtral_8x7b", tp=(2,)))


def test_every_wrong_model_is_told(dataset: Path) -> None:
    models = ["llama_9", {"config": "absent.json"}, {"tp": 2}, {"name": "mixtral_8x7b", "tpp": 2, "ep": [0]}]
    with pytest.raises(TraceproofError) as caught:
        read_config({"dataset": str(dataset), "models": models}, root=dataset)
    told = "\n".join(caught.value.problems)
    assert "models.0.name: 'llama_9' is not bundled, so give its config; did you mean" in told
    assert "models.1.config:" in told
    assert "models.2: give the 'name' of a bundled model" in told
    assert "models.3.tpp: unknown key; did you mean 'tp'?" in told
    assert "models.3.ep.0: 0: input should be greater than or equal to 1" in told


def test_what_is_beside_definitions_is_linked_and_what_was_written_stays(dataset: Path, tmp_path: Path) -> None:
    link(dataset, tmp_path)
    (tmp_path / "blob" / "own.bin").write_bytes(b"own")
    gone = tmp_path / "blob" / "gone.bin"
    gone.symlink_to(dataset / "blob" / "gone.bin")
    link(dataset, tmp_path)
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["blob", "one.bin", "own.bin"]
    assert (tmp_path / "blob" / "one.bin").read_bytes() == b"one"
    assert [path.name for path in (dataset / "blob").iterdir()] == ["one.bin"]
