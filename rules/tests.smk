def generated_files(wildcards):
    """Generated test files of every op_type that was planned; known once planning is done."""
    checkpoints.cases.get()
    return TESTS.files()


def support_code(wildcards):
    """Digest of the support package; read only where it is to be written."""
    return TESTS.support_code


def tested_rows(wildcards):
    """What the tests came to, per op_type and environment; known once planning is done."""
    checkpoints.cases.get()
    return TESTS.rows()


def tested_stacks(wildcards):
    """Records of the stacks that tests ran in; known once planning is done."""
    checkpoints.cases.get()
    return TESTS.records()


def test_python(wildcards):
    """The interpreter that the tests run in."""
    return FLOW.python(wildcards.stack)


def test_path(wildcards):
    """PYTHONPATH of what runs the tests."""
    return FLOW.sources.path(wildcards.stack)


def test_stack(wildcards):
    """File after which the stack's record is there."""
    return FLOW.sources.recorded(wildcards.stack)


def test_record(wildcards):
    """Record of the stack, as far as the op_type depends on it."""
    return FLOW.sources.record(wildcards.stack, wildcards.op_type)


def test_builds(wildcards):
    """JIT build results that the tests depend on, if the stack builds any."""
    return TESTS.builds(wildcards.op_type, wildcards.stack)


def test_lanes(wildcards):
    """How many definitions are tested side by side."""
    return FLOW.load.judge_lanes(wildcards.op_type)


def test_memory(wildcards):
    """Memory of the job, as planned."""
    return FLOW.load.judge_mb(wildcards.op_type)


rule test_support:
    """Write what generated tests need beside them: options and fixtures, and the support package."""
    output:
        f"{TESTS.folder}/conftest.py",
        directory(f"{TESTS.folder}/tp_support"),
    log:
        f"{FLOW.run}/logs/test_support.log",
    localrule: True
    params:
        out=TESTS.root,
        code=support_code,
    shell:
        "{DRIVER:q} scripts/reference_tests.py --out {params.out:q} --log {log:q}"


rule test_file:
    """Write the reference tests of one op_type's definitions, one class per definition."""
    input:
        cases=f"{FLOW.run}/cases/{{op_type}}.json",
        known=FLOW.known,
    output:
        f"{TESTS.folder}/test_{{op_type}}.py",
    log:
        f"{FLOW.run}/logs/test_file/{{op_type}}.log",
    localrule: True
    params:
        out=TESTS.root,
        sizes=FLOW.config.test_sizes,
        tolerance=FLOW.tolerance,
        code=code_digest("traceproof.testgen.generate"),
    shell:
        "{DRIVER:q} scripts/reference_tests.py --out {params.out:q} --cases {input.cases:q} --sizes {params.sizes:q}"
        " --tolerance {params.tolerance:q} --known {input.known:q} --log {log:q}"


rule tests:
    """Generate the tests of everything selected, into a folder below the results: the dataset stays as it is."""
    input:
        rules.test_support.output,
        generated_files,
    localrule: True


rule run_tests_of:
    """Run the generated tests of one op_type in one stack's environment."""
    input:
        file=f"{TESTS.folder}/test_{{op_type}}.py",
        support=rules.test_support.output,
        cases=f"{FLOW.run}/cases/{{op_type}}.json",
        stack=test_stack,
        built=test_builds,
    output:
        rows=f"{FLOW.run}/tests/{{op_type}}-{{stack}}.jsonl",
        junit=f"{FLOW.run}/tests/{{op_type}}-{{stack}}.xml",
    log:
        f"{FLOW.run}/logs/tests/{{op_type}}-{{stack}}.log",
    threads: test_lanes
    resources:
        mem_mb=test_memory,
        gpu=FLOW.one_gpu,
        gpu_model=FLOW.gpu_model,
    params:
        python=test_python,
        path=test_path,
        record=test_record,
        dataset=FLOW.dataset,
        caches=FLOW.caches,
        limits=FLOW.limits,
        options=TESTS.options,
        code=code_digest("traceproof.testgen.outcomes", "traceproof.testgen.worker"),
    shell:
        "PYTHONPATH={params.path:q} {params.python:q} scripts/run_tests.py --file {input.file:q}"
        " --op-type {wildcards.op_type:q} --dataset {params.dataset:q}"
        " --cases {input.cases:q} --stack {params.record:q} --caches {params.caches:q} --built {input.built:q}"
        " --limits {params.limits:q} --memory-mb {resources.mem_mb:q} --lanes {threads:q} {params.options:q} --rows {output.rows:q}"
        " --junit {output.junit:q} --log {log:q}"


rule tests_report:
    """Put what every generated test came to in one file, one row per test."""
    input:
        rows=tested_rows,
        stacks=tested_stacks,
        known=FLOW.known,
    output:
        f"{FLOW.run}/tests.json",
    log:
        f"{FLOW.run}/logs/tests_report.log",
    localrule: True
    params:
        code=code_digest("traceproof.testgen.summary"),
    shell:
        "{DRIVER:q} scripts/tests_report.py --rows {input.rows:q} --stacks {input.stacks:q} --known {input.known:q}"
        " --out {output:q} --log {log:q}"


rule run_tests:
    """Run the generated tests of everything selected; prints the counts and fails on findings."""
    input:
        f"{FLOW.run}/tests.json",
    log:
        f"{FLOW.run}/logs/run_tests.log",
    localrule: True
    shell:
        "{DRIVER:q} scripts/tests_outcome.py --tests {input:q} --log {log:q}"
