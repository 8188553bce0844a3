"""python -m eagle3.build.gate STAGE: brings one stage up to date through DVC; the shell of every
rule.

It is `dvc --wait-for-lock repro --single-item STAGE`, with `--pull` where a remote is configured,
with six differences: dvc.lock is replaced by rename (DVC writes over it, and a kill then cuts it
off); inputs are recorded as they were when the stage began; outputs are linked into the cache, not
copied; what is linked from the cache is hashed first; the remote is asked about this stage alone;
and a remote that cannot be reached is a warning."""

import contextlib
import errno
import gc
import json
import os
import shutil
import sys
import time
from pathlib import Path

from dvc.config import Config
from dvc.exceptions import DvcException
from dvc.lock import LockError, make_lock
from dvc.repo import Repo, lock_repo
from dvc.stage.exceptions import StageCmdFailedError

from eagle3.build import links, objects, recording, remote

LEFT = "If no dvc and no other build runs here, one was killed: rm .dvc/tmp/lock"


def bring_up_to_date(name: str) -> None:
    """Raises DvcException if the stage fails."""
    repair_rwlock()
    recording.install()
    # A hard link is left by a kill, and who waits for it in DVC waits for good, without a word.
    wait = not Config(os.path.abspath(".dvc"))["core"].get("hardlink_lock")
    with Repo(_wait_for_lock=wait) as repo, lock_repo(repo):
        guard = objects.Guard(repo)
        stage = repo.stage.collect(name)[0]
        if not links.without_dangling(stage.changed):
            print(f"{name}: unchanged", flush=True)
            return
        guard.again = True
        if repo.config["core"].get("remote") and remote.reachable():
            remote.fetch(repo, guard, name)
        # What Repo.reproduce does with it; that would read dvc.yaml and dvc.lock once more.
        if stage.reproduce():
            guard.made(stage)
            stage.dump(update_pipeline=False)


def repair_rwlock() -> None:
    """Removes a list of path locks that a kill cut off; the guard beside it, held while it is
    written, shows that no one is writing it."""
    path = Path(".dvc/tmp/rwlock")
    if not path.exists():
        return
    with (
        contextlib.suppress(LockError),
        make_lock(f"{path}.lock", tmp_dir=str(path.parent), wait=False),
    ):
        try:
            json.loads(path.read_text() or "x")
        except FileNotFoundError:
            pass
        except ValueError:
            path.unlink()


def explained(name: str, causes: list[BaseException]) -> list[str]:
    """What is said of an error; of a stage that failed only how it ended, since the stage has said
    why."""
    for cause in causes:
        if isinstance(cause, StageCmdFailedError):
            return [f"{name}: {cause}"]
        if isinstance(cause, OSError) and cause.errno == errno.ENOSPC:
            free = shutil.disk_usage(".").free / 2**20
            return [
                f"error: no space left while {name} was recorded ({free:,.0f} MiB free here); "
                "finished work is kept: make "
                "room and run the same command again"
            ]
    return [f"error: {cause}" for cause in causes]


def main(name: str) -> int:
    """Waits while another DVC reads or writes this stage's files. An error is printed with its
    causes, exit code 1."""
    gc.disable()  # a process of a second, a tenth of which went into looking for garbage
    said = False
    while True:
        try:
            bring_up_to_date(name)
            return 0
        except (DvcException, OSError) as error:
            causes = list(remote.causes(error))
            if not any(isinstance(cause, LockError) for cause in causes):
                for line in explained(name, causes):
                    print(line, file=sys.stderr, flush=True)
                return 1
            if not said:
                print(f"{name}: waiting. {error}\n{LEFT}", flush=True)
            said = True
            time.sleep(2)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
