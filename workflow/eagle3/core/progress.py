"""Progress of long work: bar, rate, time left. On a terminal one line is redrawn; elsewhere plain
lines appear."""

import sys
import time
from collections.abc import Iterable, Iterator
from typing import Any


def duration(seconds: float) -> str:
    """61 -> '1:01', 90061 -> '1 d 1:01:01'."""
    seconds = int(max(0, seconds))
    days, rest = divmod(seconds, 86400)
    hours, rest = divmod(rest, 3600)
    minutes, second = divmod(rest, 60)
    clock = f"{hours}:{minutes:02}:{second:02}" if hours or days else f"{minutes}:{second:02}"
    return f"{days} d {clock}" if days else clock


class Progress:
    """`with Progress("generate alpaca", total=48, unit="rows") as bar: bar.add(1, tokens=128)`.

    Rates are over this run, so work that was already done (`done=`) does not flatter them. Where
    `total` is None, because nobody knows it, there is no bar and no time left."""

    def __init__(
        self,
        label: str,
        total: int | None,
        unit: str,
        done: int = 0,
        every: float | None = None,
        stream=None,
    ):
        self.label, self.total, self.unit = label, total, unit
        self.done = self.began_at = done
        self.stream = stream or sys.stderr
        self.terminal = self.stream.isatty()
        self.every = every if every is not None else (0.2 if self.terminal else 10.0)
        self.start = self.last = time.monotonic()
        self.sums: dict[str, float] = {}
        self.notes: dict[str, str] = {}

    def __enter__(self):
        if self.terminal:  # in a log, what is quickly done leaves one line
            self._draw()
        return self

    def __exit__(self, kind, *_):
        self._draw(final=True)

    def add(self, count: int = 1, notes: dict[str, str] | None = None, **sums: float) -> None:
        """Counts `count` units; `sums` accumulate and are shown as rates, `notes` are shown as they
        are."""
        self.done += count
        for name, value in sums.items():
            self.sums[name] = self.sums.get(name, 0) + value
        self.notes.update(notes or {})
        if time.monotonic() - self.last >= self.every:
            self._draw()

    def _draw(self, final: bool = False) -> None:
        self.last = now = time.monotonic()
        elapsed = max(now - self.start, 1e-9)
        rate = (self.done - self.began_at) / elapsed
        head = self.label
        parts = [f"{self.done:,} {self.unit}"]
        if self.total is not None:
            share = self.done / self.total if self.total else 1.0
            filled = int(20 * min(share, 1))
            head += f" [{'█' * filled}{'·' * (20 - filled)}] {share:4.0%}"
            parts = [f"{self.done:,}/{self.total:,} {self.unit}"]
        if rate:
            parts.append(f"{rate:,.1f} {self.unit}/s")
        parts += [f"{value / elapsed:,.0f} {name}/s" for name, value in self.sums.items()]
        parts += [f"{name} {value}" for name, value in self.notes.items()]
        if final:
            parts.append(f"took {duration(elapsed)}")
        elif rate and self.total is not None:
            parts.append(f"{duration((self.total - self.done) / rate)} left")
        line = f"{head}  {', '.join(parts)}"
        end = "\n" if final or not self.terminal else ""
        self.stream.write(("\r\x1b[2K" if self.terminal else "") + line + end)
        self.stream.flush()


def counted(items: Iterable, label: str, total: int | None, unit: str) -> Iterator[Any]:
    """The items, with progress on the way."""
    with Progress(label, total, unit) as bar:
        for item in items:
            yield item
            bar.add()
