"""Brings Snakemake's view up to what DVC knows, when something happened outside it.

DVC compares contents, Snakemake times, and pull, checkout and `dvc repro` set times as they come.
Here DVC is asked once; what it calls clean, with all it was made from, is recorded in Snakemake as
built; what it calls stale is made stale there as well. Nothing stale is ever touched."""

import os
import re
import subprocess
import sys
from pathlib import Path

from eagle3.build import links, times
from eagle3.build.keys import mark_stale, marked_stale
from eagle3.build.shared import KEYS, TOUCHING, log

SHOWN = 12  # stale stages that are named


def run(rules) -> bool:
    """`rules` are Snakemake's. Returns whether it succeeded; where it did not, Snakemake may build
    too much."""
    if not os.path.exists("dvc.lock") and not any(Path("data").glob("*/*")):
        return True
    from dvc.exceptions import DvcException
    from dvc.lock import LockError
    from dvc.repo import Repo, lock_repo

    from eagle3.build.objects import Guard

    times.leave_the_future(KEYS, "data")
    try:
        with Repo() as repo, lock_repo(repo):
            guard = Guard(repo)
            status = links.without_dangling(repo.status)
            graph = ours(repo.index.graph)
            absent = [s for s in graph if is_absent(s, status, graph, guard.dropped)]
    except LockError:
        log(
            "dvc is busy in this folder; what it has finished is shown when it ends. If no dvc and "
            "no other build runs here, one was killed: rm .dvc/tmp/lock"
        )
        return False
    except DvcException as error:
        log(f"dvc status failed, so more than necessary may be checked: {error}")
        return False
    status = {name: status[name] for name in status if name not in names(absent)}
    clean, stale = sort_out(status, graph)
    outs = {stage.addressing: [out.fs_path for out in stage.outs] for stage in graph}
    new = {stage.addressing for stage in graph if not any(dep.hash_info for dep in stage.deps)}
    reasons = {stage: "never run" if stage in new else describe(status[stage]) for stage in stale}
    for stage in stale:
        mark_stale(stage, reasons[stage])
        times.set_back(outs[stage], KEYS / f"{stage}.json")
    for stage in stale[:SHOWN]:
        log(f"{stage}: {reasons[stage]}")
    if len(stale) > SHOWN:
        log(f"and {len(stale) - SHOWN} more stages")
    # A stage whose inputs were not fetched cannot be touched, since a touch goes through them.
    whole = [name for name in clean if not below(name, absent, graph)]
    for stage in set(clean) - set(whole):
        times.set_to_now(outs[stage])
    return _touch(first_outputs(rules, whole))


def names(stages) -> set[str]:
    return {stage.addressing for stage in stages}


def ours(graph):
    """The part of DVC's graph that has rules: stages of other people in the same repository are
    theirs alone."""
    rules = Path("dvc.yaml").resolve()
    return graph.subgraph(
        stage
        for stage in graph
        if getattr(stage, "name", None)
        and Path(stage.path).resolve() == rules
        and (KEYS / f"{stage.addressing}.json").exists()
    )


def is_absent(stage, status: dict, graph, dropped: set[str]) -> bool:
    """Whether a stage is stale only in that it, or what it was made from, was never fetched: it is
    as recorded, and nothing need be made for its sake. What was lost or found damaged here
    (`dropped` are digests) is made again."""
    import networkx

    from eagle3.build.objects import used

    said = status.get(stage.addressing, [])
    if not said or marked_stale(stage.addressing) or not all(isinstance(s, dict) for s in said):
        return False
    reasons = {kind: items for entry in said for kind, items in entry.items()}
    outs = reasons.pop("changed outs", {})
    if outs and ("not in cache" not in outs.values() or any(map(os.path.exists, outs))):
        return False
    deleted = all(what == "deleted" for what in reasons.pop("changed deps", {}).values())
    recorded = all(part.hash_info for part in (*stage.deps, *stage.outs))
    if reasons or not deleted or not recorded or dropped & set(used(stage)):
        return False
    return not stage.changed(allow_missing=True, upstream=list(networkx.descendants(graph, stage)))


def below(name: str, absent: list, graph) -> bool:
    """Whether something that stage `name` was made from, or it itself, is not here."""
    import networkx

    (stage,) = (stage for stage in graph if stage.addressing == name)
    return bool(({stage} | networkx.descendants(graph, stage)) & set(absent))


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
