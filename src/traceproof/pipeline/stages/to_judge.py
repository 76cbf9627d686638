"""What the judge gets of one definition, and the keys that its rows are kept under; imports no torch."""

from collections.abc import Mapping
from typing import Any, Self

from traceproof.digests import digest_json
from traceproof.pipeline.records import ORACLE, REFERENCE, OpTypePlan, PlannedDefinition, Record
from traceproof.pipeline.run_record import RunRecord
from traceproof.pipeline.stages.judge_settings import JudgeSettings
from traceproof.pipeline.stages.manifest import Manifest, Records

DAMAGED = "damaged"  # key of a worker's error: whether outputs are not what was written


class ToJudge(Record):
    """One definition as planned, and what every actor left of it."""

    name: str  # in the plan, where a twin has one of its own
    entry: PlannedDefinition
    dataset: str  # root of the dataset, for workload lines' blobs
    manifests: tuple[Manifest, ...]  # of the actors that are judged, with this definition alone
    oracle: Records  # what says what is right: the oracle's, else the reference's, which hold its shadow

    @classmethod
    def of(cls, planned: OpTypePlan, name: str, manifests: Mapping[str, Manifest]) -> Self:
        """From a plan and what each actor left, by name."""
        entry = planned.definitions[name]
        others = tuple(manifests[actor].only(name) for actor in sorted(manifests.keys() - {ORACLE}))
        truth = manifests.get(REFERENCE, manifests[ORACLE]) if entry.no_oracle is not None else manifests[ORACLE]
        return cls(name=name, entry=entry, dataset=planned.dataset, manifests=others, oracle=dict(truth.of(name)))

    @property
    def others(self) -> dict[str, Mapping[str, RunRecord]]:
        """Records by actor and case id."""
        return {manifest.actor: manifest.of(self.name) for manifest in self.manifests}

    def key(self, settings: JudgeSettings, *actors: str) -> str:
        """Key of the rows of some actors, or of all rows: a digest of all that they depend on."""
        judged = [
            [actor, essence(records)] for actor, records in self.others.items() if actor in actors or not actors
        ]
        basis = {
            "definition": self.entry.digest,
            "cases": [[case.digest, case.skip and case.skip.as_json(), case.repeat] for case in self.entry.cases],
            "oracle": [self.entry.no_oracle, essence(self.oracle)],
            "code": settings.code,
            "tolerance": settings.tolerance,
            "twin": self.entry.twin,
        }
        return digest_json({**basis, "actors": judged, "whole": not actors})


def essence(records: Mapping[str, RunRecord]) -> list[Any]:
    """What verdicts depend on of the records of a definition."""
    return [[case, record.essence] for case, record in records.items()]
