# Needs the answers of a data set; makes its training sequences in data/records.


rule tokenize:
    input:
        code=stage_code("tokenize"),
        key=".build/keys/tokenize@{dataset}.json",
        responses=rules.generate.output.responses,
        fingerprint=rules.generate.output.fingerprint,
    output:
        records="data/records/{dataset}.parquet",
    log:
        "logs/tokenize/{dataset}.log",
    conda:
        "../environment.yaml"
    threads: 1
    resources:
        mem_mb=2000,
    message:
        "tokenize {wildcards.dataset}: served ids to records"
    shell:
        gate("tokenize@{wildcards.dataset}")
