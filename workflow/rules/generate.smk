# Needs the prompts of a data set; makes its answers in data/responses.


rule generate:
    input:
        code=stage_code("generate"),
        key=".build/keys/generate@{dataset}.json",
        prompts=rules.prepare.output.prompts,
        target=rules.target.output.info,
    output:
        responses="data/responses/{dataset}/raw_responses.jsonl",
        errors="data/responses/{dataset}/errors.jsonl",
        fingerprint="data/responses/{dataset}/fingerprint.json",
    log:
        "logs/generate/{dataset}.log",
    # Before extract; see prepare.
    priority: 10
    conda:
        "../environment.yaml"
    threads: half_the_cores
    resources:
        mem_mb=4000,
    message:
        "generate {wildcards.dataset}: answers to the prompts"
    shell:
        gate("generate@{wildcards.dataset}")
