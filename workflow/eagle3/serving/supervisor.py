"""The process that owns one SGLang server: starts it, restarts it after a crash, stops it when
nobody needs it.

Alone: `python -m eagle3.serving.supervisor FOLDER`; `eagle3.serving.server.lease` starts it so.
FOLDER holds `spec.json` (what to run), `state.json` (how it stands, rewritten at every change),
`server.log`, and two lock files that the kernel frees when their holders die: `supervisor` (this
process) and `leases` (shared, everyone who uses the server).

Nothing is left behind: the server and its workers are one process group, killed as a whole; a shell
waits on a pipe from this process and kills the group when the pipe closes, so even `kill -9` of
this process takes the server along. The server ends when no lease has been held for `idle_timeout`,
or at once when the build that wanted it has ended."""

import contextlib
import ctypes
import fcntl
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from pathlib import Path
from typing import Any

from eagle3.core.errors import UserError
from eagle3.core.files import read_json, write_json
from eagle3.core.process import children, die_with_parent, start_time
from eagle3.serving.client import Client

MARK = "EAGLEMAKE_SERVER"  # in the environment of every server: the folder that it belongs to
PR_SET_CHILD_SUBREAPER = 36
STEADY = 600  # seconds of service after which earlier crashes are forgotten


def members(group: int) -> list[int]:
    """Live processes of a process group."""
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with contextlib.suppress(OSError, IndexError):
                fields = Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()
                if int(fields[2]) == group and fields[0] not in "ZX":
                    found.append(int(entry))
    return found


def kill_group(group: int, grace: float = 0, patience: float = 60) -> bool:
    """Ends a process group: SIGTERM, after `grace` seconds SIGKILL, and waits until no member is
    left (a worker that still gives back GPU memory is a member). False if some member outlives
    `patience`."""
    signals = ([(signal.SIGTERM, grace)] if grace else []) + [(signal.SIGKILL, patience)]
    for sig, seconds in signals:
        with contextlib.suppress(OSError):
            os.killpg(group, sig)
        end = time.monotonic() + seconds
        while members(group):
            if time.monotonic() > end:
                break
            time.sleep(0.05)
    return not members(group)


def belongs_to(pid: int) -> str | None:
    """The folder in which a supervisor started this process, if one did."""
    with contextlib.suppress(OSError):
        for entry in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
            if entry.startswith(MARK.encode() + b"="):
                return entry.partition(b"=")[2].decode()
    return None


def port_is_free(host: str, port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True


def port_holder(port: int) -> int | None:
    """The process that listens on a TCP port; None if there is none or it is another user's."""
    inodes = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with contextlib.suppress(OSError):
            for line in Path(table).read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == "0A" and int(fields[1].rpartition(":")[2], 16) == port:
                    inodes.add(f"socket:[{fields[9]}]")
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with contextlib.suppress(OSError):
                for link in os.scandir(f"/proc/{entry}/fd"):
                    if os.readlink(link.path) in inodes:
                        return int(entry)
    return None


def command_of(pid: int | None) -> str:
    try:
        return (
            Path(f"/proc/{pid}/cmdline")
            .read_bytes()
            .replace(b"\0", b" ")
            .decode(errors="replace")
            .strip()[:120]
        )
    except OSError:
        return "unknown"


class Failed(Exception):
    """The server cannot be had; the message is for a person."""


class Supervisor:
    def __init__(self, folder: Path):
        self.folder = folder.resolve()
        self.spec = read_json(folder / "spec.json")
        self.log = self.folder / "server.log"
        self.server: subprocess.Popen | None = None
        self.guard: subprocess.Popen | None = None
        self.stuck = self.told_to_stop = False
        self.crashes = self.restarts = 0  # all of them, and those in a row
        self.idle_since: float | None = None
        self.ready = 0.0
        self.state: dict[str, Any] = {
            "supervisor": [os.getpid(), start_time(os.getpid())],
            "url": self.spec["url"],
            "digest": self.spec["digest"],
            "log": str(self.log),
            "restarts": 0,
        }

    def publish(self, phase: str, **more) -> None:
        self.state.update(
            phase=phase, since=time.time(), server=self.server.pid if self.server else None, **more
        )
        write_json(self.folder / "state.json", self.state)
        print(
            time.strftime("%F %T"),
            phase,
            {k: v for k, v in more.items() if k != "fingerprint"},
            flush=True,
        )

    def run(self) -> None:
        """The whole life. Ends by itself; whatever happens, the server is gone afterwards."""
        signal.signal(signal.SIGTERM, lambda *_: setattr(self, "told_to_stop", True))
        signal.signal(signal.SIGUSR1, lambda *_: setattr(self, "stuck", True))
        try:
            self._serve()
        except Failed as failure:
            self._end()
            self.publish("failed", reason=str(failure))
            while self._wanted():  # the failure stays to be read until those who wait have gone
                time.sleep(0.2)
        finally:
            self._end()
            if self.state.get("phase") != "failed":
                self.publish("stopped")

    def _serve(self) -> None:
        while True:
            self._launch()
            cause = self._bring_up() or self._watch()
            self._end()
            if cause is None:
                return
            self.crashes += 1
            self.restarts += 1
            if self.restarts > self.spec["max_restarts"] or not self.state.get("fingerprint"):
                raise Failed(cause)
            pause = min(60.0, self.spec["backoff"] * 2 ** min(self.restarts - 1, 5))
            self.publish(
                "restarting", reason=cause, last_crash=cause, restarts=self.crashes, pause=pause
            )
            end = time.monotonic() + pause
            while time.monotonic() < end:
                if not self._wanted():
                    return
                time.sleep(0.1)

    def _launch(self) -> None:
        self._free_port()
        self.stuck = False
        environment = {**os.environ, MARK: str(self.folder)}
        environment["PYTHONPATH"] = environment.pop(
            "EAGLEMAKE_PYTHONPATH", ""
        )  # the user's, not this process's
        environment.update(self.spec["environment"])
        with open(self.log, "ab") as log:
            log.write(f"\n--- {time.strftime('%F %T')} {' '.join(self.spec['command'])}\n".encode())
            self.log_start = log.tell()
            try:
                self.server = subprocess.Popen(
                    self.spec["command"],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env=environment,
                    start_new_session=True,
                    preexec_fn=die_with_parent,
                )
            except OSError as error:
                raise Failed(
                    f"cannot run {self.spec['command'][0]} ({error.strerror}); set server.python "
                    "or "
                    "server.command in params.yaml"
                ) from None
        self.guard = subprocess.Popen(
            ["/bin/sh", "-c", 'read _; kill -9 "-$0"', str(self.server.pid)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        self.publish("starting")

    def _free_port(self) -> None:
        """Raises Failed if someone else's process has the port; what a killed run of ours left
        there is ended."""
        host, port = self.spec["host"], self.spec["port"]
        for _ in range(2):
            if port_is_free(host, port):
                return
            holder = port_holder(port)
            owner = belongs_to(holder) if holder else None
            if owner == str(self.folder):
                print(
                    f"port {port} was held by process {holder}, the orphan of a killed run; "
                    "ended it",
                    flush=True,
                )
                self.state["note"] = (
                    f"ended process {holder}, the orphan of a killed run, which held port {port}"
                )
                kill_group(os.getpgid(holder))
                continue
            if owner:
                raise Failed(
                    f"port {port} is held by process {holder}, the server of the build in "
                    f"{owner}; wait for "
                    "it, or set server.port"
                )
            raise Failed(
                f"port {port} is held by process {holder or 'of another user'} "
                f"({command_of(holder)}); stop "
                "it, set server.port, or name it in server.endpoints if it serves this target"
            )
        raise Failed(f"port {port} does not become free; set server.port")

    def _bring_up(self) -> str | None:
        """Waits for the first token. Returns why it will not come, or None (also when nobody wants
        it any more)."""
        begun, client = time.monotonic(), Client(self.spec["url"])
        first = threading.Event()

        def probe(process=self.server):
            try:
                while process.poll() is None and not client.generates(self.spec["start_timeout"]):
                    time.sleep(0.5)
            finally:
                first.set()

        threading.Thread(target=probe, daemon=True).start()
        while not first.wait(0.1):
            if (code := self.server.poll()) is not None:
                return f"the server ended with code {code} while starting; {self._tail()}"
            if not self._wanted():
                return None
            if (waited := time.monotonic() - begun) > self.spec["start_timeout"]:
                return (
                    f"the server gave no token in {waited:.0f} s (server.start_timeout); "
                    f"{self._tail()}"
                )
        if (code := self.server.poll()) is not None:
            return f"the server ended with code {code} while starting; {self._tail()}"
        try:
            found = client.fingerprint()
        except (OSError, ValueError, UserError) as error:
            return f"the server does not say what it runs ({error})"
        self.ready = time.monotonic()
        self.publish("ready", fingerprint=found, reason="", seconds=round(self.ready - begun, 1))
        return None

    def _watch(self) -> str | None:
        """Stays while the server is wanted. Returns why it died, or None if it is not needed any
        more."""
        while self._wanted():
            if (code := self.server.poll()) is not None:
                cause = f"the server ended with code {code}; {self._tail()}"
            elif self.stuck:
                cause = f"the server gave no token for a while and was ended; {self._tail()}"
            else:
                time.sleep(0.1)
                continue
            if time.monotonic() - self.ready > STEADY:
                self.restarts = 0
            return cause
        return None

    def _wanted(self) -> bool:
        """Whether anyone holds a lease, or might soon: the build still runs and the idle time is
        not over.

        The last look and the word "stopping" happen under the exclusive lock, so that no lease
        begins in between."""
        if self.told_to_stop:
            return False
        with open(self.folder / "leases", "a") as leases:
            try:
                fcntl.flock(leases, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                self.idle_since = None
                return True
            now = time.monotonic()
            self.idle_since = self.idle_since or now
            phase = self.state.get("phase")
            if phase != "failed" and any(
                start_time(pid) == start for pid, start in self.spec["driver"]
            ):
                if (
                    phase != "ready"
                    or now - max(self.idle_since, self.ready) < self.spec["idle_timeout"]
                ):
                    return True
            if phase != "failed":
                self.publish("stopping")
            return False

    def _end(self) -> None:
        if self.server is None:
            return
        kill_group(self.server.pid, self.spec["stop_timeout"] if self.server.poll() is None else 0)
        for pid in children(
            os.getpid()
        ):  # workers that left the group come here when their parent dies
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.server.wait(5)
        if self.guard:
            self.guard.kill()
            self.guard.wait()
            self.guard.stdin.close()
        self.server = self.guard = None

    def _tail(self, lines: int = 12) -> str:
        """The last lines of the present server's log."""
        with open(self.log, "rb") as log:
            log.seek(max(self.log_start, log.seek(0, os.SEEK_END) - 65536))
            last = deque(
                (line.decode(errors="replace").rstrip() for line in log if line.strip()), lines
            )
        return f"end of {self.log}:\n  " + "\n  ".join(last or ["(it wrote nothing)"])


def main(folder: Path) -> None:
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    with open(folder / "supervisor", "a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            sys.exit("another supervisor owns this folder")
        Supervisor(folder).run()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
