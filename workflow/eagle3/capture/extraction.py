"""Extracting the states of a data set: disk check, shards that can be used again, self-checks,
quarantine.

Finished shards collect in the work folder, named by what determines their bytes, each with its
manifest entry beside it, so a killed run loses only the shards it had open. The artifact is put in
place whole, at the end."""

import itertools
import shutil
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from eagle3.capture import disk
from eagle3.capture.transformers_capture import Capture, Job
from eagle3.core.dvc_cache import remove_if_corrupt
from eagle3.core.errors import UserError
from eagle3.core.files import read_json, replacing, write_json
from eagle3.core.progress import Progress
from eagle3.hidden_states import shards
from eagle3.hidden_states.layout import Layout, bytes_per_token
from eagle3.hidden_states.shards import QUARANTINED, ShardWriter
from eagle3.records import records as record_files
from eagle3.records.records import Record

# records, the shortest of the first that are missing, that are captured twice before the rest is
CHECKED = 3
MIN_AGREEMENT = 0.9  # of greedy tokens; bf16 ties leave some to chance
MAX_DIFFERENCE, MIN_SHARE = (
    0.5,
    0.95,
)  # a router's tie may send a token to other experts in another batch
FINISHING = 3  # full shards that wait for the disk, before no further one is begun


@dataclass(frozen=True)
class Planned:
    key: str
    rows: int
    tokens: int
    size: int  # bytes of the file, exactly


class Extraction:
    """One data set. `identity` is what, besides the records, determines a shard's bytes; `params`
    is the section hidden_states, `runtime` the section runtime."""

    def __init__(
        self,
        path: Path,
        work: Path,
        hidden_size: int,
        identity: dict[str, Any],
        params,
        runtime,
        log: Callable[[str], None],
    ):
        self.path, self.work, self.hidden_size = path, work, hidden_size
        self.identity, self.params, self.runtime, self.log = identity, params, runtime, log
        self.finished = work / "shards"
        self.finished.mkdir(parents=True, exist_ok=True)
        for leftover in (*work.rglob("*.part"), *self.finished.glob("*.acks")):
            leftover.unlink()
        self.plan = [
            Planned(
                shards.shard_key(group, identity),
                len(group),
                sum(len(r.input_ids) for r in group),
                Layout([len(r.input_ids) for r in group], hidden_size, params.dtype).size,
            )
            for group in self._groups()
        ]
        self.entries: dict[str, dict] = {}  # by key: shards that are there
        self.checks: dict[str, Any] | None = None
        self._lock = threading.Lock()

    def _groups(self) -> Iterator[list[Record]]:
        return shards.plan(
            record_files.read(self.path),
            self.params.shard_bytes,
            bytes_per_token(self.hidden_size, self.params.dtype),
        )

    @property
    def missing(self) -> list[Planned]:
        return [planned for planned in self.plan if planned.key not in self.entries]

    def reuse(self, earlier: dict[str, Path]) -> None:
        """Finds the planned shards that are in the work folder or in `earlier` (files of the last
        published version, by name). Each is read once; a damaged one is named, dropped and left to
        be extracted again."""
        manifest = read_json(earlier[shards.MANIFEST]) if shards.MANIFEST in earlier else {}
        published = {entry["file"]: entry for entry in manifest.get("shards", [])}

        def find(planned: Planned) -> tuple[str, dict | None]:
            name, beside = f"{planned.key}.safetensors", self.finished / f"{planned.key}.json"
            if beside.exists() and (self.finished / name).exists():
                entry = read_json(beside)
                if reason := shards.damaged(self.finished, entry):
                    self.log(f"{self.finished / name} is damaged: {reason}; it is extracted again")
                else:
                    return planned.key, entry
            if name in published and name in earlier:
                shards.link(earlier[name], self.finished / name)
                reason = shards.damaged(self.finished, published[name])
                if not reason:
                    return planned.key, published[name]
                (self.finished / name).unlink()
                removed = remove_if_corrupt(earlier[name])
                self.log(
                    f"{name} of the earlier states is damaged: {reason}; it is extracted again"
                    f"{' and its copy is removed from the DVC cache' if removed else ''}"
                )
            return planned.key, None

        with ThreadPoolExecutor(4) as pool:
            self.entries = {key: entry for key, entry in pool.map(find, self.plan) if entry}
        # What the first run measured stays on record: a repaired artifact is then the same as
        # before, to the byte.
        if any(entry["file"] in published for entry in self.entries.values()):
            self.checks = manifest.get("checks")

    def check_disk(self) -> None:
        size, tokens = sum(p.size for p in self.missing), sum(p.tokens for p in self.missing)
        total = sum(p.tokens for p in self.plan)
        self.log(
            f"{total:,} tokens in {len(self.plan)} shards, {len(self.plan) - len(self.missing)} "
            "of them there already; "
            f"{size / 2**20:,.1f} MiB to write"
        )
        smaller = (
            ""
            if self.params.dtype == "float8_e4m3fn"
            else ", set hidden_states.dtype to float8_e4m3fn"
        )
        disk.check_size(self.finished, size, self.runtime.reserve_bytes, tokens, smaller)

    def capture(
        self,
        capturing: Callable[[], AbstractContextManager[Capture]],
        head: Callable[[], torch.Tensor],
        greedy: bool,
    ) -> None:
        """Extracts what is missing, with the target for as long as `capturing()` holds it; without
        anything missing no target is loaded. `head()` is the target's output projection [V, H];
        `greedy`: whether the records' supervised tokens are the target's likeliest."""
        if not self.missing:
            return
        first = itertools.islice(
            (
                record
                for planned, group in zip(self.plan, self._groups())
                if planned.key not in self.entries
                for record in group
            ),
            32 * CHECKED,
        )
        sample = sorted(first, key=lambda r: len(r.input_ids))[:CHECKED]
        with capturing() as capture:
            checks = self_check(
                capture,
                self.work / "check",
                sample,
                self.hidden_size,
                self.params.dtype,
                head,
                greedy,
            )
            self.checks = self.checks or checks
            self._run(capture)

    def _run(self, capture: Capture) -> None:
        total = sum(p.tokens for p in self.plan)
        left: dict[str, int] = {}
        writers: dict[str, ShardWriter] = {}
        failed: list[BaseException] = []
        full, finished, pool = 0, threading.Condition(self._lock), ThreadPoolExecutor(FINISHING)
        bar = Progress(
            f"extract {self.path.stem}",
            total,
            "tokens",
            done=total - sum(p.tokens for p in self.missing),
        )

        def jobs() -> Iterator[Job]:
            for planned, group in zip(self.plan, self._groups()):
                if planned.key in self.entries:
                    continue
                # here, where new work begins, and nowhere that what is under way would have to wait
                with finished:
                    finished.wait_for(lambda: full < FINISHING)
                writer = ShardWriter(
                    self.finished, planned.key, group, self.hidden_size, self.params.dtype
                )
                with self._lock:
                    left[planned.key], writers[planned.key] = len(group), writer
                for row in range(len(group)):
                    if failed:
                        raise failed[0]
                    yield Job(writer, row)

        def done(job: Job) -> None:
            nonlocal full
            with self._lock:
                bar.add(len(job.record.input_ids))
                left[job.writer.key] -= 1
                last = left[job.writer.key] == 0
                full += last
            if last:
                pool.submit(finish, job.writer)

        def finish(writer: ShardWriter) -> None:
            nonlocal full
            try:
                entry = writer.finish()
                write_json(self.finished / f"{writer.key}.json", entry)
                with self._lock:
                    self.entries[writer.key] = entry
                    del writers[writer.key]
                self.check_quarantine()
            except BaseException as error:  # raised where the jobs are taken, and at the end
                failed.append(error)
            finally:
                with finished:
                    full -= 1
                    finished.notify_all()

        try:
            with bar:
                capture.run(jobs(), done)
                pool.shutdown()
            if failed:
                raise failed[0]
        finally:
            pool.shutdown()
            for writer in writers.values():
                writer.discard()

    def check_quarantine(self) -> None:
        """Raises UserError when more rows than hidden_states.max_quarantine_rate of the data set
        have no usable states."""
        with self._lock:
            bad = [
                row
                for p in self.plan
                if p.key in self.entries
                for row in self.entries[p.key][QUARANTINED]
            ]
        total = sum(p.rows for p in self.plan)
        if len(bad) > self.params.max_quarantine_rate * total:
            raise UserError(
                f"{len(bad)} of {total} records have no usable states, more than "
                f"hidden_states.max_quarantine_rate {self.params.max_quarantine_rate} allows "
                "(first: "
                f"{bad[0]['id']}: {bad[0]['reason']}); check the target's dtype and the server's "
                "log"
            )

    def publish(self, folder: Path, more: dict[str, Any]) -> None:
        """Puts the folder in place and clears the work folder of everything that it does not
        name."""
        entries = [self.entries[p.key] for p in self.plan]
        bad = [row for entry in entries for row in entry[QUARANTINED]]
        if bad:
            self.log(
                f"{len(bad)} records are quarantined (first: {bad[0]['id']}: {bad[0]['reason']})"
            )
        with replacing(folder) as temporary:
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir(parents=True)
            for entry in entries:
                shards.link(self.finished / entry["file"], temporary / entry["file"])
            shards.write_manifest(
                temporary, self.identity, entries, **more, checks=self.checks, quarantined=bad
            )
        # The folder's links hold the bytes; a second name under work would keep deleted states on
        # the disk.
        shutil.rmtree(self.finished)


def self_check(
    capture: Capture,
    folder: Path,
    sample: list[Record],
    hidden_size: int,
    dtype: str,
    head: Callable[[], torch.Tensor],
    greedy: bool,
) -> dict[str, Any]:
    """Captures a few records together and one by one, through files like any others, and compares.
    Raises UserError when they disagree or, where the answers were greedy, when the states do not
    predict the tokens that were served."""
    folder.mkdir(parents=True, exist_ok=True)
    together = ShardWriter(folder, "together", sample, hidden_size, dtype)
    alone = ShardWriter(folder, "alone", sample, hidden_size, dtype)
    rows = range(len(sample))
    try:
        capture.run((Job(together, row) for row in rows), lambda job: None)
        for row in rows:
            capture.run(iter([Job(alone, row)]), lambda job: None)
        for writer in (together, alone):
            if missing := next(filter(None, map(writer.missing, rows)), ""):
                raise UserError(
                    f"self-check: {missing}; a prefix cache would do that: switch the server's off "
                    "(--disable-radix-cache), or see its log"
                )
        usable = [row for row in rows if row not in together.problems and row not in alone.problems]
        pairs = [(together.read(row), alone.read(row)) for row in usable]
        result = {
            "records": len(usable),
            "difference_alone_and_batched": _agreement(pairs),
            "greedy_agreement": None,
        }
        if greedy and usable:
            result["greedy_agreement"] = _greedy_agreement(pairs, head().float())
        return result
    finally:
        together.discard()
        alone.discard()
        shutil.rmtree(folder, ignore_errors=True)


def _agreement(pairs: list[tuple[dict, dict]]) -> float | None:
    """Mean relative difference of states captured together and alone. Raises UserError where they
    belong to different tokens.

    The difference is taken relative to how far apart the sample's tokens lie in each channel, so
    two unrelated tokens are about
    1.4 apart, and rounding, which another batch does otherwise, is a few hundredths of a deep bf16
    model. (A cosine would not tell tokens apart: a few channels, nearly the same for all, tower
    over the others.)"""
    if not pairs:
        return None
    found = []
    for name in ("aux", "last"):
        one, other = (torch.cat([pair[side][name].float() for pair in pairs]) for side in (0, 1))
        inner = torch.cat(
            [pair[1][name][1:].float() for pair in pairs]
        )  # position 0 is an outlier in every model
        spread = inner.std(0) if len(inner) > 1 else other.abs().mean(0)
        spread = spread.clamp(min=max(spread.median().item() / 100, 1e-6))
        found.append(((one - other) / spread).square().mean(-1).sqrt())
    difference = torch.cat(found)
    share = (difference < MAX_DIFFERENCE).float().mean().item()
    if share < MIN_SHARE:
        raise UserError(
            "states of a record captured alone and in a batch differ: by less than "
            f"{MAX_DIFFERENCE} of the distance between "
            f"tokens at {share:.1%} of positions, {MIN_SHARE:.0%} are needed (largest "
            f"difference: {difference.max().item():.2f}); "
            "requests are mixed up, or the engine's batches change its numerics too much"
        )
    return difference.mean().item()


def _greedy_agreement(pairs: list[tuple[dict, dict]], head: torch.Tensor) -> float:
    """Share of supervised tokens that `head` [V, H] picks from the state before them. Raises
    UserError if too low."""
    hits = []
    for _, row in pairs:
        mask = row["loss_mask"][1:]
        predicted = (row["last"][:-1][mask].float() @ head.T).argmax(-1)
        hits.append(predicted == row["input_ids"][1:][mask])
    share = torch.cat(hits).float().mean().item()
    if share < MIN_AGREEMENT:
        raise UserError(
            f"only {share:.1%} of greedy tokens are what the captured states predict, not "
            f"{MIN_AGREEMENT:.0%}; "
            "the final norm, the layer list or the target differs from the one that answered"
        )
    return share
