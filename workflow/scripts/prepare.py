"""prepare: turns the rows of a data set into prompts with ids."""

import _path  # noqa: F401, I001  (first: see there)
import argparse
import subprocess
import sys
from pathlib import Path

from eagle3.prompts import prompts
from eagle3.core import sources
from eagle3.core.progress import counted
from eagle3.prompts.chat_template import Renderer, probe
from eagle3.core.stage import main, running
from eagle3.target.model import Target


def build(arguments: argparse.Namespace) -> None:
    name = arguments.dataset
    with running(f"prepare@{name}", arguments.params, [arguments.target]) as stage:
        dataset, limits = stage.params.datasets[name], stage.params.prompts
        if stage.params.server.warm and dataset.answers == "generate":
            warm_server(arguments)
        renderer = Renderer(Target(arguments.target))
        rows = counted(
            sources.rows(dataset.source), f"prepare {name}", sources.count(dataset.source), "rows"
        )
        kept, rejects, stats = prompts.select(rows, dataset, limits, renderer)
        prompts.check_rejects(name, stats, rejects, limits.max_reject_rate)
        prompts.write(arguments.out, kept, rejects, {**stats, "template": probe(renderer)})
        reasons = ", ".join(f"{reason} {count}" for reason, count in stats["reasons"].items())
        stage.log(
            f"{stats['kept']} of {stats['usable']} usable prompts kept, {stats['rows']} rows read, "
            f"{stats['duplicates']} duplicates, {stats['rejected']} "
            f"rejected{f' ({reasons})' if reasons else ''}"
        )


def warm_server(arguments: argparse.Namespace) -> None:
    """Has the server start while rows become prompts. Not a dependency of anything: a program of
    its own, whose code is none of this stage's, and which does nothing where no build drives it or
    another engine answers."""
    subprocess.Popen(
        [
            sys.executable,
            Path(__file__).with_name("server.py"),
            "warm",
            "--params",
            arguments.params,
            "--target",
            arguments.target,
        ],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("dataset", help="name of a data set in params.yaml")
    parser.add_argument("--target", type=Path, default=Path("data/target"))
    parser.add_argument("--out", type=Path, required=True)
    main(parser, build)
