"""Batches ahead of time: threads read shards, work out layouts and pin memory while the device
computes."""

import copy
import itertools
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from eagle3.hidden_states.shards import ShardSet


class Reader:
    """Rows of a ShardSet for several threads: each has its own open files."""

    def __init__(self, data: ShardSet):
        self.data, self.local = data, threading.local()

    def rows(self, indices: list[int]) -> list[dict[str, Any]]:
        if not hasattr(self.local, "data"):
            self.local.data = copy.copy(
                self.data
            )  # its open files are left out, as for worker processes
        return [self.local.data[i] for i in indices]


def ahead(work: Callable[[Any], Any], items: Iterable[Any], threads: int) -> Iterator[Any]:
    """`work` of each item, in order, up to `threads` + 1 of them in advance. With 0 threads
    everything happens here."""
    if not threads:
        yield from map(work, items)
        return
    items = iter(items)
    with ThreadPoolExecutor(threads, thread_name_prefix="loader") as pool:
        waiting = deque(pool.submit(work, item) for item in itertools.islice(items, threads + 1))
        try:
            while waiting:
                result = waiting.popleft().result()
                for item in itertools.islice(items, 1):
                    waiting.append(pool.submit(work, item))
                yield result
        finally:
            for future in waiting:
                future.cancel()


def on_device(
    batches: Iterable[tuple[Any, Any]], device: torch.device
) -> Iterator[tuple[Any, Any]]:
    """(anything, layout or None) pairs with the layout on the device. On a GPU the copy of the next
    one runs on a stream of its own, beside the work on this one."""
    if device.type != "cuda":
        for what, layout in batches:
            yield what, None if layout is None else layout.to(device)
        return
    stream = torch.cuda.Stream(device)
    waiting: deque = deque()
    for what, layout in batches:
        moved = copied = None
        if layout is not None:
            with torch.cuda.stream(stream):
                moved, copied = layout.to(device), stream.record_event()
        waiting.append(
            (what, layout, moved, copied)
        )  # the pinned original lives until its copy is used
        if len(waiting) > 1:
            yield _arrived(waiting.popleft(), device)
    while waiting:
        yield _arrived(waiting.popleft(), device)


def _arrived(entry: tuple, device: torch.device) -> tuple[Any, Any]:
    what, _, moved, copied = entry
    if moved is not None:
        current = torch.cuda.current_stream(device)
        current.wait_event(copied)
        for tensor in vars(moved).values():
            if isinstance(tensor, torch.Tensor):
                tensor.record_stream(current)
    return what, moved
