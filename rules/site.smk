rule site:
    """Write the run as static pages: verdicts, margins, references, models, bumps, the ledger."""
    input:
        summary=f"{FLOW.run}/summary.json",
        audit=TESTS.audit(),
    output:
        pages=report(
            directory(f"{FLOW.run}/site"), htmlindex="index.html", caption="captions/site.rst", category="Pages"
        ),
        table=report(f"{FLOW.run}/report/verdicts.html", caption="captions/verdicts.rst", category="Tables"),
        plots=report(f"{FLOW.run}/report/margins.html", caption="captions/margins.rst", category="Plots"),
    log:
        f"{FLOW.run}/logs/site.log",
    localrule: True
    params:
        folders=[f"--results={FLOW.results}", f"--run={FLOW.run}"],
        code=code_digest("site", "run"),
    shell:
        "python scripts/job.py site {params.folders:q} --audit {input.audit:q}"
        " --out {output.pages:q} --table {output.table:q} --plots {output.plots:q} --log {log:q}"
