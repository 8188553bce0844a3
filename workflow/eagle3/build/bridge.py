"""Between Snakemake and DVC, while the Snakefile is read: key files, the code of each stage, and
what changed.

A build in which nothing changed has to stay as quick as Snakemake alone, so what is learned from
params.yaml, dvc.yaml, dvc.lock and the code is kept in `.build/bridge.json` under a stamp of those
files, and only read again. Nothing heavy (pydantic, DVC) is imported on that path."""

import hashlib
import json
import os
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

from eagle3.build.shared import KEYS, TOUCHING, log
from eagle3.core import orphans
from eagle3.core.dvc_cache import check_mounted

KNOWN = Path(".build/bridge.json")
SEEN, RUNNING = Path(".snakemake/eaglemake.seen"), Path(".build/running")


class Bridge:
    """`datasets`: their names, sorted. `code`: files of each rule's script. Raises UserError for a
    wrong params.yaml."""

    def __init__(self, is_main: bool):
        self.is_main = is_main and TOUCHING not in os.environ
        _set_environment()
        known = _read_known()
        stamp = _stamp()
        if known.get("stamp") != stamp or not all(
            (KEYS / f"{stage}.json").exists() for stage in known["stages"]
        ):
            from eagle3.build import keys

            known = {"stamp": stamp, **keys.learn(write=self.is_main)}
            _write(KNOWN, json.dumps(known))
        self.stamp: str = stamp
        self.stages: list[str] = known["stages"]
        self.datasets: list[str] = known["datasets"]
        self.code: dict[str, list[str]] = known["code"]
        if self.is_main:
            for line in known["changes"]:
                log(line)

    def catch_up(self, rules) -> None:
        """Tells Snakemake what happened since its last build (an edit, dvc repro, pull, checkout),
        if anything did."""
        if not self.is_main or not _clear_locks():
            return
        for path in orphans.ignore(orphans.strangers(self.datasets)):
            log(f"{path} was made by no build; it is left alone, and decides nothing")
        seen = self.stamp + _fingerprint()
        if not SEEN.exists() or SEEN.read_text() != seen:
            from eagle3.build import sync

            if sync.run(rules):
                _write(SEEN, self.stamp + _fingerprint())

    def starting(self) -> None:
        """A build begins: leaves this process's name, so that a lock can be told from what a kill
        left behind, and clears away what is left of other data sets, before DVC looks at the
        folders that they lie in."""
        _write(RUNNING, _identity(os.getpid()))
        for path in orphans.remove(orphans.entries(self.datasets)) if self.is_main else ():
            log(f"removed {path}: params.yaml no longer has this data set")

    def remember(self, built: set[str]) -> None:
        """A build of the stages `built` ended well: if these are all, Snakemake knows the present
        state. After a failure, or where stages further down were not looked at, it asks DVC the
        next time."""
        if self.is_main and built >= set(self.stages):
            _write(SEEN, _stamp() + _fingerprint())

    def last_words(self) -> None:
        """A build failed: says again why, since Snakemake has buried it under all that it knows of
        the job."""
        for file in sorted(Path("logs").rglob("*.log")):
            if self.is_main and file.stat().st_mtime >= RUNNING.stat().st_mtime:
                lines = file.read_text(errors="replace").splitlines()
                refused = [line for line in lines if line.startswith(("error: ", "interrupted; "))]
                for line in refused or [line for line in lines[-1:] if ": failed to run: " in line]:
                    log(f"{file}: {line.removeprefix('error: ')}")


def _set_environment() -> None:
    """What `python` and `eagle3` mean in a rule's shell, so that its text is the same on every
    machine: Snakemake takes a changed text for changed code."""
    folders = {
        "PATH": os.path.dirname(os.path.abspath(sys.executable)),
        "PYTHONPATH": os.path.abspath("workflow"),
    }
    for variable, folder in folders.items():
        there = [part for part in os.environ.get(variable, "").split(os.pathsep) if part]
        if folder not in there:
            os.environ[variable] = os.pathsep.join([folder, *there])


def _stamp() -> str:
    """Changes when params.yaml, dvc.yaml, dvc.lock or a file of the code does."""
    digest = hashlib.sha256()
    for name in ("params.yaml", "dvc.yaml", "dvc.lock"):
        digest.update(Path(name).read_bytes() if os.path.exists(name) else b"-")
    for entry in _code():
        stat = entry.stat()
        digest.update(f"{entry.path} {stat.st_size} {stat.st_mtime_ns};".encode())
    return digest.hexdigest()


def _code() -> Iterator[os.DirEntry]:
    """Files of the library and the scripts, in every room, bytecode left out."""
    folders = ["workflow/scripts", "workflow/eagle3"]
    while folders:
        for entry in sorted(os.scandir(folders.pop()), key=lambda e: e.name):
            if not entry.is_dir():
                yield entry
            elif entry.name != "__pycache__":
                folders.append(entry.path)


def _fingerprint() -> str:
    """Changes when any file in data/ does: its size, the time of its last change (which cannot be
    set back), or the time of the link to it. Raises UserError for a link that leads nowhere, unless
    it is one into the cache."""
    digest = hashlib.sha256()
    folders, walked = ["data"] if os.path.isdir("data") else [], set()
    while folders:
        folder = folders.pop()
        if (inode := os.stat(folder).st_ino) in walked:
            continue
        walked.add(inode)
        for entry in sorted(os.scandir(folder), key=lambda e: e.name):
            if entry.is_dir():  # a link to another disk is followed
                folders.append(entry.path)
                continue
            link = entry.stat(follow_symlinks=False)
            try:
                file = entry.stat()
            except OSError:  # a link into a cache that was emptied, or to a disk
                check_mounted(entry.path)
                file = link
            digest.update(
                f"{entry.path} {file.st_size} {file.st_ctime_ns} {link.st_mtime_ns};".encode()
            )
    return digest.hexdigest()


def _read_known() -> dict:
    try:
        return json.loads(KNOWN.read_text())
    except (OSError, ValueError):
        return {"stages": []}


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.{os.getpid()}")
    temporary.write_text(text)
    os.replace(temporary, path)


def _identity(pid: int) -> str:
    """A process's number and start time, since a number alone may belong to a later process, and
    where it counts: host, boot, PID namespace."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in "ZX" else f"{pid} {fields[19]} {_place()}"


def _place() -> str:
    boot = Path("/proc/sys/kernel/random/boot_id")
    return (
        f"{socket.gethostname()} {boot.read_text().strip() if boot.exists() else '-'} "
        f"{os.readlink('/proc/self/ns/pid')}"
    )


def _is_elsewhere(holder: str) -> bool:
    """Whether a build was started where its process cannot be looked for: on another host, or in a
    container. One of this host before it was started anew is none."""
    host, boot, space = holder.split()[2:5]
    own_host, own_boot, own_space = _place().split()
    return host != own_host or (boot == own_boot and space != own_space)


def _clear_locks() -> bool:
    """Removes what a killed Snakemake left: its locks, and its marks on unfinished outputs. False
    while one is running.

    The marks would stop the next run; they are not needed, because no artifact has its final name
    before it is whole."""
    locks = list(Path(".snakemake/locks").glob("*"))
    holder = RUNNING.read_text() if RUNNING.exists() else ""
    pid = holder.partition(" ")[0]
    if len(holder.split()) == 5 and _is_elsewhere(holder):
        if locks:
            log(
                f"{holder.split()[2]} builds here, or was killed while it did, as process {pid}, "
                "which cannot be seen from here; its locks stay. If it is dead: snakemake --unlock"
            )
        return not locks
    if pid and holder == _identity(int(pid)) and int(pid) != os.getpid():
        if locks:
            log(
                f"another snakemake is building here as process {pid}; what it has finished is "
                "shown when it ends"
            )
        return not locks
    marks = list(Path(".snakemake/incomplete").glob("*"))
    if holder and (locks or marks):
        _write(
            RUNNING, _identity(os.getpid())
        )  # before removing: a third one would remove this one's locks
        for file in [*locks, *marks]:
            file.unlink(missing_ok=True)
        log(
            f"process {pid} was killed while it built here; its locks are removed, and what it "
            "had finished is kept"
        )
    return True
