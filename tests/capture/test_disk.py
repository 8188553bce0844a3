"""Disk space with DVC's cache. Alone: python -m pytest tests/capture/test_disk.py"""

import hashlib
import os
import shutil
from pathlib import Path

import pytest
import tiny
from eagle3.capture import disk
from eagle3.core.dvc_cache import cached_file, cached_files, remove_if_corrupt
from eagle3.core.errors import UserError

SIZE = 3_000_000


def occupied(folder: Path) -> int:
    """Bytes of all files under a folder, each inode once."""
    seen = {
        (s.st_dev, s.st_ino): s.st_blocks * 512
        for p in folder.rglob("*")
        if not p.is_symlink() and p.is_file()
        for s in [p.stat()]
    }
    return sum(seen.values())


@pytest.mark.parametrize("types", ["symlink", "hardlink,symlink", "copy", "reflink,symlink"])
def test_prediction_is_what_dvc_does(in_tmp, types):
    """A stage of real DVC writes a folder; the space that it takes is the space that was
    predicted."""
    tiny.run(in_tmp, "dvc", "init", "--no-scm", "-q")
    tiny.run(in_tmp, "dvc", "config", "cache.type", types)
    predicted, kind = disk.needs(SIZE, Path("."))
    assert kind in types.split(",")
    (in_tmp / "dvc.yaml").write_text(
        f"stages:\n  a:\n    cmd: mkdir out && head -c {SIZE} /dev/urandom > out/x\n    outs: "
        "[out]\n"
    )
    before = occupied(in_tmp)
    tiny.run(in_tmp, "dvc", "repro", "-q")
    assert abs(occupied(in_tmp) - before - predicted[Path(".")]) < 200_000


def test_a_cache_on_another_file_system_counts_there(in_tmp):
    other = Path("/dev/shm")
    if not other.is_dir() or other.stat().st_dev == in_tmp.stat().st_dev:
        pytest.skip("no second file system")
    tiny.run(in_tmp, "dvc", "init", "--no-scm", "-q")
    cache = other / f"cache-{os.getpid()}"
    try:
        tiny.run(in_tmp, "dvc", "config", "cache.dir", str(cache))
        assert disk.needs(SIZE, Path("."))[0] == {Path("."): SIZE, cache: SIZE}
    finally:
        shutil.rmtree(cache, ignore_errors=True)


def test_refusal_has_the_numbers(in_tmp):
    """What is needed, kept and free, and how many tokens would fit."""
    free = shutil.disk_usage(".").free
    with pytest.raises(UserError) as error:
        disk.check_size(
            Path("w"), 10 * free, 0, 1_000_000, ", set hidden_states.dtype to float8_e4m3fn"
        )
    text = str(error.value)
    fits = int(text.split(" of 1,000,000 tokens")[0].rpartition(" ")[2].replace(",", ""))
    assert abs(fits - 100_000) < 2000 and f"{10 * free:,} bytes" in text and "float8_e4m3fn" in text
    disk.check_size(Path("w"), 1000, 0, 10)


def test_only_corrupt_objects_leave_the_cache(in_tmp):
    """An object whose content is its name's stays, whatever calls it damaged; files outside the
    cache are no concern."""
    tiny.run(in_tmp, "dvc", "init", "--no-scm", "-q")
    (in_tmp / "dvc.yaml").write_text(
        "stages:\n  a:\n    cmd: mkdir out && echo hello > out/x\n    outs: [out]\n"
    )
    tiny.run(in_tmp, "dvc", "repro", "-q")
    shutil.rmtree("out")
    found = cached_file("a", "out", "x")
    assert found == cached_files("a", "out")["x"] and found.read_bytes() == b"hello\n"
    assert not remove_if_corrupt(found) and found.exists()
    os.chmod(found, 0o644)
    found.write_bytes(b"other")
    assert hashlib.md5(b"other").hexdigest() != found.parent.name + found.name
    assert remove_if_corrupt(found) and not found.exists() and cached_file("a", "out", "x") is None
    Path("elsewhere").write_bytes(b"x")
    assert not remove_if_corrupt(Path("elsewhere")) and Path("elsewhere").exists()
