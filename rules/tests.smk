rule tests:
    """Write reference tests into the dataset: one file an op_type in tests/references. What is there stays."""
    input:
        FLOW.fetched,
    output:
        f"{FLOW.results}/reference_tests.json",
    log:
        f"{FLOW.results}/logs/reference_tests.log",
    localrule: True
    params:
        dataset=FLOW.dataset,
        state=FLOW.dataset_state,
        sizes=" ".join(FLOW.config.test_sizes),
        tolerance=FLOW.tolerance,
        known=FLOW.known,
        verdicts=f"{FLOW.run}/verdicts",
        force="--force" if FLOW.config.force else "",
    shell:
        "{DRIVER} scripts/reference_tests.py --dataset {params.dataset:q} --sizes {params.sizes}"
        " --tolerance {params.tolerance} --verdicts {params.verdicts} --known {params.known} {params.force}"
        " --out {output} --log {log}"
