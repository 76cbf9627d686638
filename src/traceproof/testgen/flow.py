"""What the Snakemake rules ask about generated tests: paths, environments, options and digests."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from traceproof.digests import digest_json
from traceproof.run.flow import Pipeline
from traceproof.stacks import MAIN
from traceproof.testgen.bundle import support_files
from traceproof.testgen.generate import GENERATED, PLACE

AUDIT = "audit-tests.json"  # below results


@dataclass(frozen=True)
class TestFlow:
    """The tests of one configuration. Paths are relative to the repository."""

    flow: Pipeline

    @property
    def root(self) -> str:
        """The folder that gets tests/references."""
        return f"{self.flow.run}/{GENERATED}"

    @property
    def folder(self) -> str:
        """The folder of the generated files."""
        return f"{self.root}/{PLACE.as_posix()}"

    def files(self) -> list[str]:
        """The test file of every op_type that was planned; call it after the checkpoint `cases`."""
        return [f"{self.folder}/test_{op_type}.py" for op_type in self.flow.op_types()]

    def stacks(self, op_type: str) -> list[str]:
        """The stacks whose environments an op_type's tests run in: torch, and those with packages of their own."""
        main = self.flow.python(MAIN)
        return [MAIN, *(name for name in self.flow.stacks_of(op_type) if self.flow.python(name) != main)]

    def rows(self) -> list[str]:
        """What the tests came to, per op_type and environment; call it after the checkpoint `cases`."""
        pairs = [(op_type, stack) for op_type in self.flow.op_types() for stack in self.stacks(op_type)]
        return [f"{self.flow.run}/tests/{op_type}-{stack}.jsonl" for op_type, stack in pairs]

    def audit(self) -> list[str]:
        """What `traceproof audit-tests --json` wrote of the dataset's own tests: one file, or none."""
        path = Path(self.flow.results, AUDIT)
        return [str(path)] if (self.flow.root / path).is_file() else []

    @property
    def file_options(self) -> list[str]:
        """What `scripts/reference_tests.py` is told of a file."""
        sizes = self.flow.config.test_sizes
        return [f"--out={self.root}", f"--tolerance={self.flow.tolerance}", "--sizes", *sizes]

    @property
    def run_options(self) -> list[str]:
        """What `scripts/run_tests.py` is told; options of pytest stand behind the flag that passes them on."""
        config = self.flow.config
        workloads = "auto" if config.workloads == "auto" else "yes" if config.workloads else "no"
        device = "cpu" if config.stacks[MAIN].get("env") == "cpu" else "auto"
        given = (f"--seed={config.seed}", f"--workloads={workloads}", f"--device={device}")
        own = [f"--dataset={self.flow.dataset}", f"--caches={self.flow.caches}", f"--limits={self.flow.limits}"]
        return [*own, *(f"--option={one}" for one in given)]

    @cached_property
    def support_code(self) -> str:
        """Digest of the support package."""
        return digest_json(dict(support_files()))
