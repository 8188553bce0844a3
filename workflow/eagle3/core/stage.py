"""What every stage does around its work: parameters, lock, watchdog, unchanged inputs and code,
clear endings."""

import argparse
import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from eagle3.core import orphans
from eagle3.core import params as parameters
from eagle3.core.code import code_files
from eagle3.core.dvc_cache import check_mounted, drop_damaged
from eagle3.core.errors import UserError
from eagle3.core.process import exclusive, watch_ancestors
from eagle3.core.progress import duration

WORK = Path(".work")
STARTED = (
    "started.log"  # in WORK: one line per stage process that began its work, "SECONDS PID STAGE"
)


class Stage:
    """Handed to a stage's body: `params` (only the declared slices), `work` (folder for unfinished
    work)."""

    def __init__(self, name: str, params_path: str | Path):
        self.name = name
        self.key = name.partition("@")[2]
        full = parameters.load(params_path)
        slices = parameters.stage_slices(name, parameters.read_yaml("dvc.yaml"), full.model_dump())
        self.params = parameters.Declared(full, name, slices)
        self.slices = slices
        self.work = WORK / name.replace("@", "/")

    def log(self, text: str) -> None:
        print(f"{self.name}: {text}", file=sys.stderr, flush=True)


@contextlib.contextmanager
def running(name: str, params_path: str | Path, inputs: list[str | Path]) -> Iterator[Stage]:
    """Runs a stage's body. Raises UserError if an input is missing, or it or the code was changed
    while the body ran.

    The second would let DVC record an output beside inputs that did not make it.
    """
    watch_ancestors()
    _clear_away(name, sorted(parameters.load(params_path).datasets), inputs)
    if damaged := drop_damaged(inputs):
        raise UserError(
            f"{', '.join(map(str, damaged[:5]))}: the file in DVC's cache was damaged, and is "
            "removed; run the same command again, and it is made anew"
        )
    files = [Path(params_path), *map(Path, inputs)]
    code = code_files(name, parameters.read_yaml("dvc.yaml"))
    before = _stamps(files) | _contents(code)
    _check_unchanged(name, [file for file in code if os.stat(file).st_ctime_ns > _began()])
    stage = Stage(name, params_path)
    with exclusive(stage.work, f"stage {name}"):
        with open(WORK / STARTED, "a") as log:
            log.write(f"{time.time():.0f} {os.getpid()} {name}\n")
        started = time.monotonic()
        yield stage
        after = _stamps(files) | _contents(code)
        changed = sorted(
            str(path)
            for path in before.keys() | after.keys()
            if before.get(path) != after.get(path)
        )
        if changed != [str(params_path)] or not _same_slices(stage, params_path):
            _check_unchanged(name, changed)
        stage.log(f"done in {duration(time.monotonic() - started)}")


def _clear_away(name: str, datasets: list[str], inputs: list[str | Path]) -> None:
    """Raises UserError for files of nobody's that DVC, called without Snakemake, counted as
    inputs."""
    found = orphans.entries(datasets, inputs)
    removed = orphans.remove(found)
    for path in removed:
        print(
            f"{name}: removed {path}: params.yaml no longer has this data set",
            file=sys.stderr,
            flush=True,
        )
    left = {path for path in found if path not in removed}
    if seen := sorted(
        left.intersection(orphans.ignore(orphans.strangers(datasets)) if left else ())
    ):
        raise UserError(
            f"{', '.join(map(str, seen[:5]))}: of no data set in params.yaml and made by no build; "
            "left there, and named in data/.dvcignore, so that it decides nothing: run the same "
            "command again"
        )


def _check_unchanged(name: str, files: list[str]) -> None:
    if files:
        raise UserError(
            f"{', '.join(files[:5])} changed while stage {name} ran, so its result would belong "
            "to neither version; "
            "run the same command again"
        )


def _stamps(paths: list[Path]) -> dict[Path, tuple]:
    """Identity of every file in `paths` (folders are walked): inode, size and time of the real
    file."""
    stamps = {}
    for path in paths:
        check_mounted(path)
        if not path.exists():
            raise UserError(f"{path} is missing; `snakemake --cores all {path}` builds it")
        files = sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path]
        for file in files:
            stat = file.stat()
            stamps[file] = (stat.st_ino, stat.st_size, stat.st_mtime_ns)
    return stamps


def _began() -> int:
    """When this script began to import its code; the imports take seconds, in which a file may be
    edited."""
    return getattr(sys.modules.get("_path"), "BEGAN", time.time_ns())


def _contents(files: list[str]) -> dict[Path, bytes]:
    """Small files are compared as they are: a checkout of another branch and back changes times
    only."""
    return {Path(file): Path(file).read_bytes() for file in files if os.path.exists(file)}


def _same_slices(stage: Stage, params_path: str | Path) -> bool:
    """An edit of params.yaml during a long run is fine as long as it leaves this stage's slices
    alone."""
    try:
        now = parameters.load(params_path).model_dump()
    except UserError:
        return False
    before = parameters.slice_text(stage.params._value.model_dump(), stage.slices)
    return parameters.slice_text(now, stage.slices) == before


def main(parser: argparse.ArgumentParser, body: Callable[[argparse.Namespace], None]) -> None:
    """Parses the command line and runs `body`; a UserError becomes one sentence on stderr and exit
    code 1."""
    parser.add_argument(
        "--params", default="params.yaml", help="parameter file (default: params.yaml)"
    )
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, _terminated)
    try:
        body(arguments)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        sys.exit(1)
    except KeyboardInterrupt:
        print(
            "interrupted; finished work is kept, the same command continues it",
            file=sys.stderr,
            flush=True,
        )
        sys.exit(130)


def _terminated(*_):
    raise KeyboardInterrupt
