"""Hidden states of the target through transformers: forward hooks, batches of similar length
bounded by tokens."""

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch

from eagle3.capture.offload import Offload, states_to_store
from eagle3.hidden_states.shards import ShardWriter
from eagle3.records.records import Record
from eagle3.target.hooks import Replica
from eagle3.target.model import Target

WINDOW = 16  # batches that are sorted by length together
# Bytes of a batch's states that are copied and written together, by one of several threads.
PIECE = 1 << 27


@dataclass(frozen=True)
class Job:
    """One record whose states are wanted: row `row` of a shard that is being written."""

    writer: ShardWriter
    row: int

    @property
    def record(self) -> Record:
        return self.writer.records[self.row]


class Capture(Protocol):
    """`run` takes jobs lazily, fills their rows in any order and calls `done` once for each, from
    any thread.

    Rows that could not be filled completely are called done as well; their writer knows what is
    missing."""

    last_is: str

    def run(self, jobs: Iterator[Job], done: Callable[[Job], None]) -> None: ...


def batches(jobs: list[Job], batch_tokens: int) -> Iterator[list[Job]]:
    """Jobs of similar length together, longest first, at most `batch_tokens` with padding. One
    longer job is alone."""
    batch: list[Job] = []
    for job in sorted(jobs, key=lambda job: -len(job.record.input_ids)):
        if batch and (len(batch) + 1) * len(batch[0].record.input_ids) > batch_tokens:
            yield batch
            batch = []
        batch.append(job)
    if batch:
        yield batch


def pieces(lengths: list[int], most: int) -> Iterator[tuple[int, int]]:
    """Sequences [first, end) that together have at most `most` tokens; a longer one is alone."""
    first, tokens = 0, 0
    for place, length in enumerate(lengths):
        if place > first and tokens + length > most:
            yield first, place
            first, tokens = place, 0
        tokens += length
    yield first, len(lengths)


class CapturingReplica(Replica):
    """A replica whose states go to shards behind the forward pass."""

    def __init__(self, model, layers: list[int], hidden_size: int):
        super().__init__(model, layers, hidden_size)
        self.offload = Offload(model.device)

    def fill(self, batch: list[Job], done: Callable[[Job], None]) -> None:
        """Captures a batch and sends it to its shards."""
        lengths = [len(job.record.input_ids) for job in batch]
        with torch.inference_mode():
            stored = states_to_store(
                *self.states([job.record.input_ids for job in batch]), batch[0].writer.layout.dtype
            )

        def write(first: int, end: int, on_cpu: dict[str, torch.Tensor]) -> None:
            begin = 0
            for job, length in zip(batch[first:end], lengths[first:end]):
                job.writer.write(job.row, on_cpu, begin, begin + length)
                begin += length
                done(job)

        # In pieces: a batch of a large target has a gigabyte of states, which one thread would
        # write while the others idle, and which would take as much pinned memory for each buffer.
        token_bytes, begin = sum(tensor.nbytes for tensor in stored.values()) // sum(lengths), 0
        for first, end in pieces(lengths, max(1, PIECE // token_bytes)):
            tokens = sum(lengths[first:end])
            self.offload.submit(
                {name: tensor[begin : begin + tokens] for name, tensor in stored.items()},
                partial(write, first, end),
            )
            begin += tokens


class TransformersCapture:
    """Captures on the CPU, or on all GPUs at once: a model and a thread for each, all taking from
    the same jobs.

    `last` is after the final norm: transformers applies it inside the model, and `lm_head(last)`
    are the logits."""

    last_is = "after_final_norm"

    def __init__(
        self,
        target: Target,
        layers: list[int],
        batch_tokens: int = 8192,
        models: list | None = None,
    ):
        self.batch_tokens = batch_tokens
        if models is None:
            models = [target.load_model()]
            for other in range(1, torch.cuda.device_count()):
                # "cuda" means the current one, and none holds two models for a moment.
                with torch.cuda.device(other):
                    models.append(target.load_model())
        self.replicas = [CapturingReplica(model, layers, target.hidden_size) for model in models]

    def batch(self, ids: list[list[int]]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """(`aux` [L, 3H], `last` [L, H]) of each sequence, on the CPU in the model's type, from one
        pass over all."""
        layers, last = self.replicas[0].states(ids)
        lengths = [len(sequence) for sequence in ids]
        return list(zip(torch.cat(layers, dim=-1).cpu().split(lengths), last.cpu().split(lengths)))

    def run(self, jobs: Iterator[Job], done: Callable[[Job], None]) -> None:
        """Fills all jobs. Raises the first error of any device, after the others have stopped."""
        lock, failed = threading.Lock(), []

        def window() -> list[Job]:
            with lock:
                taken, tokens = [], 0
                for job in () if failed else jobs:
                    taken.append(job)
                    tokens += len(job.record.input_ids)
                    if tokens >= WINDOW * self.batch_tokens:
                        break
                return taken

        def work(replica: CapturingReplica) -> None:
            try:
                if replica.offload.cuda:
                    torch.cuda.set_device(replica.model.device)
                while taken := window():
                    for batch in batches(taken, self.batch_tokens):
                        replica.fill(batch, done)
                replica.offload.drain()
            except BaseException as error:  # raised below
                failed.append(error)

        others = [threading.Thread(target=work, args=(replica,)) for replica in self.replicas[1:]]
        for thread in others:
            thread.start()
        work(self.replicas[0])
        for thread in others:
            thread.join()
        if failed:
            raise failed[0]
