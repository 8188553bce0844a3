"""Brings Snakemake's view up to what DVC knows, when something happened outside it.

DVC compares contents, Snakemake times, and pull, checkout and `dvc repro` set times as they come.
Here DVC is asked once; what it calls clean, with all it was made from, is recorded in Snakemake as
built; what it calls stale is made stale there as well. Nothing stale is ever touched."""

import os
import re
import subprocess
import sys
from pathlib import Path

from eagle3.build import links
from eagle3.build.keys import mark_stale
from eagle3.build.shared import TOUCHING, log

SHOWN = 12  # stale stages that are named


def run(rules) -> bool:
    """`rules` are Snakemake's. Returns whether it succeeded; where it did not, Snakemake may build
    too much."""
    if not os.path.exists("dvc.lock") and not any(Path("data").glob("*/*")):
        return True
    from dvc.exceptions import DvcException
    from dvc.lock import LockError
    from dvc.repo import Repo, lock_repo

    try:
        with Repo() as repo, lock_repo(repo):
            status, graph = links.without_dangling(repo.status), repo.index.graph
    except LockError:
        log("dvc is busy in this folder; what it has finished is shown when it ends")
        return False
    except DvcException as error:
        log(f"dvc status failed, so more than necessary may be checked: {error}")
        return False
    clean, stale = sort_out(status, graph)
    new = {stage.addressing for stage in graph if not any(dep.hash_info for dep in stage.deps)}
    reasons = {stage: "never run" if stage in new else describe(status[stage]) for stage in stale}
    for stage in stale:
        mark_stale(stage, reasons[stage])
    for stage in stale[:SHOWN]:
        log(f"{stage}: {reasons[stage]}")
    if len(stale) > SHOWN:
        log(f"and {len(stale) - SHOWN} more stages")
    return _touch(first_outputs(rules, clean))


def sort_out(status: dict, graph) -> tuple[list[str], list[str]]:
    """(stages that are clean with everything upstream, stages that are stale themselves). Edges
    lead to what is needed."""
    import networkx

    clean, stale = [], []
    for stage in graph:
        if stage.addressing in status:
            stale.append(stage.addressing)
        elif not any(above.addressing in status for above in networkx.descendants(graph, stage)):
            clean.append(stage.addressing)
    return sorted(clean), sorted(stale)


def describe(entries: list) -> str:
    """DVC's status of a stage in a line: 'changed deps: workflow/eagle3/records modified'."""
    parts = []
    for entry in entries:
        if isinstance(entry, str):
            parts.append(entry)
            continue
        for kind, items in entry.items():
            shown = [
                f"{name} {what if isinstance(what, str) else ', '.join(what)}"
                for name, what in items.items()
            ]
            parts.append(f"{kind}: {', '.join(shown[:4])}{' …' if len(shown) > 4 else ''}")
    return "; ".join(parts)


def first_outputs(rules, stages: list[str]) -> list[str]:
    """One output file of each stage's job; Snakemake touches the others with it."""
    patterns = {rule.name: str(rule.output[0]) for rule in rules if rule.output}
    return [
        re.sub(
            r"\{dataset\b[^}]*\}", name, patterns[group]
        )  # Snakemake adds the allowed names: {dataset,one|two}
        for group, _, name in (stage.partition("@") for stage in stages)
        if group in patterns
    ]


def _touch(files: list[str]) -> bool:
    if not files:
        return True
    command = [
        sys.executable,
        "-m",
        "snakemake",
        "--touch",
        "--forceall",
        "--cores",
        "1",
        "--quiet",
        "all",
        "--",
        *files,
    ]
    done = subprocess.run(
        command, env={**os.environ, TOUCHING: "1"}, capture_output=True, text=True
    )
    if done.returncode:
        log(
            "recording finished stages failed, so more than necessary may be checked: "
            f"{done.stderr.strip()[-600:]}"
        )
    return done.returncode == 0
