# Needs the records of a data set; makes the target's hidden states for them in data/hidden_states.


rule extract:
    input:
        code=stage_code("extract"),
        key=".build/keys/extract@{dataset}.json",
        records=rules.tokenize.output.records,
        target=rules.target.output.info,
    output:
        manifest="data/hidden_states/{dataset}/manifest.json",
    log:
        "logs/extract/{dataset}.log",
    conda:
        "../environment.yaml"
    threads: half_the_cores
    resources:
        mem_mb=4000,
    message:
        "extract {wildcards.dataset}: capturing hidden states"
    shell:
        gate("extract@{wildcards.dataset}")
