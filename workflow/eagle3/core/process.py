"""Processes: workers die with whoever started them, and one writer owns a work folder at a time."""

import contextlib
import ctypes
import fcntl
import os
import signal
import subprocess
import threading
import time
from pathlib import Path

from eagle3.core.errors import UserError

DRIVERS = ("snakemake", "dvc", "eagle3.build.gate")
PR_SET_PDEATHSIG = 1


def die_with_parent(sig: int = signal.SIGKILL) -> None:
    """Linux: the kernel sends `sig` to this process when its parent thread ends. Usable as a
    preexec_fn."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, sig, 0, 0, 0)


def git(*words: str) -> str:
    """What git prints; nothing without a repository, or without git at all (a container that
    builds, log)."""
    try:
        done = subprocess.run(["git", *words], capture_output=True, text=True)
    except FileNotFoundError:
        return ""
    return done.stdout if done.returncode == 0 else ""


def _stat(pid: int) -> tuple[int, int] | None:
    """(parent pid, start time in ticks) of a live process; None for a dead one or a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else (int(fields[1]), int(fields[19]))


def start_time(pid: int) -> int | None:
    """When a live process began, in ticks; with the pid it names a process for good. None if it is
    not alive."""
    return stat[1] if (stat := _stat(pid)) else None


def driving_ancestors() -> list[tuple[int, int]]:
    """(pid, start time) of every ancestor up to the topmost snakemake or dvc; empty when run by
    hand."""
    chain, last, pid = [], 0, os.getppid()
    while pid > 1 and (stat := _stat(pid)):
        chain.append((pid, stat[1]))
        try:
            command = (
                Path(f"/proc/{pid}/cmdline")
                .read_bytes()
                .replace(b"\0", b" ")
                .decode(errors="replace")
            )
        except OSError:
            break
        # Only the program and its first arguments: a shell whose text mentions dvc is not a driver
        # of its own.
        if any(word in " ".join(command.split()[:3]) for word in DRIVERS):
            last = len(chain)
        pid = stat[0]
    return chain[:last]


def watch_ancestors(interval: float = 0.5) -> None:
    """Kills this process group's worker when any driving ancestor dies.

    PR_SET_PDEATHSIG alone is not enough: between dvc and this process stands a shell, which
    survives dvc's kill -9."""
    ancestors = driving_ancestors()
    if not ancestors:
        return

    def watch():
        while all((stat := _stat(pid)) and stat[1] == start for pid, start in ancestors):
            time.sleep(interval)
        for child in children(os.getpid()):
            with contextlib.suppress(OSError):
                os.kill(child, signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, name="watch-ancestors", daemon=True).start()


def children(pid: int) -> list[int]:
    """Live descendants of `pid`, deepest first."""
    parents: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit() and (stat := _stat(int(entry))):
            parents.setdefault(stat[0], []).append(int(entry))
    found, queue = [], [pid]
    while queue:
        for child in parents.get(queue.pop(), []):
            found.append(child)
            queue.append(child)
    return found[::-1]


@contextlib.contextmanager
def exclusive(folder: str | Path, what: str):
    """Holds the lock of a work folder. The kernel frees it when the holder dies, so no lock is ever
    left behind.

    Raises UserError naming the holder's pid when another live process has it.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "lock", "a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            raise UserError(
                f"{what} is already running as process {file.read().strip() or 'unknown'}; wait "
                "for it, or stop it "
                "with kill and run this again"
            ) from None
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        yield folder
