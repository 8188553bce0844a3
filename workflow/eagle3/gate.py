"""python -m eagle3.gate STAGE: brings one stage up to date through DVC; the shell of every rule.

It is `dvc --wait-for-lock repro --single-item STAGE`, with `--pull` where a remote is configured, with six differences:
dvc.lock is replaced by rename (DVC writes over it, and a kill then cuts it off); a remote that cannot be reached is a
warning; the remote is asked about this stage alone; outputs are linked into the cache, not copied; a cached file
that was written through its link is not trusted; and inputs are recorded as they were when the stage began.
"""

import contextlib
import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import dvc.dvcfile
import dvc.output
import dvc.stage.run
from dvc.exceptions import DvcException
from dvc.lock import LockError
from dvc.repo import Repo, lock_repo

from eagle3.sync import without_dangling

# Stages that take over rows of their earlier artifact: it is fetched if only the remote has it.
REUSES = ("generate", "extract")
UNREACHABLE, PATIENCE = Path(".build/remote-unreachable"), 600.0  # seconds in which the remote is not tried again


@contextlib.contextmanager
def replacing_yaml(path, fs=None):
    """Stands in for DVC's `modify_yaml`: yields the content of dvc.lock, and replaces the file by rename.

    Only stages that were set are written anew, by DVC's own writer: for all of them it takes seconds.
    """
    from dvc.utils.serialize import dumps_yaml, load_yaml

    content = load_yaml(path) if os.path.exists(path) else {}
    before = dict(content.get("stages", {}))
    yield content
    stages = content.pop("stages", {})
    blocks = _blocks(Path(path).read_text(encoding="utf-8") if before else "")
    for name, stage in stages.items():
        if stage is not before.get(name):
            blocks[name] = dumps_yaml({"stages": {name: stage}}).removeprefix("stages:\n")
    temporary = f"{path}.{os.getpid()}.tmp"
    with open(temporary, "w", encoding="utf-8") as file:
        file.write(dumps_yaml(content) + "stages:\n" + "".join(blocks.values()))
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def _blocks(text: str) -> dict[str, str]:
    """The text of each stage of a dvc.lock, by its name: what stands under `stages:` from one name to the next."""
    found: dict[str, str] = {}
    name = None
    for line in text.partition("\nstages:\n")[2].splitlines(keepends=True):
        if line.startswith("  ") and line[2] not in " -" and line.rstrip().endswith(":"):
            name = line.strip()[:-1].strip("'\"")
            found[name] = ""
        elif not line.startswith(" "):
            break
        found[name] += line
    return found


_transfer = dvc.output.otransfer


def _linking(*args, **kwargs):
    """Stands in for DVC's transfer of an output to its cache, which would copy it: the file gets its second name there,
    and DVC then puts a symbolic link in the place of the first."""
    return _transfer(*args, **{**kwargs, "hardlink": True})


_run_command = dvc.stage.run.cmd_run


def _holding_to_its_inputs(stage, **kwargs) -> None:
    """Stands in for DVC's run of a stage's command. DVC records inputs as they are when the command has ended, so one
    edited after the stage's own last look at it would be recorded beside a result that it had no part in."""
    used = {dep.def_path: dep.hash_info for dep in stage.deps}
    _run_command(stage, **kwargs)

    def save_deps(**kwargs) -> None:
        type(stage).save_deps(stage, **kwargs)
        if changed := [dep.def_path for dep in stage.deps if dep.hash_info != used[dep.def_path]]:
            raise DvcException(f"{', '.join(changed[:5])} changed while stage {stage.addressing} ran, so its result would "
                               "belong to neither version; run the same command again")

    stage.save_deps = save_deps


def bring_up_to_date(name: str) -> None:
    """Raises DvcException if the stage fails."""
    repair_rwlock()
    dvc.dvcfile.modify_yaml = replacing_yaml
    dvc.output.otransfer = _linking
    dvc.stage.run.cmd_run = _holding_to_its_inputs
    with Repo(_wait_for_lock=True) as repo:
        with lock_repo(repo):
            stage = repo.stage.collect(name)[0]
            changed = without_dangling(stage.changed)
            if changed:
                drop_damaged(repo, stage)
        if not changed:
            print(f"{name}: unchanged", flush=True)
            return
        if repo.config["core"].get("remote") and _reachable():
            fetch(repo, name)
        repo.reproduce([name], single_item=True)


def fetch(repo: Repo, name: str) -> None:
    """Brings from the remote what this stage needs: its recorded output, or one that somebody made of the same inputs."""
    try:
        with lock_repo(repo):
            stage = repo.stage.collect(name)[0]
            if not stage.changed(allow_missing=True):
                print(f"{name}: fetching the recorded result from the remote", flush=True)
                repo.fetch([name])
            elif entry := _run_cache_entry(repo, stage):
                print(f"{name}: fetching a result of the same inputs from the remote", flush=True)
                for objects in repo.stage_cache._create_stage(entry, wdir=stage.wdir).get_used_objs().values():
                    repo.cloud.pull(objects)
            elif name.partition("@")[0] in REUSES and all(out.hash_info for out in stage.outs):
                if any(out.changed_cache() for out in stage.outs):
                    print(f"{name}: fetching its earlier rows from the remote", flush=True)
                    repo.fetch([name])
    except LockError:
        raise
    except Exception as error:  # each kind of remote raises its own
        UNREACHABLE.parent.mkdir(exist_ok=True)
        UNREACHABLE.touch()
        print(f"warning: {name}: the remote gave nothing ({_first_line(error)}); building without it", flush=True)


def _run_cache_entry(repo: Repo, stage) -> dict | None:
    """What the run cache, here or in the remote, has for a stage's present command, dependencies and parameters."""
    from dvc.stage.cache import _can_hash, _get_stage_hash

    for dep in stage.deps:
        if not dep.exists:
            return None
    stage.save_deps()
    if not _can_hash(stage):
        return None
    cache = repo.stage_cache
    if not cache._load(stage):
        key = _get_stage_hash(stage)
        remote = repo.cloud.get_remote_odb(None, "fetch --run-cache", hash_name="md5-dos2unix")
        folder = remote.fs.join(remote.path, "runs", key[:2], key)
        for file in remote.fs.find(folder) if remote.fs.exists(folder) else []:
            local = os.path.join(cache._get_cache_dir(key), remote.fs.name(file))
            os.makedirs(os.path.dirname(local), exist_ok=True)
            remote.fs.get_file(file, f"{local}.tmp")
            os.replace(f"{local}.tmp", local)
    return cache._load(stage)


def drop_damaged(repo: Repo, stage) -> None:
    """Removes from the cache what no longer is what its name says: an output edited in place, through its link.

    DVC takes a read-only file of its cache at its word, would link the damaged one again, and record it as the result.
    Only objects changed since DVC last saw them are read.
    """
    for out in stage.outs:
        path = Path(out.fs_path)
        for file in ([path] if path.is_symlink() else path.rglob("*") if path.is_dir() else []):
            target = Path(os.path.realpath(file))
            if file.is_symlink() and target.is_file() and Path(repo.cache.local.path) in target.parents:
                _drop_if_damaged(repo, target)


def _drop_if_damaged(repo: Repo, path: Path) -> None:
    from dvc_data.hashfile.hash import file_md5

    named = path.parent.name + path.name
    _, known = repo.state.get(str(path), repo.cache.local.fs)
    if known is None and file_md5(str(path), repo.cache.local.fs) != named:
        print(f"{path.name[:8]}: changed inside the cache by an edit of the file linked to it; discarded", flush=True)
        path.chmod(0o644)
        path.unlink()


def repair_rwlock() -> None:
    """Removes a list of path locks that a kill cut off; the guard beside it, held while it is written, shows that no
    one is writing it."""
    path = Path(".dvc/tmp/rwlock")
    if not path.exists():
        return
    from dvc.lock import make_lock

    with contextlib.suppress(LockError), make_lock(f"{path}.lock", tmp_dir=str(path.parent), wait=False):
        try:
            json.loads(path.read_text() or "x")
        except FileNotFoundError:
            pass
        except ValueError:
            path.unlink()


def _reachable() -> bool:
    return not (UNREACHABLE.exists() and time.time() - UNREACHABLE.stat().st_mtime < PATIENCE)


def _first_line(error: BaseException) -> str:
    said = [str(cause).strip() for cause in _causes(error)]
    return next((text.splitlines()[0] for text in said if text), type(error).__name__)


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__


def main(name: str) -> int:
    """Waits while another DVC reads or writes this stage's files; an error is printed with its causes, exit code 1."""
    said = False
    while True:
        try:
            bring_up_to_date(name)
            return 0
        except DvcException as error:
            if not any(isinstance(cause, LockError) for cause in _causes(error)):
                for cause in _causes(error):
                    print(f"error: {cause}", file=sys.stderr, flush=True)
                return 1
            if not said:
                print(f"{name}: waiting. {error}", flush=True)
            said = True
            time.sleep(2)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
