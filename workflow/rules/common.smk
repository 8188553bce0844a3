# The bridge to DVC: parameter slices become key files, a rule's shell becomes a DVC stage.
#
# `benchmark:` is not used: Snakemake counts that file among the outputs, so a clone, which has none, would be stale.

import os
import re
import sys

sys.path.insert(0, os.path.join(workflow.basedir, "workflow"))

from eagle3.build.bridge import Bridge
from eagle3.core.errors import UserError
from snakemake.exceptions import WorkflowError

try:
    BRIDGE = Bridge(workflow.is_main_process)
except UserError as error:
    raise WorkflowError(str(error)) from None

DATASETS = BRIDGE.datasets


wildcard_constraints:
    dataset="|".join(map(re.escape, DATASETS)),


def stage_code(stage):
    """Every file of the folders that dvc.yaml lists for a stage: Snakemake sees no edit inside a folder."""
    return BRIDGE.code[stage]


def half_the_cores(wildcards):
    """Two jobs of this kind at a time: while one starts up on a single core, the other computes.

    The embedded engine's numbers do not depend on it; Snakemake hands the count to PyTorch as OMP_NUM_THREADS.
    """
    return max(1, (workflow.cores or 2) // 2)


def gate(stage):
    """Shell text that brings a stage up to date through DVC, and keeps what it says: Ctrl-C reaches tee as well, and a stage
    has last words."""
    return f"python -m eagle3.build.gate {stage} 2>&1 | tee -i {{log}}"


onstart:
    BRIDGE.starting()


onsuccess:
    BRIDGE.remember(
        {"@".join([job.rule.name, *job.wildcards]) for job in workflow.dag.jobs}
    )


onerror:
    BRIDGE.last_words()
