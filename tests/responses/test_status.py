"""What `make status` says while a run goes on, after its end, after a crash. Alone: python -m
pytest tests/responses/test_status.py"""

import io
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import server_parts as serving
import tiny
from eagle3.core import schema
from eagle3.responses import status
from eagle3.serving import server


@pytest.fixture
def project(in_tmp, tiny_model):
    """A project folder with one data set, as far as status reads it."""
    tiny.make_rows(in_tmp / "rows.jsonl", 3)
    content = tiny.params(tiny_model, {"own": (in_tmp / "rows.jsonl", "generate")})
    tiny.write_params(in_tmp, content)
    return in_tmp


def record(project, rows=6, answered=4, tokens=100):
    bar = status.Status(project / ".work/generate/own/status.json", "own", rows, 1, 50)
    bar.__enter__()
    for i in range(answered):
        bar.answered(tokens, i == 0, True)
    return bar


def test_the_share_that_was_cut_is_one_of_prompts_not_of_turns(project):
    bar = record(project, answered=1)
    bar.answered(10, False, False)
    bar.answered(10, False, True)
    bar.__exit__(None, None, None)
    assert "50% cut" in status.of_dataset("own")


def test_a_run_as_others_see_it(project):
    bar = record(project)
    bar.failed("timeout")
    bar._write()
    line = status.of_dataset("own")
    assert (
        line.startswith("own: running, 6/6 rows, 450 tokens, ")
        and "tokens/s in the last minute" in line
    )
    assert "left" in line and "25% cut" in line and line.endswith("errors: timeout 1")
    bar.__exit__(None, None, None)
    assert status.of_dataset("own").startswith("own: finished 0:0")


def test_after_a_crash_it_says_stopped(project):
    record(project, rows=9)
    path = project / ".work/generate/own/status.json"
    dead = subprocess.Popen(["true"])
    dead.wait()
    path.write_text(
        json.dumps(
            {
                **json.loads(path.read_text()),
                "process": [dead.pid, 1],
                "updated": time.time() - 3700,
            }
        )
    )
    assert status.of_dataset("own").startswith(
        "own: stopped 1:01:4"
    ) and "left" not in status.of_dataset("own")


def test_rows_made_elsewhere_and_none_at_all(project):
    assert status.of_dataset("own") == "own: nothing yet"
    (project / "data/responses/own").mkdir(parents=True)
    (project / "data/responses/own/raw_responses.jsonl").write_text("{}\n{}\n")
    assert status.of_dataset("own") == "own: 2 rows published, made elsewhere"


def test_the_server_with_its_metrics_and_without(project):
    target = serving.make_target(project / "target")
    assert status.of_server(schema.Server()) == ["server: none was started here"]
    with server.lease(serving.server_settings(), target, log=lambda text: None) as lease:
        [line] = status.of_server(schema.Server())
        assert (
            "ready for 0:0" in line
            and "0 restarts, running 0, queued 0, KV cache 25%, tokens/s 123" in line
        )
        assert (
            status.of_server(schema.Server(endpoints=[lease.urls[0], "http://127.0.0.1:9"]))[1]
            == "server http://127.0.0.1:9: no answer"
        )
    serving.wait_until(lambda: server.read_state()["phase"] == "stopped")
    serving.wait_until(lambda: not server.alive(server.read_state()))
    assert status.of_server(schema.Server())[0].endswith(": stopped")


def test_a_server_on_another_machine_of_a_shared_folder_is_told_from_ours(project):
    """Its process number must not be looked for here."""
    folder = server.SERVERS / "another-machine"
    folder.mkdir(parents=True)
    (folder / "state.json").write_text(
        json.dumps({"phase": "ready", "supervisor": [os.getpid(), 1], "url": "http://x"})
    )
    [line] = status.of_server(schema.Server())
    assert (
        line.startswith("server on another-machine: ready when it last wrote, 0:0")
        and server.read_state() == {}
    )


def test_the_command_prints_plain_lines_to_a_pipe(project):
    record(project)
    script = Path(status.__file__).parents[2] / "scripts/status.py"
    done = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, cwd=project, check=True
    )
    assert done.stdout.splitlines()[0].startswith("own: stopped") or done.stdout.startswith(
        "own: running"
    )
    assert (
        "\x1b" not in done.stdout
        and done.stdout.splitlines()[-1] == "server: none was started here"
    )
    watch = subprocess.Popen(
        [sys.executable, script, "--watch", "0.1"], stdout=subprocess.PIPE, text=True, cwd=project
    )
    lines = [
        watch.stdout.readline() for _ in range(5)
    ]  # several rounds arrive at once: nothing is held back
    watch.terminate()
    watch.wait()
    assert sum(line.startswith("own: ") for line in lines) >= 2 and "\x1b" not in "".join(lines)
    told = subprocess.run(
        [sys.executable, script, "--json"], capture_output=True, text=True, cwd=project, check=True
    )
    assert json.loads(told.stdout)["own"]["tokens"] >= 50


def test_a_terminal_is_redrawn(project, monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    shown, rounds = Terminal(), iter(range(2))

    def sleep(_):
        if next(rounds, None) is None:
            raise KeyboardInterrupt

    monkeypatch.setattr(status.time, "sleep", sleep)
    with pytest.raises(KeyboardInterrupt):
        status.watch(["own"], schema.Server(), 1, shown)
    assert shown.getvalue().count("\x1b[H\x1b[2J") == 3
    assert os.linesep in shown.getvalue()
