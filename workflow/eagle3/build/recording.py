"""How the gate has DVC record a stage: dvc.lock by rename, inputs as they were at the start,
outputs linked, not copied."""

import contextlib
import logging
import os
from pathlib import Path

import dvc.dvcfile
import dvc.output
import dvc.stage.run
from dvc.exceptions import DvcException


def install() -> None:
    """Puts the parts below in the place of DVC's own, and leaves out what DVC says to people who
    type its commands (that a rejects file is empty, that dvc.lock is updated): after every stage of
    a build it hides what the stage said."""
    dvc.dvcfile.modify_yaml = replacing_yaml
    dvc.output.otransfer = _linking
    dvc.stage.run.cmd_run = _holding_to_its_inputs
    dvc.dvcfile.logger.setLevel(logging.WARNING)
    dvc.output.logger.addFilter(lambda record: record.msg != "'%s' is empty.")


@contextlib.contextmanager
def replacing_yaml(path, fs=None):
    """Stands in for DVC's `modify_yaml`: takes what is set for some stages of dvc.lock, and
    replaces the file by rename.

    Only their text is written anew, by DVC's own writer, and none is read: for all stages that
    takes seconds."""
    from dvc.utils.serialize import dumps_yaml

    content: dict = {"schema": "2.0", "stages": {}}
    yield content
    text = Path(path).read_text(encoding="utf-8") if os.path.exists(path) else "schema: '2.0'\n"
    head, _, body = text.partition("stages:\n")
    blocks = _blocks(body)
    for name, stage in content["stages"].items():
        blocks[name] = dumps_yaml({"stages": {name: stage}}).removeprefix("stages:\n")
    temporary = f"{path}.{os.getpid()}.tmp"
    with open(temporary, "w", encoding="utf-8") as file:
        file.write(head + "stages:\n" + "".join(blocks.values()))
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def _blocks(body: str) -> dict[str, str]:
    """The text of each stage of a dvc.lock, by its name: what stands under `stages:` from one name
    to the next."""
    found: dict[str, str] = {}
    name = None
    for line in body.split("\n")[:-1]:  # what follows the last line end was cut off
        if line.startswith("  ") and line[2:3] not in " -" and line.endswith(":"):
            name = line.strip()[:-1].strip("'\"")
            found[name] = ""
        found[name] += f"{line}\n"
    return found


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
