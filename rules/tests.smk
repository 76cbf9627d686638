rule tests:
    """Generate the tests of everything selected, in a folder below the results; the dataset stays as it is."""
    input:
        cases=ancient(planned(FLOW.plans)),
        known=FLOW.known,
    output:
        directory(TESTS.folder),
    log:
        f"{FLOW.run}/logs/tests.log",
    localrule: True
    params:
        python=FLOW.python(MAIN),
        options=TESTS.file_options,
        plans=TESTS.plan_digests,
        code=code_digest("testgen", "ops"),
    shell:
        "python scripts/job.py tests --out {output:q} --cases {input.cases:q} --known {input.known:q}"
        " --python {params.python:q} {params.options:q} --log {log:q}"


rule run_tests_of:
    """Generate and run the tests of one op_type in one stack's environment."""
    input:
        cases=ancient(planned(FLOW.plans)),
        stack=by_stack(FLOW.record),
    output:
        f"{FLOW.run}/tests/{{op_type}}-{{stack}}.jsonl",
    log:
        f"{FLOW.run}/logs/tests/{{op_type}}-{{stack}}.log",
    threads: FLOW.job_parallel
    resources:
        mem_mb=FLOW.job_mb,
        gpu_mb=FLOW.job_gpu_mb,
        gpu=FLOW.one_gpu,
        gpu_model=FLOW.gpu_model,
    params:
        python=by_stack(FLOW.python),
        path=by_stack(FLOW.sources.path),
        options=TESTS.run_options,
        written=TESTS.file_options,
        plan=TESTS.plan_digest,  # an edit counts, whatever the dates of files are
        code=code_digest("testgen", "ops", "run", "judge", "draw.py"),
    shell:
        "env PYTHONPATH={params.path:q} {params.python:q} -P scripts/stack_job.py run_tests --cases {input.cases:q}"
        " --stack {input.stack:q} {params.written:q} {params.options:q} --parallel {threads:q}"
        " --rows {output:q} --log {log:q}"


rule tests_report:
    """Put the results of all generated tests in one file, a row per test."""
    input:
        rows=planned(TESTS.rows),
        stacks=planned(FLOW.records),
        known=FLOW.known,
    output:
        f"{FLOW.run}/tests.json",
    log:
        f"{FLOW.run}/logs/tests_report.log",
    localrule: True
    params:
        code=code_digest("testgen"),
    shell:
        "python scripts/job.py tests_report --rows {input.rows:q} --stacks {input.stacks:q} --known {input.known:q}"
        " --out {output:q} --log {log:q}"


rule run_tests:
    """Run the generated tests of everything selected; prints the counts and fails on findings."""
    input:
        planned(TESTS.rows),  # what a failed job removed is made again, and the report with it
        tests=f"{FLOW.run}/tests.json",
    log:
        f"{FLOW.run}/logs/run_tests.log",
    localrule: True
    shell:
        "python scripts/job.py conclude --tests {input.tests:q} --log {log:q}"
