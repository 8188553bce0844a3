"""How the gate has DVC record a stage: dvc.lock by rename, inputs as they were at the start,
outputs linked, not copied."""

import contextlib
import copy
import logging
import os
import re
from pathlib import Path

import dvc.dvcfile
import dvc.output
import dvc.stage.cache
import dvc.stage.run
from dvc.exceptions import DvcException
from dvc.utils.serialize import YAMLFileCorruptedError, dumps_yaml, modify_yaml, parse_yaml

from eagle3.build.shared import log


def install() -> None:
    """Puts the parts below in the place of DVC's own, and leaves out what DVC says to people who
    type its commands (that a rejects file is empty, that dvc.lock is updated): after every stage of
    a build it hides what the stage said."""
    dvc.dvcfile.modify_yaml = replacing_yaml
    dvc.output.otransfer = _linking
    dvc.stage.run.cmd_run = _holding_to_its_inputs
    dvc.stage.cache.StageCache._load_cache = _of_its_inputs
    dvc.dvcfile.logger.setLevel(logging.WARNING)
    dvc.output.logger.addFilter(lambda record: record.msg != "'%s' is empty.")


@contextlib.contextmanager
def replacing_yaml(path, fs=None):
    """Stands in for DVC's `modify_yaml`: takes what is set for some stages of dvc.lock, and
    replaces the file by rename. What stands there beside it is kept.

    DVC's own way takes half a second for forty stages, so in a file as DVC writes it only the text
    of these stages is written anew. Any other form goes DVC's way."""
    content: dict = {"schema": "2.0", "stages": {}}
    yield content
    text = Path(path).read_text(encoding="utf-8") if os.path.exists(path) else ""
    new = _spliced(text, content["stages"]) if text else dumps_yaml(content)
    temporary = f"{path}.{os.getpid()}.tmp"
    try:
        Path(temporary).write_text(text if new is None else new, encoding="utf-8")
        if new is None:
            with modify_yaml(temporary) as whole:
                whole["schema"] = content["schema"]
                whole["stages"] = whole.get("stages") or {}
                whole["stages"].update(content["stages"])
        with open(temporary, "rb") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        Path(temporary).unlink(missing_ok=True)


def _spliced(text: str, stages: dict) -> str | None:
    """`text` with these stages in it, each from its name to the next; None if the file, read as
    YAML, would then not hold them and all else as before."""
    new = text
    for name, stage in stages.items():
        block = dumps_yaml({"stages": {name: stage}}).removeprefix("stages:\n")
        head = re.escape(block.partition("\n")[0])
        new, found = re.subn(rf"(?m)^{head}\n(?:(?:   .*)?\n)*", lambda _: block, new)  # noqa: B023
        new += "" if found else block
    try:
        wanted = parse_yaml(text, "dvc.lock")
        wanted["stages"].update(parse_yaml(dumps_yaml(stages), "dvc.lock"))
        return new if parse_yaml(new, "dvc.lock") == wanted else None
    except (YAMLFileCorruptedError, KeyError, AttributeError, TypeError):
        return None


_transfer = dvc.output.otransfer


def _linking(*args, **kwargs):
    """Stands in for DVC's transfer of an output to its cache, which would copy it: the file gets
    its second name there, and DVC then puts a symbolic link in the place of the first."""
    return _transfer(*args, **{**kwargs, "hardlink": True})


_run_command = dvc.stage.run.cmd_run


def _holding_to_its_inputs(stage, **kwargs) -> None:
    """Stands in for DVC's run of a stage's command. DVC records inputs as they are when the command
    has ended, so one edited after the stage's own last look at it would be recorded beside a result
    that it had no part in."""
    used = {dep.def_path: dep.hash_info for dep in stage.deps}
    _run_command(stage, **kwargs)

    def save_deps(**kwargs) -> None:
        type(stage).save_deps(stage, **kwargs)
        if changed := [dep.def_path for dep in stage.deps if dep.hash_info != used[dep.def_path]]:
            raise DvcException(
                f"{', '.join(changed[:5])} changed while stage {stage.addressing} ran, so its "
                "result would "
                "belong to neither version; run the same command again"
            )

    stage.save_deps = save_deps


_load_cache = dvc.stage.cache.StageCache._load_cache


def _of_its_inputs(cache, key: str, value: str) -> dict | None:
    """Stands in for DVC's reader of a run cache entry, which may have come from a remote: one whose
    command, inputs or paths are not those that its name was made of is removed."""
    entry = _load_cache(cache, key, value)
    if entry:
        made_of = dvc.stage.cache._get_cache_hash(copy.deepcopy(entry), key=True)
        if (made_of, dvc.stage.cache._get_cache_hash(entry)) == (key, value):
            return entry
        log(f"{key[:8]} in the run cache is not what its name says, and is removed")
        os.unlink(cache._get_cache_path(key, value))
        with contextlib.suppress(OSError):  # others are in it
            os.rmdir(cache._get_cache_dir(key))
    return None
