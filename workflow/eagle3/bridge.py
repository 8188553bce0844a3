"""Between Snakemake and DVC: key files for parameters, and the command that brings a stage up to date."""

import os
import shlex
import sys
from pathlib import Path

from eagle3 import params as parameters
from eagle3.files import write_text

KEYS = Path(".build/keys")


class Bridge:
    def __init__(self):
        self.params = parameters.load("params.yaml").model_dump()
        self.definitions = parameters.read_yaml("dvc.yaml")
        self.datasets = sorted(self.params["datasets"])
        # The stage's `python` must be the one that runs this, whether its environment is activated or not.
        folder = os.path.dirname(os.path.abspath(sys.executable))
        if folder not in os.environ["PATH"].split(os.pathsep):
            os.environ["PATH"] = folder + os.pathsep + os.environ["PATH"]
        self.gate = f"{shlex.quote(sys.executable)} -m dvc --wait-for-lock repro --single-item"

    def stages(self) -> list[str]:
        """Every stage by DVC's name: 'train', 'prepare@alpaca', …"""
        return [name if "foreach" not in definition else f"{name}@{dataset}"
                for name, definition in self.definitions["stages"].items()
                for dataset in (self.datasets if "foreach" in definition else [""])]

    def write_keys(self) -> None:
        """Writes each stage's parameter slice to its key file, if it changed: so a key file's age is the slice's."""
        for stage in self.stages():
            slices = parameters.stage_slices(stage, self.definitions, self.params)
            text = parameters.slice_text(self.params, slices) + "\n"
            path = KEYS / f"{stage}.json"
            if not path.exists() or path.read_text() != text:
                write_text(path, text)

    def remember(self) -> None:
        pass


def open_bridge(exec_mode) -> Bridge:
    bridge = Bridge()
    bridge.write_keys()
    return bridge
