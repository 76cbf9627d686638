"""One worker to start: what the supervisor asked for, with what the zygote knows."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from traceproof.worker.model import Isolation, Limits
from traceproof.worker.sandbox import NO_LAYERS, IsolationPlan
from traceproof.worker.visible_files import VisibleFiles


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSpec:
    """A request with its surroundings."""

    limits: Limits
    isolation: Isolation
    plan: IsolationPlan  # the layers that this machine has
    seen: VisibleFiles  # what the worker keeps of the file system if the plan gives it a view of its own
    stage: str  # an empty folder to build that view at
    gpu: bool
    # the GPUs that the worker sees, as CUDA_VISIBLE_DEVICES has them; None: as the zygote does
    visible: str | None = None

    @property
    def layers(self) -> IsolationPlan:
        """The layers to put up for this worker."""
        return NO_LAYERS if self.isolation is Isolation.TRUSTED else self.plan

    @property
    def scratch(self) -> Path:
        """The worker's own folder."""
        return Path(self.seen.scratch)

    @classmethod
    def of_request(  # noqa: PLR0913 - the fields' own sources
        cls,
        request: bytes,
        *,
        isolation: Isolation,
        plan: IsolationPlan,
        seen: VisibleFiles,
        stage: str,
        gpu: bool,
    ) -> Self:
        """The spec that a request's JSON is."""
        said = json.loads(request)
        return cls(
            limits=Limits.of_json(said["limits"]),
            isolation=isolation,
            plan=plan,
            seen=VisibleFiles(seen.readable, said["scratch"], seen.devices).concealing(said.get("conceal", ())),
            stage=stage,
            gpu=gpu,
            visible=said.get("visible") if gpu else None,
        )
