"""What the remote has for one stage. Others may write to it: what comes from there is hashed, and
stays inside the folders of the artifact. A remote that cannot be reached is a warning, and is not
tried again for a while."""

import os
import time
from collections.abc import Iterator
from pathlib import Path

from dvc.lock import LockError
from dvc.repo import Repo, lock_repo

from eagle3.build.objects import Guard, HostileListing

# Stages that take over rows of their earlier artifact: it is fetched if only the remote has it.
REUSES = ("generate", "extract")
UNREACHABLE, PATIENCE = (
    Path(".build/remote-unreachable"),
    600.0,
)  # seconds in which the remote is not tried again


def reachable() -> bool:
    try:
        return not 0 <= time.time() - UNREACHABLE.stat().st_mtime < PATIENCE
    except FileNotFoundError:
        return True


def fetch(repo: Repo, guard: Guard, name: str) -> None:
    """Brings from the remote what this stage needs: its recorded output, or one that somebody made
    of the same inputs. Raises HostileListing."""
    try:
        with lock_repo(repo):
            stage = repo.stage.collect(name)[0]
            if not stage.changed(allow_missing=True):
                print(f"{name}: fetching the recorded result from the remote", flush=True)
                _fetch(repo, guard, stage)
            elif entry := _run_cache_entry(repo, stage):
                print(f"{name}: fetching a result of the same inputs from the remote", flush=True)
                _fetch(repo, guard, repo.stage_cache._create_stage(entry, wdir=stage.wdir))
            elif name.partition("@")[0] in REUSES and all(out.hash_info for out in stage.outs):
                if any(out.changed_cache() for out in stage.outs):
                    print(f"{name}: fetching its earlier rows from the remote", flush=True)
                    _fetch(repo, guard, stage)
    except (LockError, HostileListing):
        raise
    except Exception as error:  # each kind of remote raises its own
        UNREACHABLE.parent.mkdir(exist_ok=True)
        UNREACHABLE.touch()
        print(
            f"warning: {name}: the remote gave nothing ({_first_line(error)}); building without it",
            flush=True,
        )


def fetch_outputs(repo: Repo, guard: Guard, stage) -> list[str]:
    """Fetches a stage's outputs and hashes all that came; returns digests of what was damaged. The
    listings come first, since what one names counts only if it is the recorded one."""
    listings = {out.hash_info for out in stage.outs if out.hash_info}
    repo.cloud.pull(listings)
    damaged = guard.damaged(stage)
    if all(repo.cache.local.exists(listing.value) for listing in listings if listing.isdir):
        for objects in stage.get_used_objs().values():
            repo.cloud.pull(objects)
        damaged += guard.damaged(stage)
    return damaged


def _fetch(repo: Repo, guard: Guard, stage) -> None:
    for oid in fetch_outputs(repo, guard, stage):
        print(
            f"warning: {stage.addressing}: {oid[:8]} is damaged in the remote, and not taken",
            flush=True,
        )


def _run_cache_entry(repo: Repo, stage) -> dict | None:
    """What the run cache, here or in the remote, has for a stage's present command, dependencies
    and parameters."""
    from dvc.stage.cache import _can_hash, _get_stage_hash

    for dep in stage.deps:
        if not dep.exists:
            return None
    stage.save_deps()
    if not _can_hash(stage):
        return None
    cache, key = repo.stage_cache, _get_stage_hash(stage)
    if not cache._load(stage):
        remote = repo.cloud.get_remote_odb(None, "fetch --run-cache", hash_name="md5-dos2unix")
        folder = remote.fs.join(remote.path, "runs", key[:2], key)
        for file in remote.fs.find(folder) if remote.fs.exists(folder) else []:
            local = os.path.join(cache._get_cache_dir(key), remote.fs.name(file))
            os.makedirs(os.path.dirname(local), exist_ok=True)
            remote.fs.get_file(file, f"{local}.tmp")
            os.replace(f"{local}.tmp", local)
    return cache._load(stage)


def _first_line(error: BaseException) -> str:
    said = [str(cause).strip() for cause in causes(error)]
    return next((text.splitlines()[0] for text in said if text), type(error).__name__)


def causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__
