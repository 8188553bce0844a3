"""Training in several processes: who is who, DDP and FSDP2, and whole states of weights that are
shared out."""

import os
import subprocess
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from eagle3.core.errors import UserError


class Processes:
    """This process among `world`. One alone needs no process group, and every method is then the
    identity."""

    def __init__(self):
        self.rank, self.world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
        gpus = torch.cuda.device_count()
        local = int(os.environ.get("LOCAL_RANK", 0))
        if gpus and local >= gpus:
            raise UserError(
                f"runtime.nproc_per_node asks for GPU {local}, but there are {gpus}; set "
                f"runtime.nproc_per_node: {gpus}"
            )
        self.device = torch.device("cuda", local) if gpus else torch.device("cpu")
        if gpus:
            torch.cuda.set_device(self.device)
        if self.world > 1 and not dist.is_initialized():
            dist.init_process_group("nccl" if gpus else "gloo")

    def sum(self, tensor: Tensor) -> Tensor:
        """The sum over all processes, in place."""
        if self.world > 1:
            dist.all_reduce(tensor)
        return tensor

    def any(self, flag: bool) -> bool:
        """Whether the flag is up in any process."""
        return (
            flag
            if self.world == 1
            else bool(self.sum(torch.tensor([float(flag)], device=self.device)).item())
        )

    def collect(self, tensor: Tensor) -> Tensor:
        """Rows of all processes, one after the other, on the CPU."""
        if self.world == 1:
            return tensor.cpu()
        parts: list = [None] * self.world
        dist.all_gather_object(parts, tensor.cpu())
        return torch.cat(parts)

    def wrap(self, module: nn.Module, kind: str, methods: tuple[str, ...]) -> nn.Module:
        """`module` on this process's device, its gradients averaged over all; `methods` also run
        its weights."""
        module = module.to(self.device)
        if self.world == 1:
            return module
        if kind == "ddp":
            return nn.parallel.DistributedDataParallel(module, broadcast_buffers=False)
        from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method

        fully_shard(module)
        for method in methods:
            register_fsdp_forward_method(module, method)
        return module

    def wait(self) -> None:
        """Until all processes are here."""
        if self.world > 1:
            dist.barrier()

    def close(self) -> None:
        if self.world > 1 and dist.is_initialized():
            dist.destroy_process_group()


def whole(value: Any) -> Any:
    """A nested value with every tensor whole and on the CPU. All processes call it together."""
    if isinstance(value, Tensor):
        return (
            (value.full_tensor() if hasattr(value, "full_tensor") else value).detach().cpu().clone()
        )
    if isinstance(value, dict):
        return {key: whole(item) for key, item in value.items()}
    return [whole(item) for item in value] if isinstance(value, list) else value


def share_of(value: Tensor, like: Tensor) -> Tensor:
    """This process's share of a whole tensor, laid out as `like` is."""
    value = value.to(like.device)
    if not hasattr(like, "full_tensor"):
        return value
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(value, like.device_mesh, like.placements)


@torch.no_grad()
def load_weights(module: nn.Module, weights: dict[str, Tensor]) -> None:
    for name, parameter in module.named_parameters():
        parameter.copy_(share_of(weights[name], parameter))


def load_optimizer(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    shared = {
        i: {
            key: share_of(v, parameters[i]) if isinstance(v, Tensor) and v.dim() else v
            for key, v in entry.items()
        }
        for i, entry in state["state"].items()
    }
    optimizer.load_state_dict({**state, "state": shared})


def launch(script: str, arguments: list[str], processes: int) -> None:
    """Runs a script in several processes of this machine. Raises UserError if one of them fails."""
    group = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            f"--nproc-per-node={processes}",
            script,
            *arguments,
        ]
    )
    try:
        code = group.wait()
    except KeyboardInterrupt:  # each process finishes and saves its update
        group.terminate()
        group.wait()
        raise
    if code:
        raise UserError(
            f"one of {processes} training processes ended with an error (see above); exit code "
            f"{code}"
        )
