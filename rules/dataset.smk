rule dataset:
    """Fetch the configured dataset, whole or not at all; what is there is never fetched again."""
    output:
        update(f"{FLOW.results}/dataset/{{slug}}/.fetched.json"),
    log:
        f"{FLOW.results}/logs/dataset-{{slug}}.log",
    params:
        source=FLOW.dataset_source,
    message:
        "fetching the dataset"
    shell:
        "{DRIVER:q} scripts/dataset.py --source {params.source:q} --stamp {output:q} --log {log:q}"
