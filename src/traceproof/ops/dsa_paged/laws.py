"""Laws of sparse attention, and of the top-k indexer."""

from dataclasses import replace

from traceproof.dataset.definition import Definition
from traceproof.ops.common import attention_laws
from traceproof.ops.common.attention_laws import moved_pages, moved_rows, page_count
from traceproof.ops.common.laws import BATCH, other_inputs, permuted
from traceproof.ops.laws import Experiment, Law, Subject, doubled, permutation


def _pages(subject: Subject) -> Experiment | None:
    if page_count(subject) < 2:
        return None
    order = permutation(subject, page_count(subject))
    table, page_size = subject.tensor("block_table"), subject.tensor("k_index_cache_fp8").shape[1]
    changes = {**moved_pages(subject, order), "block_table": order[table.long()].to(table.dtype)}
    return other_inputs(
        subject.with_inputs(**changes),
        right=lambda outputs: {name: moved_rows(value, order, page_size) for name, value in outputs.items()},
    )


def _weights(subject: Subject) -> Experiment:
    return other_inputs(subject.with_inputs(weights=doubled(subject.tensor("weights"))))


def _indexer(definition: Definition) -> bool:
    return "k_index_cache_fp8" in definition.inputs


LAWS = (
    *(replace(law, holds=lambda definition: not _indexer(definition)) for law in attention_laws.LAWS),
    *(
        replace(law, holds=_indexer)
        for law in (
            *BATCH,
            Law("pages permuted", _pages),
            Law("heads permuted", permuted({"weights": 1, "q_index_fp8": 1})),
            Law("weights doubled", _weights),
        )
    ),
)
