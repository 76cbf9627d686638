rule site:
    """Write the run as static pages: verdicts, margins, findings, references, models."""
    input:
        f"{FLOW.run}/summary.json",
    output:
        report(
            directory(f"{FLOW.run}/site"), htmlindex="index.html", caption="captions/site.rst", category="Pages"
        ),
    log:
        f"{FLOW.run}/logs/site.log",
    localrule: True
    params:
        folders=[f"--results={FLOW.results}", f"--run={FLOW.run}"],
        code=code_digest("site", "run", "publish/verified.py"),
    shell:
        "python scripts/job.py site {params.folders:q} --out {output:q} --log {log:q}"
