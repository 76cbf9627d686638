def jit_python(wildcards):
    """The interpreter that modules are built with."""
    return FLOW.python(wildcards.stack)


def jit_path(wildcards):
    """PYTHONPATH of the builders."""
    return FLOW.sources.path(wildcards.stack)


def jit_stack(wildcards):
    """Stack record the builds depend on."""
    return FLOW.sources.built_by(wildcards.stack, wildcards.op_type)[1]


def jit_record(wildcards):
    """The record that names the folder in which kernels are kept."""
    return FLOW.sources.built_by(wildcards.stack, wildcards.op_type)[0]


def jit_code(wildcards):
    """Digest of the code that decides what is built."""
    return FLOW.jit_code(wildcards.stack, wildcards.op_type)


rule jit:
    """Build the kernel modules that an op_type's definitions need, side by side, while other jobs use the GPU."""
    input:
        cases=f"{FLOW.run}/cases/{{op_type}}.json",
        stack=jit_stack,
    output:
        f"{FLOW.run}/jit/{{op_type}}-{{stack}}.json",
    log:
        f"{FLOW.run}/logs/jit/{{op_type}}-{{stack}}.log",
    priority: 1000  # the longest build decides when a first run is done
    resources:
        gpu=FLOW.one_gpu,
        gpu_model=FLOW.gpu_model,
    params:
        python=jit_python,
        record=jit_record,
        path=jit_path,
        code=jit_code,
        caches=FLOW.caches,
        seconds=FLOW.config.limits.build_s,
    shell:
        "PYTHONPATH={params.path:q} {params.python:q} -P -m traceproof.pipeline.job_client scripts/jit.py --cases {input.cases:q} --stack {params.record:q}"
        " --caches {params.caches:q} --seconds {params.seconds:q} --out {output:q} --log {log:q}"
