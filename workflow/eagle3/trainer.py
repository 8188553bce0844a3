"""The training loop: batches in a fixed order, validation by accept length, checkpoints that resume exactly."""

import math
from dataclasses import dataclass, field
from typing import Any, Callable

import torch

from eagle3 import metrics, ttt
from eagle3.checkpoints import Checkpoints
from eagle3.drafter import Drafter
from eagle3.errors import Refusal
from eagle3.packing import packed_epoch
from eagle3.progress import Progress
from eagle3.shards import ShardSet


def learning_rate(update: int, total: int, peak: float, warmup_share: float) -> float:
    """Linear rise over the first share of updates, then a cosine to zero. `update` counts from 0."""
    warmup = max(1, round(total * warmup_share))
    if update < warmup:
        return peak * (update + 1) / warmup
    return peak * 0.5 * (1 + math.cos(math.pi * (update - warmup) / max(1, total - warmup)))


@dataclass
class Progressed:
    """What a checkpoint holds besides weights: where the run is, and what it saw. `best` is the state that validated best."""

    update: int = 0
    history: list[dict[str, float]] = field(default_factory=list)
    best_length: float = -1.0
    best_update: int = 0
    best: dict[str, torch.Tensor] = field(default_factory=dict)


class Trainer:
    """Trains `drafter` on `train` with the target's output projection `head` [V, H].

    Weights and optimizer state are fp32; products run in `params.dtype`.
    """

    def __init__(self, drafter: Drafter, head: torch.Tensor, train: ShardSet, validation: ShardSet, params, runtime,
                 checkpoints: Checkpoints, say: Callable[[str], None]):
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.drafter, self.head = drafter.to(self.device), head.to(self.device)
        self.draft_head = self.head[self.drafter.draft_ids]
        self.train_set, self.validation = train, validation
        self.params, self.runtime, self.checkpoints, self.say = params, runtime, checkpoints, say
        if not len(train):
            raise Refusal("no training sequences; lower records.validation_share or raise max_samples")
        self.optimizer = torch.optim.AdamW(drafter.parameters(), lr=params.lr, betas=(0.9, 0.95),
                                           weight_decay=params.weight_decay)
        per_epoch = [len(self._epoch(epoch)) for epoch in range(params.epochs)]
        self.total = min(sum(per_epoch), params.max_updates or sum(per_epoch))
        self.every = params.validate_every or per_epoch[0]

    def _epoch(self, epoch: int) -> list[list[int]]:
        return packed_epoch(self.train_set.lengths, self.params.batch_tokens, self.params.seed, epoch)

    def run(self) -> Progressed:
        """Trains to the end from wherever the last checkpoint stands."""
        done = self._resume()
        if done.update == 0:
            self._validate(done, [])
        losses: list[float] = []
        with Progress("train", self.total, "updates", done=done.update) as bar:
            for update, batch in self._batches(done.update):
                loss, figures, rate = self._update(update, batch)
                losses.append(loss)
                done.update = update + 1
                notes = {"loss": f"{loss:.3f}", "acc": " ".join(f"{a:.2f}" for a in figures["accuracy"]),
                         "accept": f"{done.history[-1]['accept_length']:.2f}" if done.history else "-"}
                bar.add(1, notes, tokens=len(batch.ids))
                if done.update % self.every == 0 or done.update == self.total:
                    self._validate(done, losses, rate)
                    losses.clear()
                if done.update % self.runtime.checkpoint_every == 0 or done.update == self.total:
                    self._save(done)
        return done

    def _batches(self, start: int):
        update = 0
        for epoch in range(self.params.epochs):
            for indices in self._epoch(epoch):
                if update >= self.total:
                    return
                if update >= start:
                    yield update, ttt.collate([self.train_set[i] for i in indices]).to(self.device)
                update += 1

    def _update(self, update: int, batch: ttt.Batch) -> tuple[float, dict, float]:
        rate = learning_rate(update, self.total, self.params.lr, self.params.warmup_share)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        with self._compute():
            loss, figures = ttt.loss(self.drafter, batch, self.draft_head, self.params.steps, self.params.decay)
        value = loss.item()
        if not math.isfinite(value):
            raise Refusal(f"the loss of update {update} is {value}; records in the batch: {', '.join(batch.names[:8])}. "
                          "Lower train.lr, or look for broken states")
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.drafter.parameters(), self.params.clip)
        self.optimizer.step()
        return value, figures, rate

    def _compute(self):
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.params.dtype == "bfloat16")

    def _validate(self, done: Progressed, losses: list[float], rate: float = 0.0) -> None:
        figures = self.measure()
        row = {"update": done.update, "loss": sum(losses) / len(losses) if losses else None, "lr": rate,
               "accept_length": figures["accept_length"],
               **{f"accuracy_{k}": a for k, a in enumerate(figures["accuracy"])},
               **{f"conditional_{k}": a for k, a in enumerate(figures["conditional"])}}
        done.history.append(row)
        if figures["accept_length"] > done.best_length:
            done.best_length, done.best_update = figures["accept_length"], done.update
            done.best = {name: t.detach().cpu().clone() for name, t in self.drafter.state_dict().items()}

    @torch.no_grad()
    def measure(self) -> dict[str, Any]:
        """Figures of the validation sequences (of the training ones where none are held out)."""
        data = self.validation if len(self.validation) else self.train_set
        found = []
        for indices in packed_epoch(data.lengths, self.params.batch_tokens, 0, 0):
            batch = ttt.collate([data[i] for i in indices]).to(self.device)
            with self._compute():
                best = ttt.target_choices(batch, self.head)
                found.append(ttt.hits(self.drafter, batch, best, self.params.steps))
        return metrics.summarize(torch.cat(found))

    def _save(self, done: Progressed) -> None:
        self.checkpoints.save(done.update, {
            "weights": self.drafter.state_dict(), "optimizer": self.optimizer.state_dict(), "history": done.history,
            "best_length": done.best_length, "best_update": done.best_update, "best": done.best})

    def _resume(self) -> Progressed:
        if self.checkpoints.other:
            self.say(f"checkpoints of another run are set aside: {'; '.join(self.checkpoints.other)[:500]}")
        state = self.checkpoints.latest()
        if state is None:
            return Progressed()
        self.drafter.load_state_dict(state["weights"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.say(f"continues at update {state['update']} of {self.total}")
        return Progressed(state["update"], state["history"], state["best_length"], state["best_update"], state["best"])
