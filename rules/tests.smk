rule test_support:
    """Write what generated tests need beside them: options and fixtures, and the support package."""
    output:
        f"{TESTS.folder}/conftest.py",
        directory(f"{TESTS.folder}/tp_support"),
    log:
        f"{FLOW.run}/logs/test_support.log",
    localrule: True
    params:
        out=[TESTS.root],
        code=TESTS.support_code,
    shell:
        "python scripts/job.py test_support --out {params.out:q} --log {log:q}"


rule test_file:
    """Write the reference tests of one op_type's definitions, one class per definition."""
    input:
        cases=planned(FLOW.plan),
        known=FLOW.known,
    output:
        f"{TESTS.folder}/test_{{op_type}}.py",
    log:
        f"{FLOW.run}/logs/test_file/{{op_type}}.log",
    localrule: True
    params:
        options=TESTS.file_options,
        code=code_digest("testgen"),
    shell:
        "python scripts/job.py test_file --cases {input.cases:q} --known {input.known:q} {params.options:q} --log {log:q}"


rule tests:
    """Generate the tests of everything selected, into a folder below the results: the dataset stays as it is."""
    input:
        rules.test_support.output,
        planned(TESTS.files),
    localrule: True


rule run_tests_of:
    """Run the generated tests of one op_type in one stack's environment."""
    input:
        file=f"{TESTS.folder}/test_{{op_type}}.py",
        support=rules.test_support.output,
        cases=planned(FLOW.plan),
        stack=by_stack(FLOW.record),
    output:
        rows=f"{FLOW.run}/tests/{{op_type}}-{{stack}}.jsonl",
        junit=f"{FLOW.run}/tests/{{op_type}}-{{stack}}.xml",
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
        code=code_digest("testgen"),
    shell:
        "env PYTHONPATH={params.path:q} {params.python:q} -P scripts/stack_job.py run_tests --file {input.file:q}"
        " --cases {input.cases:q} --stack {input.stack:q} {params.options:q} --parallel {threads:q}"
        " --rows {output.rows:q} --junit-file {output.junit:q} --log {log:q}"


rule tests_report:
    """Put what every generated test came to in one file, one row per test."""
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
