rule clone:
    """Bring the sources to a folder, each at the commit or version that sources.lock names."""
    input:
        "sources.lock",
    output:
        "sources/repos_config.json",
    log:
        f"{FLOW.results}/logs/clone.log",
    localrule: True
    message:
        "cloning the sources"
    shell:
        "{DRIVER} scripts/clone.py --lock {input} --config {output} --log {log}"
