"""From the device to files without stopping the forward pass: pinned buffers, a stream of its own,
writer threads.

Needs torch only: the transformers capture and the hook inside the SGLang server share it.
"""

import queue
import threading
from collections.abc import Callable

import torch

from eagle3.hidden_states import fp8
from eagle3.hidden_states.layout import block_of


def states_to_store(
    layers: list[torch.Tensor], last: torch.Tensor, dtype: str
) -> dict[str, torch.Tensor]:
    """What a shard keeps of captured states, `layers` three [T, H] or one [T, 3H], by region, and
    `bad` bool [T, 4]: which layers hold NaN or inf.

    Runs in the server's scheduler thread, so it makes few calls: the largest magnitude is NaN or
    inf if any number is."""
    block = block_of(last.shape[-1])
    aux = torch.cat(layers, dim=-1)  # [T, 3H], our own: the engine may use its tensors again
    largest = torch.cat(
        [aux.unflatten(-1, (3, -1)).abs().amax(-1), last.abs().amax(-1, keepdim=True)], dim=-1
    )  # [T, 4]
    found = {"bad": ~torch.isfinite(largest)}
    for name, states in (("aux", aux), ("last", last)):
        found[name], scales = fp8.stored(states, dtype, block)
        if scales is not None:
            found[f"{name}_scales"] = scales
    return found


class Offload:
    """Copies device tensors to the CPU behind the forward pass and hands them to writer threads.

    At most `buffers` sets of tensors are under way; `submit` waits for a free one, which keeps
    memory bounded."""

    def __init__(self, device: torch.device, buffers: int = 4):
        self.cuda = torch.device(device).type == "cuda"
        self.stream = torch.cuda.Stream(device) if self.cuda else None
        self.free: queue.Queue = queue.Queue()
        self.work: queue.Queue = queue.Queue()
        self.failed: BaseException | None = None
        for _ in range(buffers):
            self.free.put(None)  # pinned memory is allocated at the first use
            threading.Thread(target=self._write, name="write-states", daemon=True).start()

    def submit(
        self, tensors: dict[str, torch.Tensor], write: Callable[[dict[str, torch.Tensor]], None]
    ) -> None:
        """Calls `write` with the tensors on the CPU, in a writer thread. Raises what an earlier
        `write` raised."""
        buffer = self.free.get()
        if self.failed:
            self.free.put(buffer)
            raise self.failed
        if not self.cuda:
            self.work.put((None, buffer, tensors, write))
            return
        needed = sum(-(-t.nbytes // 256) * 256 for t in tensors.values())
        if buffer is None or len(buffer) < needed:
            buffer = None  # freed before the larger one is made
            buffer = torch.empty(needed, dtype=torch.uint8, pin_memory=True)
        self.stream.wait_stream(torch.cuda.current_stream(self.stream.device))
        on_cpu, place = {}, 0
        with torch.cuda.stream(self.stream):
            for name, tensor in tensors.items():
                on_cpu[name] = (
                    buffer[place : place + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
                )
                on_cpu[name].copy_(tensor, non_blocking=True)
                tensor.record_stream(self.stream)
                place += -(-tensor.nbytes // 256) * 256
            copied = torch.cuda.Event(blocking=True)  # who waits for it sleeps
            copied.record(self.stream)
        self.work.put((copied, buffer, on_cpu, write))

    def drain(self) -> None:
        """Waits for everything submitted. Raises what a `write` raised."""
        self.work.join()
        if self.failed:
            raise self.failed

    def _write(self) -> None:
        while True:
            copied, buffer, tensors, write = self.work.get()
            try:
                if copied is not None:
                    copied.synchronize()
                write(tensors)
            except BaseException as error:  # raised again where the work was submitted
                self.failed = self.failed or error
            finally:
                del tensors, write
                self.free.put(buffer)
                self.work.task_done()
