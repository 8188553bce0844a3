# Needs the hidden states of all data sets and the draft vocabulary; makes the drafter in data/drafter.


rule train:
    input:
        code=stage_code("train"),
        key=".build/keys/train.json",
        states=expand(rules.extract.output.manifest, dataset=DATASETS),
        vocab=rules.vocab.output.vocab,
        coverage=rules.vocab.output.coverage,
        target=rules.target.output.info,
    output:
        weights="data/drafter/model.safetensors",
        config="data/drafter/config.json",
        training="data/drafter/training.json",
        metrics="data/drafter/metrics.json",
        curves=report(
            "data/drafter/curves.csv",
            caption="../report/curves.rst",
            category="Training",
        ),
    log:
        "logs/train.log",
    conda:
        "../environment.yaml"
    threads: workflow.cores
    resources:
        mem_mb=6000,
    message:
        "train: training the drafter"
    shell:
        gate("train")
