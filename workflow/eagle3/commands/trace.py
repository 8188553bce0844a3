"""What a drafter was made from: found in dvc.lock, now or in git's history, by the content of its
folder.

The lock that lists exactly this folder as the output of `train` lists the inputs too, by content,
and so on back to params.yaml. Where a link is not on this machine, the commit and the command that
bring it are named. A drafter that no lock knows is still matched by the digests that its
training.json holds."""

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from eagle3.core.dvc_cache import cache_config, cache_object
from eagle3.core.errors import UserError
from eagle3.core.files import CHUNK, digest_file, read_json
from eagle3.core.process import git
from eagle3.responses.responses import made_by, plain

LOCK = "dvc.lock"
ORDER = ("target", "prepare", "generate", "tokenize", "vocab", "extract", "train", "bench")


def md5_of(path: Path) -> str:
    digest = hashlib.md5(usedforsecurity=False)
    with open(path, "rb") as file:
        while chunk := file.read(CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def folder_md5(folder: str | Path) -> str:
    """DVC's name for the content of a folder: md5 of the sorted list of its files and their md5."""
    folder = Path(folder)
    listing = [
        {"md5": md5_of(path), "relpath": path.relative_to(folder).as_posix()}
        for path in sorted(folder.rglob("*"), key=lambda p: p.relative_to(folder).parts)
        if path.is_file()
    ]
    return (
        hashlib.md5(json.dumps(listing, sort_keys=True).encode(), usedforsecurity=False).hexdigest()
        + ".dir"
    )


def locks() -> Iterator[tuple[str, dict[str, Any]]]:
    """(where, stages) of the working tree's dvc.lock, then of every version of it in git, newest
    first."""
    if Path(LOCK).exists():
        yield "the working tree", _stages(Path(LOCK).read_text())
    for commit in git("log", "--all", "--format=%H", "--", LOCK).split():
        if shown := git("show", f"{commit}:./{LOCK}"):
            yield commit, _stages(shown)


def _stages(text: str) -> dict[str, Any]:
    try:
        return (yaml.load(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader)) or {}).get(
            "stages", {}
        )
    except yaml.YAMLError:  # a version with merge conflicts in it
        return {}


def find(folder: str | Path) -> tuple[str, dict[str, Any]] | None:
    """(where, stages) of the lock that lists exactly this folder as the output of train."""
    content = folder_md5(folder)
    for where, stages in locks():
        if any(out.get("md5") == content for out in stages.get("train", {}).get("outs", [])):
            return where, stages
    return None


def upstream(stage: str, stages: dict[str, Any]) -> list[str]:
    """The stages that `stage` was made from, itself included, in the order of the build.

    A dependency on a folder such as data/records is one on every stage whose output lies in it.
    """
    found: set[str] = set()
    queue = [stage]
    while queue:
        name = queue.pop()
        if name in found or name not in stages:
            continue
        found.add(name)
        for dep in stages[name].get("deps", []):
            queue += [
                other
                for other, entry in stages.items()
                for out in entry.get("outs", [])
                if out["path"] == dep["path"] or out["path"].startswith(dep["path"] + "/")
            ]
    return sorted(
        found,
        key=lambda name: (
            ORDER.index(group) if (group := name.partition("@")[0]) in ORDER else 99,
            name,
        ),
    )


class Store:
    """Content by its md5, from DVC's cache."""

    def __init__(self):
        self.cache = cache_config()[0]

    def listing(self, md5: str) -> dict[str, str] | None:
        """relpath -> md5 of a folder's files; None if the list itself is not here."""
        path = cache_object(self.cache, md5)
        return (
            {entry["relpath"]: entry["md5"] for entry in json.loads(path.read_text())}
            if path.exists()
            else None
        )

    def has(self, md5: str) -> bool:
        """Whether all of it is on this machine."""
        if not md5.endswith(".dir"):
            return cache_object(self.cache, md5).exists()
        listing = self.listing(md5)
        return listing is not None and all(
            cache_object(self.cache, member).exists() for member in listing.values()
        )

    def file(self, md5: str, name: str = "") -> Path | None:
        """Path of a file, or of the member `name` of a folder, if it is here."""
        if md5.endswith(".dir"):
            md5 = (self.listing(md5) or {}).get(name, "")
        path = cache_object(self.cache, md5) if md5 else None
        return path if path and path.exists() else None


def trace(folder: str | Path) -> dict[str, Any]:
    """Everything that is known of a drafter folder. Raises UserError if it is none."""
    folder = Path(folder)
    if not (folder / "training.json").exists():
        raise UserError(
            f"{folder} has no training.json, so nothing says what it was made from; give a "
            "drafter folder that "
            "`train` wrote (DRAFTER=FOLDER), or make one: `make drafter`"
        )
    training = read_json(folder / "training.json")
    found = find(folder)
    result = {
        "drafter": str(folder),
        "content": folder_md5(folder),
        "code": training.get("made_with", {}),
        "training": training.get("params", {}),
        "recorded_in": found[0] if found else None,
        "artifacts": [],
    }
    store = Store()
    if found is None:
        result["artifacts"] = [
            by_digest(name, entry)
            for name, entry in sorted(training.get("hidden_states", {}).items())
        ]
        return result
    where, stages = found
    for stage in upstream("train", stages):
        # dvc.lock keeps stages of data sets that have left params.yaml.
        if (name := stage.partition("@")[2]) and name not in training.get("hidden_states", {name}):
            continue
        outs = [
            {
                "path": out["path"],
                "md5": out.get("md5"),
                "size": out.get("size"),
                "here": store.has(out["md5"]),
            }
            for out in stages[stage].get("outs", [])
            if out.get("md5")
        ]
        entry = {
            "stage": stage,
            "outs": outs,
            "here": all(out["here"] for out in outs),
            "about": about(stage, stages[stage], store, training),
        }
        if not entry["here"]:
            entry["get"] = get_command(stage, where)
        result["artifacts"].append(entry)
    return result


def get_command(stage: str, where: str) -> str:
    """What brings a missing artifact: from the remote, at the commit whose lock names it."""
    return (
        f"dvc pull {stage}"
        if where == "the working tree"
        else f"git checkout {where[:12]} && dvc pull {stage}"
    )


def about(
    stage: str, entry: dict[str, Any], store: Store, training: dict[str, Any]
) -> dict[str, Any]:
    """What an artifact says of itself, as far as it is here, and what params.yaml asked for."""
    group, _, name = stage.partition("@")
    outs = {Path(out["path"]).name: out["md5"] for out in entry.get("outs", []) if out.get("md5")}
    params = entry.get("params", {}).get("params.yaml", {})
    if group == "target":
        return {
            "source": _short(params.get("target", {}).get("source")),
            **_some(
                store.file(outs.get("target", ""), "target.json"),
                ("architecture", "digest", "dtype", "quantization"),
            ),
        }
    if group == "prepare":
        source = params.get(f"datasets.{name}", {}).get("source")
        return {
            "source": _short(source),
            **_some(
                store.file(outs.get(f"{name}.stats.json", "")),
                ("rows", "kept", "rejected", "duplicates"),
            ),
        }
    if group == "generate":
        file = store.file(outs.get(name, ""), "fingerprint.json")
        return read_json(file) if file else {}
    if group == "tokenize":
        file = store.file(outs.get(f"{name}.parquet", ""))
        wanted = training.get("hidden_states", {}).get(name, {}).get("records_digest")
        return {
            "digest": wanted,
            **({"as_trained": digest_file(file) == wanted} if file and wanted else {}),
        }
    if group == "extract":
        return _some(
            store.file(outs.get(name, ""), "manifest.json"),
            ("rows", "tokens", "layers", "dtype", "engine"),
        )
    if group == "vocab":
        return _some(store.file(outs.get("draft_vocab.json", "")), ("size", "coverage"))
    if group == "train":
        return _some(
            store.file(outs.get("drafter", ""), "metrics.json"),
            ("accept_length", "accept_length_untrained", "updates"),
        )
    return {}


def by_digest(name: str, entry: dict[str, Any]) -> dict[str, Any]:
    """A data set of a drafter that no lock knows: are the records of the working tree those that it
    was trained on?"""
    path = Path(f"data/records/{name}.parquet")
    here = path.exists() and digest_file(path) == entry.get("records_digest")
    other = "another version is in the working tree" if path.exists() and not here else ""
    return {
        "stage": f"tokenize@{name}",
        "outs": [{"path": str(path), "digest": entry.get("records_digest"), "here": here}],
        "here": here,
        "about": {k: entry.get(k) for k in ("tokens", "rows", "layers", "dtype", "target_digest")},
        **(
            {}
            if here
            else {
                "get": "no dvc.lock in this repository lists this drafter: fetch the branch that "
                "built it "
                f"(git fetch --all) and run this again{'; ' + other if other else ''}"
            }
        ),
    }


def _short(source: dict[str, Any] | None) -> str:
    """A source in one line: 'hub glaiveai/x at e7f4b6456019', 'package p==1, file f', 'path /x'."""
    if not source:
        return "unknown"
    if source.get("hub"):
        return f"hub {source['hub']} at {str(source.get('revision'))[:12]}"
    if source.get("package"):
        return f"package {source['package']}, {source.get('file')}"
    return f"path {source.get('path')}"


def _some(file: Path | None, keys: tuple[str, ...]) -> dict[str, Any]:
    content = read_json(file) if file else {}
    return {key: content[key] for key in keys if key in content}


def page(found: dict[str, Any]) -> str:
    """The trace for people: one line per artifact, what is missing at the end."""
    code = found["code"]
    lines = [
        f"{found['drafter']}  ({found['content']})",
        f"  code: commit {code.get('git_commit') or 'unknown'}, torch {code.get('torch')}, "
        f"transformers {code.get('transformers')}",
        f"  recorded in: {found['recorded_in'] or 'no dvc.lock of this repository'}",
    ]
    width = max((len(entry["stage"]) for entry in found["artifacts"]), default=0)
    for entry in found["artifacts"]:
        said = (
            made_by(entry["about"])
            if entry["stage"].startswith("generate@")
            else ", ".join(
                key.replace("_", " ")
                if value is True
                else f"{key.replace('_', ' ')} {plain(value)}"
                for key, value in entry["about"].items()
                if value is not None
            )
        )
        state = "here   " if entry["here"] else "MISSING"
        lines.append(f"  {state}  {entry['stage']:<{width}}  {said}".rstrip())
    missing = [entry for entry in found["artifacts"] if not entry["here"]]
    if missing:
        lines += [
            "",
            f"{len(missing)} of {len(found['artifacts'])} artifacts are not on this machine; to "
            "get them:",
        ]
        lines += [f"  {line}" for line in dict.fromkeys(entry["get"] for entry in missing)]
    else:
        lines += [
            "",
            f"all {len(found['artifacts'])} artifacts are on this machine; everything that is "
            "known of them: ARGS=--json",
        ]
    return "\n".join(lines) + "\n"
