"""Parts for tests of whatever talks to a server: a target's description, the misbehaving server,
requests."""

import contextlib
import json
import os
import random
import socket
import subprocess
import sys
import time
from pathlib import Path

from eagle3.core import schema
from eagle3.responses.engines import Request
from eagle3.serving import supervisor
from eagle3.target.model import Target
from misbehaving_server import STOP, answer_ids

SERVER = Path(__file__).parent / "misbehaving_server.py"
COMMAND = [sys.executable, str(SERVER)]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def make_target(folder: Path, **info) -> Target:
    """data/target of a model that has a configuration and nothing else; enough to talk about it."""
    (folder / "model").mkdir(parents=True)
    (folder / "model/config.json").write_text(
        json.dumps({"vocab_size": 400, "hidden_size": 8, "num_hidden_layers": 2})
    )
    (folder / "target.json").write_text(
        json.dumps(
            {
                "path": None,
                "digest": "d" * 32,
                "weights_digest": "w" * 32,
                "tokenizer_digest": "t" * 32,
                "dtype": "float32",
                "quantization": None,
                "kv_cache_dtype": "auto",
                "context_length": 256,
                "trust_remote_code": False,
                "chat_template_kwargs": {},
                "template_date": "2025-01-01",
                **info,
            }
        )
    )
    target = Target(folder)
    target.stop_ids = [STOP]  # without a tokenizer nothing says so
    return target


def server_settings(**more) -> schema.Server:
    return schema.Server(
        **{
            "command": COMMAND,
            "port": free_port(),
            "start_timeout": 60,
            "restart_backoff": 0.05,
            "stop_timeout": 3,
            "idle_timeout": 0,
            **more,
        }
    )


def requests(count: int, max_new_tokens: int = 16) -> list[Request]:
    """Distinct prompts; the first id of each is its number plus 3."""
    chooser = random.Random(1)
    made = []
    for i in range(count):
        ids = [3 + i, *(chooser.randrange(3, 400) for _ in range(6))]
        made.append(Request(f"row{i}", 0, f"{i:032x}", ids, max_new_tokens, i))
    return made


def right(request: Request) -> list[int]:
    return answer_ids(request.prompt_ids, request.max_new_tokens)


@contextlib.contextmanager
def started(target: Target, port: int | None = None, events: Path | None = None, **misbehave):
    """A misbehaving server in a process of its own; yields (url, process)."""
    port = port or free_port()
    info = target.info
    command = [
        *COMMAND,
        "--port",
        str(port),
        "--model-path",
        str(target.path),
        "--weight-version",
        target.digest,
        "--dtype",
        info["dtype"],
        "--context-length",
        str(info["context_length"]),
    ]
    environment = {
        **os.environ,
        "MISBEHAVE": json.dumps(misbehave),
        **({"EVENTS": str(events)} if events else {}),
    }
    process = subprocess.Popen(
        command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    url = f"http://127.0.0.1:{port}"
    try:
        wait_until(lambda: listens(port))
        yield url, process
    finally:
        process.kill()
        process.wait()


def listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def wait_until(true, seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.02)


def gone(pid: int) -> bool:
    return supervisor.start_time(pid) is None
