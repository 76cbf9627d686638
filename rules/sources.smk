rule clone:
    """Bring the sources to a folder, each at the commit or version that sources.lock names; the dataset among them."""
    input:
        lock=FLOW.lock,
        dataset=FLOW.source_fetched,
    output:
        "sources/repos_config.json",
    log:
        f"{FLOW.results}/logs/clone.log",
    localrule: True
    params:
        dataset=FLOW.source,
        origin=FLOW.dataset_source,
    message:
        "cloning the sources"
    shell:
        "{DRIVER:q} scripts/clone.py --lock {input.lock:q} --dataset {params.dataset:q} --origin {params.origin:q}"
        " --config {output:q} --log {log:q}"
