"""Digests of the code that the stages depend on."""

from functools import cached_property

from traceproof.actors.registry import ACTORS
from traceproof.codedigest import SOURCE, code_digest
from traceproof.digests import digest_bytes, digest_json
from traceproof.ops import registry
from traceproof.pipeline.adapters import adapter_modules


class CodeDigests:
    """Digest of the code behind each kind of file that a run writes."""

    def jit_code(self, stack: str, op_type: str) -> str:
        """Digest of the code that decides what is built for an op_type."""
        return code_digest(
            "traceproof.pipeline.jit", f"traceproof.stacks.{stack}", *adapter_modules(stack, op_type)
        )

    @cached_property
    def extract_code(self) -> str:
        """Digest of what an extraction depends on: code, the texts of references, the bundled models."""
        texts = [path for folder in ("extract", "models") for path in (SOURCE / folder).rglob("*")]
        files = sorted(path for path in texts if path.suffix in {".py", ".json"})
        files += sorted(registry.FOLDER.rglob("*.in"))
        parts = (registry.module(op_type, "extraction") for op_type in registry.known())
        code = code_digest("traceproof.extract.stage", *_ops(), *(name for name in parts if name is not None))
        return digest_json([code, [digest_bytes(path.read_bytes()) for path in files]])

    @cached_property
    def cases_code(self) -> str:
        """Digest of the code that planning depends on."""
        return code_digest("traceproof.pipeline.stages.plan", *_ops())

    def outputs_code(self, op_type: str, actor: str) -> str:
        """Digest of the code that an actor's outputs depend on; it is part of their key in the store."""
        return code_digest(*ACTORS[actor].code(op_type), *_op(op_type))

    def actor_code(self, op_type: str, actor: str) -> str:
        """Digest of all code of an actor's job, the running of workers included."""
        return code_digest("traceproof.pipeline.stages.actor", *ACTORS[actor].code(op_type), *_op(op_type))

    def judge_code(self, op_type: str) -> str:
        """Digest of the code that verdicts depend on, what explains them included."""
        bugs = registry.module(op_type, "bugs")
        return code_digest("traceproof.pipeline.stages.judge", *_op(op_type), *([bugs] if bugs else []))

    @cached_property
    def site_code(self) -> str:
        """Digest of what the site depends on: code, templates, what is copied beside the pages."""
        folders = (SOURCE / "site" / name for name in ("templates", "assets"))
        files = sorted(path for folder in folders for path in folder.iterdir())
        code = code_digest("traceproof.site.build")
        return digest_json([code, [digest_bytes(path.read_bytes()) for path in files]])


def _op(op_type: str) -> tuple[str, ...]:
    return (registry.module(op_type) or "traceproof.ops.generic",)


def _ops() -> tuple[str, ...]:
    return tuple(name for op_type in registry.known() for name in _op(op_type))
