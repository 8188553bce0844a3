# Needs the drafter, the held-out records, and the responses for the lineage; makes the report in data/bench.


rule bench:
    input:
        code=stage_code("bench"),
        key=".build/keys/bench.json",
        records=expand(rules.tokenize.output.records, dataset=DATASETS),
        responses=expand(rules.generate.output.responses, dataset=DATASETS),
        fingerprints=expand(rules.generate.output.fingerprint, dataset=DATASETS),
        weights=rules.train.output.weights,
        training=rules.train.output.training,
        target=rules.target.output.info,
    output:
        report="data/bench/report.json",
        page=report(
            "data/bench/report.html", caption="../report/bench.rst", category="Bench"
        ),
        metrics=report(
            "data/bench/metrics.json",
            caption="../report/metrics.rst",
            category="Bench",
        ),
        acceptance=report(
            "data/bench/acceptance.csv",
            caption="../report/acceptance.rst",
            category="Bench",
        ),
        cells=report(
            "data/bench/cells.csv", caption="../report/cells.rst", category="Bench"
        ),
    log:
        "logs/bench.log",
    conda:
        "../environment.yaml"
    threads: workflow.cores
    resources:
        mem_mb=6000,
    message:
        "bench: serving held-out prompts with and without the drafter"
    shell:
        gate("bench")
