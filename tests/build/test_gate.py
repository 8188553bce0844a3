"""The gate's care of DVC's locks. Alone: python -m pytest tests/build/test_gate.py"""

import multiprocessing
import os
from pathlib import Path

import pytest
from dvc.exceptions import DvcException
from eagle3.build import gate, remote


@pytest.mark.parametrize(
    "text, kept", [("", False), ('{"read": {"/x": [', False), ('{"read": {}, "write": {}}', True)]
)
def test_a_list_of_path_locks_that_a_kill_cut_off_is_removed(in_tmp, text, kept):
    Path(".dvc/tmp").mkdir(parents=True)
    path = Path(".dvc/tmp/rwlock")
    path.write_text(text)
    gate.repair_rwlock()
    assert path.exists() == kept


def _hold(folder: str, held, release) -> None:
    from dvc.lock import make_lock

    os.chdir(folder)
    with make_lock(".dvc/tmp/rwlock.lock", tmp_dir=".dvc/tmp"):
        held.set()
        release.wait(60)


def test_a_list_that_is_being_written_is_left_alone(in_tmp):
    Path(".dvc/tmp").mkdir(parents=True)
    Path(".dvc/tmp/rwlock").write_text("{")
    context = multiprocessing.get_context("spawn")
    held, release = context.Event(), context.Event()
    writer = context.Process(target=_hold, args=(str(in_tmp), held, release))
    writer.start()
    try:
        assert held.wait(60)
        gate.repair_rwlock()
        assert Path(".dvc/tmp/rwlock").exists()
    finally:
        release.set()
        writer.join()
    gate.repair_rwlock()
    assert not Path(".dvc/tmp/rwlock").exists()


def test_a_full_disk_is_said_in_one_sentence():
    with pytest.raises(DvcException) as raised:
        try:
            with open("/dev/full", "w") as full:
                full.write("x")
        except OSError as error:
            raise DvcException("failed to save") from error
    [line] = gate.explained("train", list(remote.causes(raised.value)))
    assert (
        line.startswith("error: no space left while train was recorded (")
        and "run the same command again" in line
    )
    assert gate.explained("train", [DvcException("a"), ValueError("b")]) == ["error: a", "error: b"]
