"""How generation stands: written by the stage that runs, read by `make status`, during a run and
after a crash."""

import json
import os
import re
import sys
import time
from collections import Counter, deque
from pathlib import Path
from typing import Any

from eagle3.core.files import read_json, write_json
from eagle3.core.process import start_time
from eagle3.core.progress import Progress, duration
from eagle3.responses import responses
from eagle3.serving.client import Client, api_key
from eagle3.serving.server import FOLDER, SERVERS, alive, read_state

EVERY = 2.0  # seconds between two writes
METRICS = {
    "num_running_reqs": "running",
    "num_queue_reqs": "queued",
    "token_usage": "KV cache",
    "gen_throughput": "tokens/s",
}


class Status:
    """`status.json` of one data set, and its progress bar. `wanted`, `done`: prompts."""

    def __init__(self, path: Path, name: str, wanted: int, done: int, tokens: int):
        self.path, self.start, self.last = path, time.monotonic(), 0.0
        self.bar = Progress(f"generate@{name}", wanted, "rows", done=done)
        self.state: dict[str, Any] = {
            "dataset": name,
            "process": [os.getpid(), start_time(os.getpid())],
            "wanted": wanted,
            "done": done,
            "tokens": tokens,
            "answered": 0,
            "truncated": 0,
        }
        self.errors: Counter = Counter()
        self.made = 0  # tokens of this run
        self.minute: deque[tuple[float, int]] = deque()  # (time, tokens of this run until then)

    def __enter__(self):
        self.bar.__enter__()
        self._write()
        return self

    def __exit__(self, kind, *_):
        self.state["ended"] = "finished" if kind is None else kind.__name__
        self._write()
        self.bar.__exit__(kind)

    def answered(self, tokens: int, truncated: bool, finished: bool) -> None:
        """Counts an answer; `finished`: it was the last one of its prompt, as one that was cut
        always is."""
        self.made += tokens
        self.state["answered"] += finished
        self.state["truncated"] += truncated
        self._count(finished, tokens)

    def failed(self, reason: str) -> None:
        self.errors[reason] += 1
        self._count(1, 0)

    def _count(self, rows: int, tokens: int) -> None:
        self.state["done"] += rows
        self.bar.add(rows, tokens=tokens)
        if time.monotonic() - self.last > EVERY:
            self._write()

    def _write(self) -> None:
        now = self.last = time.monotonic()
        self.minute.append((now, self.made))
        while len(self.minute) > 1 and now - self.minute[0][0] > 60:
            self.minute.popleft()
        began, before = self.minute[0]
        elapsed = max(now - self.start, 1e-9)
        rate = (self.state["done"] - self.bar.began_at) / elapsed
        write_json(
            self.path,
            {
                **self.state,
                "tokens": self.state["tokens"] + self.made,
                "tokens_made": self.made,
                "seconds": round(elapsed, 3),
                "errors": dict(self.errors.most_common()),
                "tokens_per_s": round(self.made / elapsed, 1),
                "tokens_per_s_minute": round((self.made - before) / (now - began), 1)
                if now > began
                else None,
                "seconds_left": round((self.state["wanted"] - self.state["done"]) / rate)
                if rate
                else None,
                "updated": time.time(),
            },
        )


def of_dataset(name: str) -> str:
    """One line on a data set, whatever state it is in."""
    path, published = (
        Path(f".work/generate/{name}/status.json"),
        Path(f"data/responses/{name}") / responses.ROWS,
    )
    state = read_json(path) if path.exists() else {}
    running = (
        bool(state)
        and not state.get("ended")
        and start_time(state["process"][0]) == state["process"][1]
    )
    if not state:
        if not published.exists():
            return f"{name}: nothing yet"
        with open(published, "rb") as rows:
            return f"{name}: {sum(1 for _ in rows):,} rows published, made elsewhere"
    parts = [f"{state['done']:,}/{state['wanted']:,} rows", f"{state['tokens']:,} tokens"]
    if running:
        if state["tokens_per_s_minute"] is not None:
            parts.append(
                f"{state['tokens_per_s_minute']:,.0f} tokens/s in the last minute, "
                f"{state['tokens_per_s']:,.0f} overall"
            )
        if state["seconds_left"] is not None:
            parts.append(f"{duration(state['seconds_left'])} left")
    if state["answered"]:
        parts.append(f"{state['truncated'] / state['answered']:.0%} cut")
    if state["errors"]:
        parts.append(
            "errors: " + ", ".join(f"{reason} {count}" for reason, count in state["errors"].items())
        )
    ago = f"{duration(time.time() - state['updated'])} ago"
    how = (
        "running"
        if running
        else f"finished {ago}"
        if state.get("ended") == "finished"
        else f"stopped {ago}"
    )
    return f"{name}: {how}, " + ", ".join(parts)


def of_server(settings) -> list[str]:
    """A line for each server of the section `server`: its health, running requests, use of the KV
    cache."""
    if settings.endpoints:
        key = api_key(settings)
        return [
            f"server {url}: {metrics(Client(url, key)) or 'no answer'}"
            for url in settings.endpoints
        ]
    elsewhere = [
        f"server on {path.parent.name}: {read_json(path)['phase']} when it last wrote, "
        f"{duration(time.time() - path.stat().st_mtime)} ago"
        for path in sorted(SERVERS.glob("*/state.json"))
        if path.parent != FOLDER
    ]
    state = read_state()
    if not state:
        return elsewhere or ["server: none was started here"]
    return [*_of_own_server(state), *elsewhere]


def _of_own_server(state: dict[str, Any]) -> list[str]:
    if not alive(state):
        word = (
            state["phase"]
            if state["phase"] in ("stopped", "failed")
            else "gone (its supervisor was killed)"
        )
        return [
            f"server {state['url']}: {word}"
            + (f": {state['reason']}" if state.get("reason") else "")
        ]
    since = duration(time.time() - state["since"])
    line = f"server {state['url']}: {state['phase']} for {since}, {state['restarts']} restarts"
    if state["phase"] == "ready":
        line += f", {metrics(Client(state['url'])) or 'no metrics'}"
    return [
        line
        + (f" (the last: {state['last_crash'].splitlines()[0]})" if state.get("last_crash") else "")
    ]


def metrics(client: Client) -> str:
    """Running and queued requests, KV-cache use and throughput from a server's metrics page; ""
    without one."""
    text = client.metrics()
    found = []
    for name, label in METRICS.items():
        values = [
            float(value)
            for value in re.findall(rf"^sglang:{name}(?:{{[^}}]*}})? ([0-9.e+-]+)$", text, re.M)
        ]
        if values:
            found.append(
                f"{label} {max(values):.0%}"
                if name == "token_usage"
                else f"{label} {sum(values):,.0f}"
            )
    return ", ".join(found)


def lines(datasets: list[str], settings) -> list[str]:
    return [*map(of_dataset, datasets), *of_server(settings)]


def watch(datasets: list[str], settings, interval: float, stream=sys.stdout) -> None:
    """Shows the lines again and again; on a terminal in the same place."""
    while True:
        shown = lines(datasets, settings)
        if stream.isatty():
            stream.write("\x1b[H\x1b[2J")
        stream.write("\n".join(shown) + "\n")
        stream.flush()
        time.sleep(interval)


def as_json(datasets: list[str]) -> str:
    """What is known of each data set, for programs."""
    found = {}
    for name in datasets:
        path = Path(f".work/generate/{name}/status.json")
        found[name] = read_json(path) if path.exists() else None
    return json.dumps(found, indent=2)
