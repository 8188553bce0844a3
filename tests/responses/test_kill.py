"""kill -9 at random, of the generator and of the server. Alone: KILLS=200 python -m pytest
tests/responses/test_kill.py

No acknowledged row is lost, none is there twice, and the final file is the one of an undisturbed
run, byte by byte."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import server_parts as serving
from eagle3.prompts import prompts
from eagle3.serving import server
from server_parts import wait_until

KILLS = int(os.environ.get("KILLS", "8"))
WORKER = Path(__file__).parents[1] / "answer_worker.py"


def make_folder(folder: Path, count: int, settings) -> Path:
    """Prompts of one, two or three turns; the same ones in every folder."""
    chooser = random.Random(0)
    made = []
    for i in range(count):
        messages = []
        for _ in range(chooser.choice((1, 1, 2, 3))):
            messages += [
                {
                    "role": "user",
                    "content": f"{7 + i % 390} {i // 390 + 3} {chooser.randrange(3, 400)}",
                },
                {"role": "assistant", "content": None},
            ]
        ids = [int(word) for word in messages[0]["content"].split()] + [5]
        made.append(prompts.Prompt(f"row{i:05}", messages, [], ids, i))
    folder.mkdir()
    (folder / "target").symlink_to(folder.parent / "t")  # one target, so one server
    prompts.write(folder / "prompts.parquet", made, [], {})
    (folder / "settings.json").write_text(
        json.dumps({"server": settings.model_dump(), "concurrency": 8})
    )
    return folder


def lines(folder: Path) -> list[bytes]:
    """Whole lines of the journal."""
    path = folder / "work/journal.jsonl"
    return path.read_bytes().split(b"\n")[:-1] if path.exists() else []


class Runs:
    """Starts runs of generation, one after another, and waits for them."""

    def __init__(self):
        self.process = subprocess.Popen(
            [sys.executable, str(WORKER)], text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )

    def start(self, folder: Path) -> None:
        self.folder = folder
        print(folder, file=self.process.stdin, flush=True)
        self.pid = int(self.process.stdout.readline())

    def running(self) -> bool:
        return not serving.gone(self.pid)

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        assert self.process.stdout.readline() == "-9\n", self.log()

    def finish(self) -> None:
        assert self.process.stdout.readline() == "0\n", self.log()

    def log(self) -> str:
        return (self.folder / "worker.log").read_text()[-2000:]


def test_killed_at_random_nothing_is_lost_repeated_or_mixed(in_tmp, monkeypatch):
    """Catalogue C01, C03, A14, C18."""
    monkeypatch.setenv("MISBEHAVE", json.dumps({"late": 0.05, "cut": 0.02, "refuse": 0.02}))
    settings = serving.server_settings(max_restarts=10**6, restart_backoff=0.01)
    count = 60 + 60 * KILLS
    target = serving.make_target(in_tmp / "t")
    calm, wild = (make_folder(in_tmp / name, count, settings) for name in ("calm", "wild"))
    chooser = random.Random()
    killed: Counter = Counter()
    with server.lease(settings, target, log=print):  # one server, which outlives its users
        runs, last = Runs(), 0
        runs.start(wild)
        while sum(killed.values()) < KILLS:
            wait_until(lambda: len(lines(wild)) > last or not runs.running(), 120)
            assert runs.running(), runs.log()
            time.sleep(chooser.uniform(0, 0.2))
            what = chooser.choice(("generator", "server", "both"))
            if what != "generator":
                try:
                    os.kill(server.read_state()["server"] or 0x3FFFFFFF, signal.SIGKILL)
                except ProcessLookupError:
                    continue  # it is just being started again
            if what != "server":
                runs.kill()
            killed[what] += 1
            acknowledged = lines(wild)
            last = len(acknowledged)
            if what != "server":
                runs.start(wild)
        runs.finish()
        assert lines(wild)[:last] == acknowledged
        runs.start(calm)
        runs.finish()
    print(f"killed {dict(killed)}, {len(lines(wild))} rows")
    keys = Counter(json.loads(line)["key"] for line in lines(wild))
    assert max(keys.values()) == 1 and keys.keys() == {
        json.loads(line)["key"] for line in lines(calm)
    }
    assert (wild / "out/errors.jsonl").read_bytes() == b""
    for name in ("raw_responses.jsonl", "errors.jsonl", "fingerprint.json"):
        assert (wild / "out" / name).read_bytes() == (calm / "out" / name).read_bytes(), name
    rows = [json.loads(line) for line in (wild / "out/raw_responses.jsonl").open()]
    assert [row["id"] for row in rows] == [f"row{i:05}" for i in range(count)]
    for row in rows:
        for turn in row["turns"]:
            assert turn["output_ids"] == serving.answer_ids(turn["prompt_ids"], 16)
