# Needs data/target and the rows of a data set; makes its prompts, rejects and counts in data/prompts.


rule prepare:
    input:
        code=stage_code("prepare"),
        key=".build/keys/prepare@{dataset}.json",
        target=rules.target.output.info,
    output:
        prompts="data/prompts/{dataset}.parquet",
        rejects="data/prompts/{dataset}.rejects.jsonl",
        stats="data/prompts/{dataset}.stats.json",
    log:
        "logs/prepare/{dataset}.log",
    # All answers first: a server that answers and one that captures states are started differently, and a large one takes
    # minutes to load.
    priority: 20
    conda:
        "../environment.yaml"
    threads: 1
    resources:
        mem_mb=2000,
    message:
        "prepare {wildcards.dataset}: rows to prompts"
    shell:
        gate("prepare@{wildcards.dataset}")
