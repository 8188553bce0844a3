# Needs the source of the model in params.yaml; makes data/target: target.json, and model/ where it was converted.


rule target:
    input:
        code=stage_code("target"),
        key=".build/keys/target.json",
    output:
        info="data/target/target.json",
    log:
        "logs/target.log",
    conda:
        "../environment.yaml"
    threads: workflow.cores
    resources:
        mem_mb=4000,
    message:
        "target: bringing the target model to data/target"
    shell:
        gate("target")
