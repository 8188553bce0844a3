"""Key files: each stage's slice of params.yaml in `.build/keys/STAGE.json`, an input of its rule.

A key file is written only when its slice changes, so without any of Snakemake's own records an
output that is older than its key file is stale. `mark_stale` makes a key file new for what DVC
found stale by other means."""

import json
import re
import time
from pathlib import Path
from typing import Any

from eagle3.build.shared import KEYS
from eagle3.core import params as parameters
from eagle3.core.code import code_files
from eagle3.core.errors import UserError
from eagle3.core.files import canonical_json, write_text


def ours(definitions: dict) -> dict[str, dict]:
    """Stages of dvc.yaml that have a rule and a script of the same name; any other is somebody's
    own, and DVC's alone."""
    return {
        group: definition
        for group, definition in definitions["stages"].items()
        if f"workflow/scripts/{group}.py" in str(definition.get("do", definition).get("deps"))
    }


def stage_names(definitions: dict, datasets: list[str]) -> list[str]:
    """Every stage by DVC's name: 'train', 'prepare@alpaca', …"""
    return [
        f"{group}@{name}" if name else group
        for group, definition in ours(definitions).items()
        for name in (datasets if "foreach" in definition else [""])
    ]


def learn(write: bool) -> dict[str, Any]:
    """Checks params.yaml and dvc.yaml and, with `write`, brings the key files up to date.

    Returns `datasets`, `stages`, `code` (files by rule) and `changes` (lines that say which
    parameters differ from those of the last build). Raises UserError for a wrong parameter, or a
    dvc.lock that cannot be read."""
    parameters.load("params.yaml")
    content, definitions = parameters.read_yaml("params.yaml"), parameters.read_yaml("dvc.yaml")
    datasets = sorted(content["datasets"])
    stages = stage_names(definitions, datasets)
    code = {group: code_files(group, definitions) for group in ours(definitions)}
    # As DVC reads them: without the schema's defaults, so that both tools see the same change.
    now = {
        stage: {
            key: parameters.lookup(content, key)
            for key in parameters.stage_slices(stage, definitions, content)
        }
        for stage in stages
    }
    recorded = read_lock()
    if write:
        for stage, slices in now.items():
            _write_key(stage, slices)
    return {"datasets": datasets, "stages": stages, "code": code, "changes": changes(recorded, now)}


def read_lock() -> dict[str, dict]:
    """Stages of dvc.lock, which is read as DVC reads it. Raises UserError, with the way out, for
    one that a merge or a kill left unreadable."""
    from dvc.schema import COMPILED_LOCKFILE_SCHEMA
    from dvc.utils.serialize import YAMLFileCorruptedError, parse_yaml
    from voluptuous import Invalid

    path = Path("dvc.lock")
    if not path.exists():
        return {}
    text = path.read_text(errors="replace")
    if any(line.startswith("<<<<<<< ") for line in text.splitlines()):
        raise UserError(
            "dvc.lock has merge conflicts; `git checkout --ours dvc.lock` (or --theirs), then "
            "build: what the other side had made comes back from the cache"
        )
    try:
        stages = COMPILED_LOCKFILE_SCHEMA(parse_yaml(text, "dvc.lock"))["stages"]
        for stage in stages.values():
            for entry in (*stage.get("deps", []), *stage.get("outs", [])):
                if not re.fullmatch(r"[0-9a-f]{32}(\.dir)?", entry.get("md5", "0" * 32)):
                    raise Invalid(f"{entry['path']} has the digest {entry['md5']!r}")
        return stages
    except (YAMLFileCorruptedError, Invalid, KeyError, AttributeError):
        raise UserError(
            "dvc.lock is cut off or damaged; `rm dvc.lock` (or `git checkout dvc.lock`), then "
            "build: finished stages come back from the cache without running"
        ) from None


def _write_key(stage: str, slices: dict[str, Any]) -> None:
    path = KEYS / f"{stage}.json"
    try:
        if json.loads(path.read_text())["params"] == json.loads(canonical_json(slices)):
            return
    except (OSError, ValueError, KeyError):
        pass
    write_text(path, canonical_json({"params": slices}) + "\n")


def mark_stale(stage: str, reason: Any) -> None:
    """Renews a stage's key file, so that Snakemake sees what DVC sees. The time in it sets it apart
    from all before."""
    path = KEYS / f"{stage}.json"
    content = json.loads(path.read_text())
    write_text(
        path,
        canonical_json({"params": content["params"], "stale": reason, "seen": time.time_ns()})
        + "\n",
    )


def marked_stale(stage: str) -> bool:
    """Whether a stage was found stale in this folder since its parameters last changed."""
    return "stale" in json.loads((KEYS / f"{stage}.json").read_text())


def changes(recorded: dict[str, dict], now: dict[str, dict[str, Any]]) -> list[str]:
    """Lines `train.lr 0.0005 -> 0.0001 (train)`: parameters that differ from those a stage was last
    built with."""
    found: dict[str, list[str]] = {}
    for stage, slices in now.items():
        if stage in recorded:
            before = recorded[stage].get("params", {}).get("params.yaml", {})
            for line in _differences(before, slices):
                found.setdefault(line, []).append(stage)
    return [f"{line} ({', '.join(stages)})" for line, stages in found.items()]


def _differences(before: dict, after: dict, path: str = "") -> list[str]:
    lines = []
    for key in sorted(before.keys() | after.keys(), key=str):
        old, new, name = before.get(key), after.get(key), f"{path}.{key}" if path else str(key)
        if old == new:
            continue
        if isinstance(old, dict) and isinstance(new, dict):
            lines += _differences(old, new, name)
        elif isinstance(new, dict):
            lines.append(f"{name} added")
        elif isinstance(old, dict):
            lines.append(f"{name} removed")
        else:
            lines.append(f"{name} {_shown(old)} -> {_shown(new)}")
    return lines


def _shown(value: Any) -> str:
    return "(not set)" if value is None else str(value)
