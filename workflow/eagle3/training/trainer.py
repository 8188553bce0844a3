"""The training loop: batches in a fixed order, validation by accept length, checkpoints that resume
exactly."""

import contextlib
import math
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from eagle3.core.errors import UserError
from eagle3.core.progress import Progress
from eagle3.drafter import acceptance as metrics
from eagle3.drafter.model import Drafter
from eagle3.hidden_states.shards import ShardSet
from eagle3.training import even_steps, loader, parallel
from eagle3.training.checkpoints import Checkpoints
from eagle3.training.objective import Objective
from eagle3.training.packing import packed_epoch
from eagle3.training.schedule import learning_rate
from eagle3.training.tracker import Trackers


@dataclass
class Progressed:
    """What a checkpoint holds besides weights: where the run is, and what it saw. `best`: the state
    that validated best."""

    update: int = 0
    history: list[dict[str, float]] = field(default_factory=list)
    best_length: float = -1.0
    best_update: int = 0
    best: dict[str, torch.Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Update:
    """One optimizer update as this process sees it: its share of the packed batches, and for all
    processes together the supervised positions per step [k], the tokens and the record ids."""

    number: int
    batches: list[Any]
    counts: torch.Tensor
    tokens: int
    names: list[str]


class Stop(KeyboardInterrupt):
    """SIGTERM or SIGINT came; the current update was finished and saved."""


class Trainer:
    """Trains `drafter` on `train` with the target's output projection `head` [V, H].

    Weights and optimizer state are fp32; products run in `params.dtype`. `start`: weights to begin
    with, after the drafter's own were validated. With several processes each takes every world-th
    of an update's `micro_batches` packed batches; the sums are the same whoever computes them."""

    def __init__(
        self,
        drafter: Drafter,
        head: torch.Tensor,
        train: ShardSet,
        validation: ShardSet,
        params,
        runtime,
        checkpoints: Checkpoints,
        log: Callable[[str], None],
        start: dict[str, torch.Tensor] | None = None,
        softcap: float | None = None,
    ):
        self.params, self.runtime, self.checkpoints, self.log = params, runtime, checkpoints, log
        self.start = start
        self.processes = parallel.Processes()
        self.device = self.processes.device
        self.train_set, self.validation = train, validation
        if not len(train):
            raise UserError(
                "no training sequences; lower records.validation_fraction or raise max_samples"
            )
        if params.micro_batches % self.processes.world:
            raise UserError(
                f"train.micro_batches is {params.micro_batches}, but {self.processes.world} "
                "processes share them "
                f"out; make it a multiple, or set runtime.nproc_per_node: 1"
            )
        self.drafter, self.objective = drafter, Objective(drafter, head, params, softcap)
        self.wrapped = self.processes.wrap(self.objective, runtime.parallel, ("hits",))
        self.weights = dict(drafter.named_parameters())
        self.optimizer = torch.optim.AdamW(
            self.weights.values(),
            lr=params.lr,
            betas=(0.9, 0.95),
            weight_decay=params.weight_decay,
            fused=self.device.type == "cuda",
        )
        self.fc_factors = (
            even_steps.factors(train[i] for i in range(len(train))).to(self.device)
            if params.fc_steps == "by_size"
            else None
        )
        per_epoch = [len(self._epoch(epoch)) for epoch in range(params.epochs)]
        self.total = min(sum(per_epoch), params.max_updates or sum(per_epoch))
        self.every = params.validate_every or per_epoch[0]
        self.leader = self.processes.rank == 0
        self.losses: list[float] = []  # since the last validation

    def _epoch(self, epoch: int) -> list[list[list[int]]]:
        """Indices by update and packed batch."""
        packed = packed_epoch(
            self.train_set.lengths, self.params.batch_tokens, self.params.seed, epoch
        )
        size = self.params.micro_batches
        return [packed[i : i + size] for i in range(0, len(packed), size)]

    def run(self) -> Progressed:
        """Trains to the end from wherever the last checkpoint stands. Raises UserError at a loss
        that is not finite, naming the records, before anything of it is saved, and Stop after a
        signal, with everything saved."""
        done = self._resume()
        trackers = Trackers(self.runtime.trackers if self.leader else [], self.params.model_dump())
        if done.update == 0:
            self._validate(done, [])
            if (
                self.start
            ):  # after the random weights, so that the curve shows what the start is worth
                parallel.load_weights(self.drafter, self.start)
                self._validate(done, [])
        losses = self.losses
        with Progress("train", self.total, "updates", done=done.update) as bar, _signals() as stop:
            # figures of the last update: read while the next one runs, so that the device never
            # waits
            waiting = None
            for update in self._updates(done.update):
                now = update, *self._step(update)
                if waiting:
                    self._settle(waiting, losses, done, bar, trackers)
                waiting = now
                count = update.number + 1
                validate = count % self.every == 0 or count == self.total
                stopping = self.processes.any(stop.is_set())
                save = stopping or count % self.runtime.checkpoint_every == 0 or count == self.total
                if validate or save:
                    self._settle(waiting, losses, done, bar, trackers)
                    waiting = None
                if validate:
                    self._validate(done, losses, now[-1])
                    trackers.log(
                        done.update, {k: v for k, v in done.history[-1].items() if v is not None}
                    )
                    losses.clear()
                if save:
                    self._save(done, losses)
                if stopping:
                    raise Stop(f"stopped at update {done.update} of {self.total}, which is saved")
        trackers.close()
        return done

    def _updates(self, start: int) -> Iterator[Update]:
        """Updates from `start` on, prepared ahead by threads, with their batches on the device."""
        reader, pin = loader.Reader(self.train_set), self.device.type == "cuda"
        rank, world = self.processes.rank, self.processes.world
        plan = [group for epoch in range(self.params.epochs) for group in self._epoch(epoch)][
            : self.total
        ]

        def prepare(item):
            number, part = item
            group = plan[number]
            rows = reader.rows(group[part]) if part < len(group) else []
            batch, counts = self.objective.prepare(rows, pin)
            return (number, counts, [row["id"] for row in rows]), batch

        parts = range(rank, self.params.micro_batches, world)
        items = ((number, part) for number in range(start, self.total) for part in parts)
        prepared = loader.on_device(
            loader.ahead(prepare, items, self.runtime.loader_threads), self.device
        )
        for number in range(start, self.total):
            found = [next(prepared) for _ in parts]
            counts = torch.stack([what[1] for what, _ in found]).sum(0).to(self.device)
            tokens = sum(self.train_set.lengths[i] for packed in plan[number] for i in packed)
            names = [name for what, _ in found for name in what[2]]
            yield Update(
                number, [batch for _, batch in found], self.processes.sum(counts), tokens, names
            )

    def _step(self, update: Update) -> tuple[torch.Tensor, torch.Tensor, float]:
        """(loss per step, hits per step) of all processes, still on the device, and the learning
        rate."""
        rate = learning_rate(
            update.number,
            self.total,
            self.params.lr,
            self.params.warmup_ratio,
            self.params.schedule,
        )
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        decay = self.params.decay ** torch.arange(len(update.counts), device=self.device)
        scale = decay / update.counts.clamp(min=1)
        self.optimizer.zero_grad(set_to_none=True)
        shares, hits = torch.zeros_like(scale), torch.zeros_like(scale)
        for place, batch in enumerate(update.batches):
            with self._exchange(last=place == len(update.batches) - 1):
                # Gradients are averaged over the processes; times their number they are the sum.
                loss, share, hit = self.wrapped(batch, scale * self.processes.world)
                loss.backward()
            shares += share.detach() / self.processes.world
            hits += hit
        torch.nn.utils.clip_grad_norm_(self.weights.values(), self.params.max_grad_norm)
        with even_steps.of(self.weights["fc.weight"], self.fc_factors):
            self.optimizer.step()
        return (
            self.processes.sum(shares),
            self.processes.sum(hits) / update.counts.clamp(min=1),
            rate,
        )

    def _exchange(self, last: bool):
        """Only the last packed batch of an update exchanges gradients between processes."""
        if self.processes.world == 1:
            return contextlib.nullcontext()
        if self.runtime.parallel == "ddp":
            return contextlib.nullcontext() if last else self.wrapped.no_sync()
        self.wrapped.set_requires_gradient_sync(last)
        return contextlib.nullcontext()

    def _settle(
        self,
        waiting: tuple,
        losses: list[float],
        done: Progressed,
        bar: Progress,
        trackers: Trackers,
    ) -> None:
        """Reads the figures of an update. Raises UserError if they say that training cannot go
        on."""
        update, shares, accuracy, rate = waiting
        if done.update > update.number:
            return
        loss, first = shares.sum().item(), update.counts[0].item()
        records = f"records in the batch: {', '.join(update.names[:8])}"
        if not first:
            raise UserError(
                f"update {update.number} has no supervised token; {records}. Look at their loss "
                "masks, or raise "
                "train.batch_tokens"
            )
        if not math.isfinite(loss):
            raise UserError(
                f"the loss of update {update.number} is {loss}; {records}. Lower train.lr, or "
                "look for broken "
                "states"
            )
        losses.append(loss)
        done.update = update.number + 1
        accuracy = accuracy.tolist()
        notes = {
            "loss": f"{loss:.3f}",
            "acc": " ".join(f"{a:.2f}" for a in accuracy),
            "best accept": f"{done.best_length:.2f}" if done.history else "-",
        }
        if self.leader:
            bar.add(1, notes, tokens=update.tokens)
            trackers.log(
                done.update,
                {"loss": loss, "lr": rate, **{f"acc_{k}": a for k, a in enumerate(accuracy)}},
            )

    def _validate(self, done: Progressed, losses: list[float], rate: float = 0.0) -> None:
        figures = self.measure()
        row = {
            "update": done.update,
            "loss": sum(losses) / len(losses) if losses else None,
            "lr": rate,
            "accept_length": figures["accept_length"],
            **{f"accuracy_{k}": a for k, a in enumerate(figures["accuracy"])},
            **{f"conditional_{k}": a for k, a in enumerate(figures["conditional"])},
        }
        done.history.append(row)
        if figures["accept_length"] > done.best_length:
            done.best_length, done.best_update = figures["accept_length"], done.update
            done.best = parallel.whole(self.drafter.state_dict())

    @torch.no_grad()
    def measure(self) -> dict[str, Any]:
        """Figures of the validation sequences (of the training ones where none are held out)."""
        data = self.validation if len(self.validation) else self.train_set
        groups = packed_epoch(data.lengths, self.params.batch_tokens, 0, 0)
        rank, world = self.processes.rank, self.processes.world
        reader, found = loader.Reader(data), []
        for place in range(rank, -(-len(groups) // world) * world, world):
            rows = reader.rows(groups[place]) if place < len(groups) else []
            batch, _ = self.objective.prepare(rows, pin=False)
            found.append(
                self.objective.hits(batch.to(self.device) if batch is not None else None).cpu()
            )
        return metrics.summarize(self.processes.collect(torch.cat(found)))

    def _save(self, done: Progressed, losses: list[float]) -> None:
        state = {
            "weights": parallel.whole(self.drafter.state_dict()),
            "optimizer": parallel.whole(self.optimizer.state_dict()),
            "losses": losses,
            "history": done.history,
            "best_length": done.best_length,
            "best_update": done.best_update,
            "best": done.best,
        }
        if self.leader:
            self.checkpoints.save(done.update, state)

    def _resume(self) -> Progressed:
        state = self.checkpoints.latest()
        if state is None:
            if other := self.checkpoints.other:
                more = f" and {len(other) - 4} more" if len(other) > 4 else ""
                self.log(
                    f"starts anew: {'; '.join(other[:4])}{more}. Put back, the earlier run goes "
                    "on where it was"
                )
            return Progressed()
        parallel.load_weights(self.drafter, state["weights"])
        parallel.load_optimizer(self.optimizer, state["optimizer"])
        self.losses = state["losses"]
        self.log(f"continues at update {state['update']} of {self.total}")
        return Progressed(
            state["update"],
            state["history"],
            state["best_length"],
            state["best_update"],
            state["best"],
        )


@contextlib.contextmanager
def _signals() -> Iterator[threading.Event]:
    """An event that SIGTERM and SIGINT set. An update is never interrupted half-way: its weights
    would be neither the old ones nor the new ones."""
    stop, before = threading.Event(), {}
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGTERM, signal.SIGINT):
            before[number] = signal.signal(number, lambda *_: stop.set())
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
