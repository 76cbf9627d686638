from traceproof.site.finished import AUDIT


def site_code(wildcards):
    """Digest of the site's code, templates and assets; read only where it is to be built."""
    return FLOW.site_code


def audit_result(wildcards):
    """What `traceproof audit-tests --json` wrote of the dataset's own tests: one file, or none."""
    path = Path(FLOW.results, AUDIT)
    return [str(path)] if path.is_file() else []


rule site:
    """Write the run as static pages: verdicts, margins, references, models, bumps, the ledger."""
    input:
        summary=f"{FLOW.run}/summary.json",
        audit=audit_result,
    output:
        pages=report(
            directory(f"{FLOW.run}/site"),
            htmlindex="index.html",
            caption="captions/site.rst",
            category="Pages",
        ),
        table=report(
            f"{FLOW.run}/report/verdicts.html",
            caption="captions/verdicts.rst",
            category="Tables",
        ),
        plots=report(
            f"{FLOW.run}/report/margins.html",
            caption="captions/margins.rst",
            category="Plots",
        ),
    log:
        f"{FLOW.run}/logs/site.log",
    localrule: True
    params:
        code=site_code,
        results=FLOW.results,
        run=FLOW.run,
    shell:
        "{DRIVER:q} scripts/site.py --results {params.results:q} --run {params.run:q} --audit {input.audit:q}"
        " --out {output.pages:q} --table {output.table:q} --plots {output.plots:q} --log {log:q}"
