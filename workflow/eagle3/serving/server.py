"""The SGLang server as its users see it: what is asked for, a lease on it, and the check that it is
what was asked for.

`with lease(settings, target) as server:` attaches to the machine's server if it runs in exactly
this configuration, and has a supervisor (`eagle3.serving.supervisor`) start it otherwise.
`settings` is the section `server` of params.yaml."""

import contextlib
import fcntl
import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from eagle3.core.errors import UserError
from eagle3.core.files import digest_of, read_json, write_json
from eagle3.core.process import driving_ancestors, start_time
from eagle3.serving import supervisor
from eagle3.serving.client import Client, api_key
from eagle3.target.model import Target

SERVERS = Path(".work/server")
FOLDER = (
    SERVERS / platform.node()
)  # a process number means something on its own machine only, and .work may be shared
NUMERICS = {
    "model-path": "target.source",
    "dtype": "target.dtype",
    "kv-cache-dtype": "target.kv_cache_dtype",
    "quantization": "target.quantization",
    "context-length": "target.context_length",
    "preferred-sampling-params": "generate.sampling",
}
OURS = {
    "host": "server.host",
    "port": "server.port",
    "weight-version": "nothing, since it carries the target's digest",
}


def flags_for(settings, target: Target, more: dict[str, Any] | None = None) -> dict[str, Any]:
    """Flags of launch_server: those that follow from the target, then `server.flags`, then a
    stage's own (`more`).

    Raises UserError if `server.flags` sets what decides the answers: it would change them and make
    nothing stale."""
    for name in settings.flags:
        if owner := NUMERICS.get(name.replace("_", "-")) or OURS.get(name.replace("_", "-")):
            raise UserError(
                f"server.flags.{name} is {settings.flags[name]!r}, but that flag is set by "
                f"{owner}; "
                "remove it from server.flags"
            )
    info = target.info
    derived = {
        "model-path": str(target.path.resolve()),
        "host": settings.host,
        "port": settings.port,
        "dtype": info["dtype"],
        "context-length": info["context_length"],
        "weight-version": target.digest,
        "quantization": info["quantization"],
        "trust-remote-code": info["trust_remote_code"],
        "kv-cache-dtype": None if info["kv_cache_dtype"] == "auto" else info["kv_cache_dtype"],
        "enable-metrics": True,
    }
    given = {name.replace("_", "-"): value for name, value in settings.flags.items()}
    return {**derived, **given, **(more or {})}


def command_line(settings, flags: dict[str, Any]) -> list[str]:
    """True becomes a bare flag, a list several words; False and None leave it out."""
    words = list(settings.command or [settings.python, "-m", "sglang.launch_server"])
    for name, value in flags.items():
        if value is not None and value is not False:
            values = value if isinstance(value, list) else [] if value is True else [value]
            words += [f"--{name}", *map(str, values)]
    return words


def specification(
    settings,
    target: Target,
    more: dict[str, Any] | None = None,
    environment: dict[str, str] | None = None,
) -> dict[str, Any]:
    """spec.json: all that a supervisor must know. `digest` names the configuration."""
    command = command_line(settings, flags_for(settings, target, more))
    variables = {
        name: str(value) for name, value in {**settings.environment, **(environment or {})}.items()
    }
    host = "127.0.0.1" if settings.host == "0.0.0.0" else settings.host
    return {
        "command": command,
        "environment": variables,
        "digest": digest_of([command, variables]),
        "host": settings.host,
        "port": settings.port,
        "url": f"http://{host}:{settings.port}",
        "start_timeout": settings.start_timeout,
        "idle_timeout": settings.idle_timeout,
        "stop_timeout": settings.stop_timeout,
        "max_restarts": settings.max_restarts,
        "backoff": settings.restart_backoff,
        "driver": driving_ancestors()[-1:],
    }


def check_same(found: dict[str, Any], target: Target, url: str) -> None:
    """Compares what a server reports with what was asked for. Raises UserError naming the field and
    both values."""
    info = target.info
    if found["weight_version"] != target.digest:
        same = (
            found["weight_version"] in (None, "default")
            and found["model_path"]
            and (os.path.realpath(found["model_path"]) == os.path.realpath(target.path))
        )
        if not same:
            raise UserError(
                f"the server at {url} runs {found['model_path']} (weight version "
                f"{found['weight_version']}), not "
                f"{target.path} (digest {target.digest}); start it with `--weight-version "
                f"{target.digest}` if it is it"
            )
    for field in ("kv_cache_dtype", "quantization", "dtype", "context_length"):
        asked, reported = info[field], found.get(field)
        if (asked or "auto") != (reported or "auto"):
            raise UserError(
                f"the server at {url} reports {field} {reported!r}, but target.{field} is "
                f"{asked!r}; restart "
                f"the server, or set target.{field} to what it reports"
            )


class Lease:
    """The right to use servers. `urls`: where they are. `fingerprint`: what the first one
    reported."""

    def __init__(
        self, urls: list[str], target: Target, folder: Path | None, key: str | None = None
    ):
        self.urls, self.target, self.folder, self.key = urls, target, folder, key
        self.fingerprint: dict[str, Any] = {}
        self.stuck: int | None = (
            None  # the process that was reported stuck; not ready again until another has its place
        )
        # of each server when it was last compared with the target; every answer says it again
        self.weight_versions: dict[str, str | None] = {}

    def client(self, url: str, timeout: float | None = None) -> Client:
        """A client of one of the servers."""
        return Client(url, self.key, timeout)

    def state(self, url: str, patience: float = 60) -> str:
        """ "ready", or "down" while it may come back. Raises UserError if it will not, or is not
        what was asked for.

        For a server that a supervisor owns its word counts; another one must generate a token
        within `patience` s."""
        if self.folder is None:
            client = self.client(url)
            if not client.generates(patience):
                return "down"
            try:
                found = client.fingerprint()
                check_same(found, self.target, url)
            except (OSError, ValueError):
                return "down"
            self.weight_versions[url] = found["weight_version"]
            return "ready"
        state = read_state(self.folder)
        if not alive(state):
            raise UserError(
                f"the supervisor of the server ended; see {self.folder / 'supervisor.log'}, then "
                "run the same "
                "command again: finished rows are kept"
            )
        if state["phase"] == "failed":
            raise UserError(state["reason"])
        if state["phase"] != "ready" or state["server"] == self.stuck:
            return "down"
        check_same(state["fingerprint"], self.target, url)
        self.weight_versions[url] = state["fingerprint"]["weight_version"]
        return "ready" if start_time(state["server"]) else "down"

    def report_stuck(self) -> None:
        """Has the supervisor end and restart a server that gives no more tokens; others' servers
        are left alone."""
        if self.folder and alive(state := read_state(self.folder)):
            self.stuck = state["server"]
            os.kill(state["supervisor"][0], signal.SIGUSR1)

    def wait(self, patience: float) -> None:
        """Returns when one server is ready. Raises UserError when all stay away for `patience`
        seconds, or fail."""
        end = time.monotonic() + patience
        while True:
            for url in self.urls:
                if self.state(url) == "ready":
                    self.fingerprint = (
                        read_state(self.folder)["fingerprint"]
                        if self.folder
                        else self.client(url).fingerprint()
                    )
                    return
            if time.monotonic() > end:
                raise UserError(
                    f"no token from {', '.join(self.urls)} within {patience:.0f} s; are the "
                    "servers running?"
                )
            time.sleep(0.1 if self.folder else 2)


def private_folder() -> Path:
    """FOLDER, which nobody but its user can read: servers write what they like into their logs."""
    folder = FOLDER.resolve()
    for one in (folder.parent, folder):
        one.mkdir(parents=True, exist_ok=True)
        one.chmod(0o700)
    return folder


def read_state(folder: Path = FOLDER) -> dict[str, Any]:
    """state.json, or {} before there was a server."""
    return read_json(folder / "state.json") if (folder / "state.json").exists() else {}


def alive(state: dict[str, Any]) -> bool:
    """Whether the supervisor that wrote the state still runs."""
    return bool(state) and start_time(state["supervisor"][0]) == state["supervisor"][1]


@contextlib.contextmanager
def lease(
    settings,
    target: Target,
    more: dict[str, Any] | None = None,
    environment: dict[str, str] | None = None,
    log: Callable[[str], None] = print,
) -> Iterator[Lease]:
    """A server in this configuration, ready, for as long as the block lasts. `more`, `environment`:
    a stage's own flags and variables. Raises UserError if it cannot be had: the log's tail, a port
    that is taken, another model."""
    if settings.endpoints:
        given = Lease(
            [url.rstrip("/") for url in settings.endpoints], target, None, api_key(settings)
        )
        given.wait(min(60.0, settings.start_timeout))
        yield given
        return
    spec = specification(settings, target, more, environment)
    folder = private_folder()
    with open(folder / "leases", "a") as holders:  # closing frees the lock, and so does death
        _attach(folder, spec, holders, log)
        own = Lease([spec["url"]], target, folder)
        own.wait(settings.start_timeout * (settings.max_restarts + 1))
        yield own


def warm(settings, target: Target, log: Callable[[str], None] = print) -> None:
    """Starts the server without waiting for it, for the build that drives this process; nothing if
    one is there."""
    driver = driving_ancestors()[-1:]
    if settings.endpoints or not driver or alive(read_state()):
        return
    folder = private_folder()
    with open(folder / "leases", "a") as holders:
        _attach(folder, specification(settings, target), holders, log)


def stop(log: Callable[[str], None] = print) -> None:
    """Stops this folder's server whoever uses it."""
    state = read_state()
    if alive(state):
        log(f"stopping the server at {state['url']}")
        _end_supervisor(state)


def _attach(folder: Path, spec: dict[str, Any], holders, log) -> None:
    """Holds a shared lock on `holders` when a supervisor of this very configuration runs. One comer
    at a time."""
    told = ""
    while True:
        with open(folder / "door", "a") as door:
            fcntl.flock(door, fcntl.LOCK_EX)
            fcntl.flock(
                holders, fcntl.LOCK_SH
            )  # waits while a supervisor makes up its mind to stop
            state = read_state(folder)
            if not alive(state):
                _clean_up(state, log)
                _spawn(folder, spec, log)
                return
            if state["digest"] == spec["digest"] and state["phase"] in (
                "starting",
                "ready",
                "restarting",
            ):
                return
            if _others(holders):
                wait = (
                    f"the server at {state['url']} runs in another configuration and is in "
                    "use; waiting for it"
                )
                fcntl.flock(holders, fcntl.LOCK_UN)
            else:
                wait = f"stopping the server at {state['url']}, which runs in another configuration"
                fcntl.flock(holders, fcntl.LOCK_UN)
                if state["phase"] in ("starting", "ready", "restarting"):
                    log(wait)
                _end_supervisor(state)
                continue
        if told != wait:
            log(told := wait)
        time.sleep(0.5)


def _others(holders) -> bool:
    """Whether anyone else holds a lease: then the shared lock cannot be made exclusive."""
    try:
        fcntl.flock(holders, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    return False


def _clean_up(state: dict[str, Any], log) -> None:
    """Ends what is left of a server whose supervisor was killed."""
    group = state.get("server")
    left = [pid for pid in supervisor.members(group) if supervisor.belongs_to(pid)] if group else []
    if left:
        log(f"ended process group {group}, the orphan of a killed run ({len(left)} processes)")
        supervisor.kill_group(group)


def _spawn(folder: Path, spec: dict[str, Any], log) -> None:
    spec = {**spec, "driver": spec["driver"] or [(os.getpid(), start_time(os.getpid()))]}
    write_json(folder / "spec.json", spec)
    log(f"starting a server: {' '.join(spec['command'])}  (log {folder / 'server.log'})")
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(
            [
                str(Path(__file__).resolve().parents[2]),
                *filter(None, [os.environ.get("PYTHONPATH")]),
            ]
        ),
    }
    # The server itself gets this process's variables: its PYTHONPATH is not ours to set.
    environment["EAGLEMAKE_PYTHONPATH"] = os.environ.get("PYTHONPATH", "")
    with open(folder / "supervisor.log", "ab") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "eagle3.serving.supervisor", str(folder)],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )
    while not ((state := read_state(folder)) and state["supervisor"][0] == process.pid):
        if process.poll() is not None:
            raise UserError(
                f"the server's supervisor ended at once; see {folder / 'supervisor.log'}"
            )
        time.sleep(0.02)


def _end_supervisor(state: dict[str, Any], patience: float = 120) -> None:
    with contextlib.suppress(OSError):
        os.kill(state["supervisor"][0], signal.SIGTERM)
    end = time.monotonic() + patience
    while alive(state):
        if time.monotonic() > end:
            raise UserError(
                f"the supervisor, process {state['supervisor'][0]}, does not end; kill it by hand"
            )
        time.sleep(0.05)
