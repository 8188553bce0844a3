# Prompts to an EAGLE-3 drafter that SGLang serves. What is stale is DVC's decision (dvc.yaml); here it is scheduled.
#
#   snakemake --cores all drafter    the drafter, data/drafter
#   snakemake --cores all bench      the drafter and its report, data/bench
#   snakemake -n drafter             what is stale, and why


include: "workflow/rules/common.smk"
include: "workflow/rules/target.smk"
include: "workflow/rules/prepare.smk"
include: "workflow/rules/generate.smk"
include: "workflow/rules/tokenize.smk"
include: "workflow/rules/vocab.smk"
include: "workflow/rules/extract.smk"
include: "workflow/rules/train.smk"
include: "workflow/rules/bench.smk"


localrules:
    all,
    drafter,


rule all:
    default_target: True
    input:
        rules.bench.output,
        rules.train.output,
    message:
        "all: data/drafter and data/bench/report.html"


rule drafter:
    input:
        rules.train.output,
    message:
        "drafter: lies in data/drafter; what it gains: make bench"


try:
    BRIDGE.catch_up(workflow.rules)
except UserError as error:
    raise WorkflowError(str(error)) from None
