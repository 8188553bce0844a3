"""Extracting the states of a data set: disk check, shards that can be used again, self-checks, quarantine."""

import shutil
from pathlib import Path
from typing import Any, Callable

import torch

from eagle3 import records as record_files
from eagle3 import shards
from eagle3.errors import Refusal
from eagle3.progress import Progress
from eagle3.records import Record
from eagle3.target import Target

CHECKED = 3  # records, the shortest of a shard, that are captured twice before the first shard is kept
MIN_AGREEMENT = 0.9


def refuse_if_disk_too_small(folder: Path, needed: int, reserve: int, tokens: int) -> None:
    """Raises Refusal with the three numbers, and what would fit, before anything is written."""
    free = shutil.disk_usage(folder).free
    if needed + reserve > free:
        fits = max(0, free - reserve) * tokens // max(needed, 1)
        raise Refusal(
            f"hidden states need {needed / 2**30:,.2f} GiB and runtime.reserve_bytes keeps {reserve / 2**30:,.2f} GiB, "
            f"but {free / 2**30:,.2f} GiB are free in {folder.resolve()}; {fits:,} of {tokens:,} tokens would fit: lower "
            "max_samples, set hidden_states.dtype to float8_e4m3fn, or make room")


def self_check(capture, group: list[Record], head: torch.Tensor, greedy: bool) -> dict[str, Any]:
    """Captures a few records alone and together and compares. Raises Refusal when they disagree or, where the
    answers were greedy, when the states do not predict the tokens that were served.

    `head` [V, H] turns `last` into logits.
    """
    sample = sorted(group, key=lambda r: len(r.input_ids))[:CHECKED]
    together = capture.batch([r.input_ids for r in sample])
    cosine, agree, total = 1.0, 0, 0
    for record, (aux, last) in zip(sample, together):
        alone_aux, alone_last = capture.batch([record.input_ids])[0]
        if len(last) != len(record.input_ids):
            raise Refusal(f"record {record.id} has {len(record.input_ids)} ids but {len(last)} states; switch the "
                          "server's prefix cache off (--disable-radix-cache)")
        for one, other in ((aux, alone_aux), (last, alone_last)):
            cosine = min(cosine, torch.cosine_similarity(one.float(), other.float(), dim=-1).min().item())
        mask = torch.tensor(record.loss_mask)[1:]
        predicted = (alone_last[:-1][mask].float() @ head.float().T).argmax(-1)
        agree += (predicted == torch.tensor(record.input_ids)[1:][mask]).sum().item()
        total += int(mask.sum())
    if cosine < 0.999:
        raise Refusal(f"states of a record captured alone and in a batch differ (cosine {cosine:.4f}, at least 0.999 is "
                      "needed); requests are mixed up, or the engine's batches change its numerics too much")
    share = agree / max(total, 1)
    if greedy and share < MIN_AGREEMENT:
        raise Refusal(f"only {share:.1%} of greedy tokens are what the captured states predict (at least "
                      f"{MIN_AGREEMENT:.0%}); the final norm, the layer list or the target differs from the one that answered")
    return {"cosine_alone_and_batched": cosine, "greedy_agreement": share if greedy else None}


def extract(path: Path, folder: Path, work: Path, make_capture: Callable[[], Any], target: Target,
            identity: dict[str, Any], params, runtime, reusable: Callable[[str], Path | None], greedy: bool,
            more: dict[str, Any], say: Callable[[str], None]) -> None:
    """Writes `folder` from the records at `path`.

    Shards are finished one by one under `work`, named by their key, so a killed run loses one shard at most;
    `reusable(key)` finds shards of an earlier version. The folder is put in place whole.
    """
    finished = work / "shards"
    finished.mkdir(parents=True, exist_ok=True)
    token_bytes = shards.bytes_per_token(target.hidden_size, params.dtype)
    total = sum(len(r.input_ids) for r in record_files.read(path))
    groups = [(shards.shard_key(g, identity), len(g), sum(len(r.input_ids) for r in g))
              for g in shards.plan(record_files.read(path), params.shard_bytes, token_bytes)]
    missing = {key for key, _, _ in groups if not _ready(finished, key, reusable)}
    to_write = sum(tokens for key, _, tokens in groups if key in missing)
    refuse_if_disk_too_small(finished, to_write * token_bytes, runtime.reserve_bytes, to_write)
    say(f"{total:,} tokens in {len(groups)} shards, {len(groups) - len(missing)} of them there already; "
        f"{to_write * token_bytes / 2**20:,.1f} MiB to write")
    entries, quarantined, checks, capture = [], [], None, None
    with Progress(f"extract {folder.name}", total, "tokens", done=total - to_write) as bar:
        for (key, _, _), group in zip(groups, shards.plan(record_files.read(path), params.shard_bytes, token_bytes)):
            if key in missing:
                capture = capture or make_capture()
                if checks is None:
                    checks = self_check(capture, group, target.head(), greedy)
                kept, bad = [], []
                for states in capture.run(group, runtime.batch_tokens):
                    finite = torch.isfinite(states.aux).all() and torch.isfinite(states.last).all()
                    (kept if finite else bad).append(states)
                    bar.add(len(states.record.input_ids))
                if kept:
                    entry = shards.write_shard(finished / f"{key}.safetensors", kept, params.dtype)
                    entry["quarantined"] = [s.record.id for s in bad]
                    shards.write_json(finished / f"{key}.json", entry)
                _refuse_if_quarantined(len(bad), len(group), params.max_quarantine_rate, bad)
            if (finished / f"{key}.json").exists():
                entries.append(shards.read_json(finished / f"{key}.json"))
                quarantined += entries[-1]["quarantined"]
    _publish(folder, finished, entries, identity, {**more, "checks": checks, "quarantined": quarantined})


def _ready(finished: Path, key: str, reusable: Callable[[str], Path | None]) -> bool:
    """Whether a shard is finished under work; one of an earlier artifact is linked there first."""
    entry = finished / f"{key}.json"
    if entry.exists() and not shards.damaged(finished, shards.read_json(entry)):
        return True
    if source := reusable(key):
        shards.link(source, finished / f"{key}.safetensors")
        return entry.exists() and not shards.damaged(finished, shards.read_json(entry))
    return False


def _refuse_if_quarantined(bad: int, total: int, limit: float, rows: list) -> None:
    if bad > limit * total:
        raise Refusal(f"{bad} of {total} records have NaN or inf in their states (first: {rows[0].record.id}), more than "
                      f"hidden_states.max_quarantine_rate {limit} allows; check the target's dtype")


def _publish(folder: Path, finished: Path, entries: list[dict], identity: dict, more: dict) -> None:
    with shards.replacing(folder) as temporary:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        for entry in entries:
            shards.link(finished / entry["file"], temporary / entry["file"])
        shards.write_manifest(temporary, identity, entries, **more)
    keep = {entry["file"].removesuffix(".safetensors") for entry in entries}
    for file in finished.iterdir():
        # The folder's links hold the bytes; a second name under work would keep deleted states on the disk.
        if file.suffix == ".safetensors" or file.stem not in keep:
            file.unlink()
