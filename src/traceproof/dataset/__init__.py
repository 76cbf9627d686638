"""The dataset's own schema (definitions, workloads, traces, solutions) and where a dataset comes from."""
