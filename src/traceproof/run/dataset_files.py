"""Where the dataset that is verified lies, and what changes when a file of it does."""

import json
from functools import cached_property
from pathlib import Path

from traceproof.config import Config
from traceproof.dataset.fetch import FETCHED, folder_of, scan_digest, untouched


class DatasetFiles:
    """The configured dataset, and the copy of it that extraction adds definitions to."""

    config: Config
    root: Path

    @property
    def results(self) -> str:
        """Where everything is written."""
        return str(self.config.results)

    @property
    def source(self) -> str:
        """The configured dataset's folder."""
        return str(folder_of(self.config.dataset, root=self.config.results / "dataset"))

    @property
    def source_fetched(self) -> list[str]:
        """The file that says that it is there: one, or none where a folder is used in place."""
        return [] if self.config.dataset.path is not None else [f"{self.source}/{FETCHED}"]

    @cached_property
    def source_state(self) -> str:
        """Changes when a file of it does. A fetched one that nobody touched is always `as fetched`."""
        folder = self.root / self.source
        if self.config.dataset.path is not None:
            return scan_digest(folder)
        return "as fetched" if untouched(folder) else scan_digest(folder)

    @property
    def dataset(self) -> str:
        """The folder of what is verified: the configured one, or a copy of it with what was extracted."""
        return f"{self.results}/extract/dataset" if self.config.models else self.source

    @property
    def fetched(self) -> list[str]:
        """The file that says that the dataset is there: one, or none where a folder is used in place."""
        return [f"{self.dataset}/{FETCHED}"] if self.config.models else self.source_fetched

    @property
    def dataset_source(self) -> str:
        """The dataset's source, as JSON."""
        return self.config.dataset.model_dump_json(exclude_none=True)

    @cached_property
    def dataset_state(self) -> str:
        """Changes when a file of the dataset does; an extracted one is judged as a fetched one is."""
        if not self.config.models:
            return self.source_state
        folder = self.root / self.dataset
        return "as extracted" if untouched(folder) else scan_digest(folder)

    @property
    def models(self) -> str:
        """The models to extract, as JSON."""
        return json.dumps([model.model_dump(mode="json") for model in self.config.models])

    @property
    def model_files(self) -> list[str]:
        """The config.json files among them."""
        return [str(model.config) for model in self.config.models if model.config is not None]
