"""Curves of training outside the build's own files: TensorBoard, Weights & Biases."""

import os
from pathlib import Path
from typing import Any

from eagle3.core.errors import UserError

FOLDER = Path("logs/trackers")  # no stage's output: what it holds depends on the clock


class Trackers:
    """Numbers per update, for the trackers named in runtime.trackers; without a name it does
    nothing."""

    def __init__(self, names: list[str], settings: dict[str, Any], folder: Path = FOLDER):
        self.board = self.run = None
        try:
            if "tensorboard" in names:
                from torch.utils.tensorboard import SummaryWriter

                self.board = SummaryWriter(str(folder / "tensorboard"))
            if "wandb" in names:
                import wandb

                if not os.environ.get("WANDB_API_KEY"):
                    os.environ.setdefault("WANDB_MODE", "offline")
                folder.mkdir(parents=True, exist_ok=True)
                self.run = wandb.init(project="eaglemake", config=settings, dir=str(folder))
        except ImportError as error:
            package = "wandb" if "wandb" in str(error) else "tensorboard"
            raise UserError(
                f"runtime.trackers names {package}, which is not installed; `pip install "
                f"{package}` or take it "
                "out"
            ) from None

    def log(self, update: int, numbers: dict[str, float]) -> None:
        if self.board:
            for name, value in numbers.items():
                self.board.add_scalar(name, value, update)
        if self.run:
            self.run.log(numbers, step=update)

    def close(self) -> None:
        if self.board:
            self.board.close()
        if self.run:
            self.run.finish()
