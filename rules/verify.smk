checkpoint cases:
    """Plan the cases: a file per job, and a list of them. A job whose file is unchanged is not run again."""
    input:
        fetched=FLOW.fetched,
        stack=FLOW.record(MAIN),
    output:
        f"{FLOW.run}/cases/index.json",
    log:
        f"{FLOW.run}/logs/cases.log",
    localrule: True
    params:
        python=FLOW.python(MAIN),
        options=FLOW.plan_options,
        state=FLOW.dataset_state,
        code=code_digest("ops"),  # of each op_type in its plan, so that an edit of one op leaves other plans as they are
    shell:
        "{params.python:q} -P scripts/stack_job.py cases --stack {input.stack:q} {params.options:q} --out {output:q} --log {log:q}"


rule verify:
    """Draw, run and judge the cases of an op_type (of a large one, those of 64 definitions); keep the rows."""
    input:
        cases=ancient(planned(FLOW.plan)),  # `plan` says whether it changed
        stacks=FLOW.job_records,
    output:
        f"{FLOW.run}/verdicts/{{op_type}}{{group}}.jsonl",
    log:
        f"{FLOW.run}/logs/verify/{{op_type}}{{group}}.log",
    priority: FLOW.job_priority
    threads: FLOW.job_threads
    resources:
        mem_mb=FLOW.job_mb,
        gpu_mb=FLOW.job_gpu_mb,
        gpu=FLOW.one_gpu,
        gpu_model=FLOW.gpu_model,
        parallel=FLOW.parallel_on,
        force=int(FLOW.config.force),  # no param: rows that were forced are as good as others
    params:
        python=FLOW.python(MAIN),
        options=FLOW.verify_options,
        plan=FLOW.job_digest,  # an edit counts, whatever the dates of files are
        again=FLOW.job_again,  # so does what ran into a limit; the cache has the rest
    shell:
        "{params.python:q} -P scripts/stack_job.py verify --cases {input.cases:q} --group={wildcards.group:q} --verdicts {output:q}"
        " {params.options:q} --parallel {resources.parallel:q} --force {resources.force:q} --log {log:q}"


rule report:
    """Put all verdicts in one summary, and keep them for later comparison."""
    input:
        verdicts=planned(FLOW.verdicts),
        known=FLOW.known,
        stacks=planned(FLOW.records),
        lock=FLOW.lock,
    output:
        f"{FLOW.run}/summary.json",
    log:
        f"{FLOW.run}/logs/report.log",
    localrule: True
    params:
        options=[f"--history={FLOW.results}/history", f"--scope={FLOW.scope}", f"--cache={FLOW.cache}"],
        code=code_digest("run", "bumps.py", "judge"),
        known=FLOW.known_state,
    shell:
        "python scripts/job.py report --verdicts {input.verdicts:q} --known {input.known:q} --stacks {input.stacks:q}"
        " --lock {input.lock:q} {params.options:q} --summary {output:q} --log {log:q}"


use rule report as report_family with:
    output:
        f"{FLOW.run}/summaries/{{family}}.json",
    log:
        f"{FLOW.run}/logs/report-{{family}}.log",


for family in families():

    rule:
        name:
            f"verify_{family}"
        input:
            f"{FLOW.run}/summaries/{family}.json",
        log:
            f"{FLOW.run}/logs/verify_{family}.log",
        localrule: True
        shell:
            "python scripts/job.py conclude --summary {input:q} --log {log:q}"
