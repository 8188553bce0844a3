# Needs the records of all data sets; makes the draft vocabulary in data/vocab.


rule vocab:
    input:
        code=stage_code("vocab"),
        key=".build/keys/vocab.json",
        records=expand(rules.tokenize.output.records, dataset=DATASETS),
        target=rules.target.output.info,
    output:
        vocab="data/vocab/draft_vocab.safetensors",
        coverage="data/vocab/draft_vocab.json",
    log:
        "logs/vocab.log",
    conda:
        "../environment.yaml"
    threads: 1
    resources:
        mem_mb=2000,
    message:
        "vocab: choosing the draft vocabulary"
    shell:
        gate("vocab")
