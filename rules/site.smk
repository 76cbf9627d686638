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
        report(
            directory(f"{FLOW.run}/site"),
            htmlindex="index.html",
            caption="captions/site.rst",
            category="Pages",
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
        " --out {output:q} --log {log:q}"
