"""Ground truths of mamba_ssu, one file per source."""

from traceproof.ops.adapter import signature

UPDATE = signature("state x dt A B C D dt_bias state_batch_indices -> output new_state")
