# `update`: another run may read it, so it stays. Not elsewhere: Snakemake takes what it restores of a failed job for done.
rule dataset:
    """Fetch the configured dataset, whole or not at all; one that is there is not fetched again."""
    output:
        update(f"{FLOW.results}/dataset/{{slug}}/.fetched.json"),
    log:
        f"{FLOW.results}/logs/dataset-{{slug}}.log",
    localrule: True
    params:
        source=FLOW.dataset_source,
    message:
        "fetching the dataset"
    shell:
        "python scripts/job.py dataset --source {params.source:q} --stamp {output:q} --log {log:q}"


rule clone:
    """Clone the sources and the dataset, each at the commit or version that sources.lock names."""
    input:
        lock=FLOW.lock,
        dataset=FLOW.source_fetched,
    output:
        "sources/repos_config.json",
    log:
        f"{FLOW.results}/logs/clone.log",
    localrule: True
    params:
        options=[f"--dataset={FLOW.source}", f"--origin={FLOW.dataset_source}"],
    message:
        "cloning the sources"
    shell:
        "python scripts/job.py clone --lock {input.lock:q} {params.options:q} --out {output:q} --log {log:q}"


rule sources:
    """Clone the sources that stacks take from sources.lock into sources/, each as it is pinned there."""
    output:
        FLOW.sources.cloned,
    log:
        f"{FLOW.results}/logs/sources.log",
    localrule: True
    params:
        pins=FLOW.sources.pins,
    shell:
        "python scripts/job.py sources --pins {params.pins:q} --out {output:q} --log {log:q}"


rule extract:
    """Read the configured models; write a copy of the dataset with what they need and it lacks."""
    input:
        fetched=FLOW.source_fetched,
        configs=FLOW.model_files,
        reader=FLOW.environment(READER),
        main=FLOW.environment(MAIN),
    output:
        f"{FLOW.results}/extract/dataset/.fetched.json",
    log:
        f"{FLOW.results}/logs/extract.log",
    resources:
        mem_mb=2000,
    params:
        options=[f"--models={FLOW.models}", f"--dataset={FLOW.source}"],
        pythons=[f"--extract-python={FLOW.python(READER)}", f"--torch-python={FLOW.python(MAIN)}"],
        state=FLOW.source_state,
        code=code_digest("dataset", "extract", "models", "ops", "stacks"),
    shell:
        "python scripts/job.py extract {params.options:q} {params.pythons:q} --stamp {output:q} --log {log:q}"
