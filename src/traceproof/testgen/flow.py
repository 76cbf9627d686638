"""What the Snakemake rules ask about generated tests: paths, environments, options and digests."""

from dataclasses import dataclass
from functools import cached_property

from traceproof.digests import digest_json
from traceproof.pipeline.flow import Pipeline
from traceproof.stacks import MAIN, TRUTHS
from traceproof.testgen.bundle import support_files
from traceproof.testgen.generate import GENERATED, PLACE


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
        truths = [name for name in self.flow.actors_of(op_type) if name in TRUTHS]
        others = {self.flow.actor_stack(name) for name in truths} - {MAIN}
        return [MAIN, *sorted(name for name in others if self.flow.python(name) != main)]

    def builds(self, op_type: str, stack: str) -> list[str]:
        """JIT build results that the tests depend on, if the stack builds any."""
        return self.flow.builds(op_type, stack) if stack in TRUTHS else []

    def rows(self) -> list[str]:
        """What the tests came to, per op_type and environment; call it after the checkpoint `cases`."""
        pairs = [(op_type, stack) for op_type in self.flow.op_types() for stack in self.stacks(op_type)]
        return [f"{self.flow.run}/tests/{op_type}-{stack}.jsonl" for op_type, stack in pairs]

    def records(self) -> list[str]:
        """Records of the stacks that tests run in; call it after the checkpoint `cases`."""
        found = {stack for op_type in self.flow.op_types() for stack in self.stacks(op_type)}
        return [f"{self.flow.results}/stacks/{stack}.json" for stack in sorted(found)]

    @property
    def options(self) -> list[str]:
        """Options of pytest, each behind the flag of the script that passes it on."""
        config = self.flow.config
        workloads = "auto" if config.workloads == "auto" else "yes" if config.workloads else "no"
        device = "cpu" if config.stacks[MAIN].get("env") == "cpu" else "auto"
        given = (f"--seed={config.seed}", f"--workloads={workloads}", f"--device={device}")
        return [f"--option={option}" for option in given]

    @cached_property
    def support_code(self) -> str:
        """Digest of the support package."""
        return digest_json(dict(support_files()))
