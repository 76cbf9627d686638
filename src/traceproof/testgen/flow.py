"""The generated tests for Snakemake's rules: their folders, inputs, environments and options."""

import json
from dataclasses import dataclass

from traceproof.digests import digest_json
from traceproof.run.flow import Pipeline, Wildcards
from traceproof.stacks import MAIN
from traceproof.testgen.generate import GENERATED, PLACE

# a definition's tests get the time limit of so many cases: about ten tests run each case, but draw it once
CASES = 10


@dataclass(frozen=True)
class TestFlow:
    """The generated tests of one configuration. Paths are relative to the repository."""

    flow: Pipeline

    @property
    def root(self) -> str:
        """The folder that contains tests/references."""
        return f"{self.flow.run}/{GENERATED}"

    @property
    def folder(self) -> str:
        """The folder of the generated files."""
        return f"{self.root}/{PLACE.as_posix()}"

    def plan_digest(self, wildcards: Wildcards) -> str:
        """Digest of an op_type's plan; "" if there is none."""
        return self.plan_digests(wildcards).get(wildcards.op_type, "")

    def plan_digests(self, _: object) -> dict[str, str]:
        """Digests of plans by op_type."""
        listed = self.flow.index.op_types if self.flow.index else {}
        return {op_type: digest_json(dict(summary.digests)) for op_type, summary in listed.items()}

    def stacks(self, op_type: str) -> list[str]:
        """The stacks in whose environments an op_type's tests run: torch, and those with another interpreter."""
        main = self.flow.python(MAIN)
        return [MAIN, *(name for name in self.flow.stacks_of(op_type) if self.flow.python(name) != main)]

    def rows(self, _: object) -> list[str]:
        """Paths of the test results, per op_type and environment."""
        pairs = [(op_type, stack) for op_type in self.flow.op_types() for stack in self.stacks(op_type)]
        return [f"{self.flow.run}/tests/{op_type}-{stack}.jsonl" for op_type, stack in pairs]

    @property
    def file_options(self) -> list[str]:
        """Options for writing the tests: defaults that pytest's command line overrides."""
        sizes = self.flow.config.test_sizes
        return [f"--tolerance={self.flow.tolerance}", "--sizes", *sizes]

    @property
    def run_options(self) -> list[str]:
        """Options of the job `run_tests`; its `--options` are pytest's."""
        config = self.flow.config
        for_pytest = {
            "seed": config.seed,
            "workloads": "auto" if config.workloads == "auto" else "yes" if config.workloads else "no",
            "device": "cpu" if config.stacks[MAIN].get("env") == "cpu" else "auto",
            "memory-gb": config.limits.memory_gb,
        }
        options = json.dumps([f"--{name}={value}" for name, value in for_pytest.items()])
        limits = self.flow.limits(cases=CASES)
        for_job = [f"--dataset={self.flow.dataset}", f"--caches={self.flow.caches}"]
        return [*for_job, f"--limits={limits}", f"--options={options}"]
