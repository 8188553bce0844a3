"""Runs of generation in processes that tests can kill: python tests/answer_worker.py < LINES

Each line of standard input names a FOLDER; a process of its own is forked for it, its pid printed,
and its exit code when it ends. So a run starts without importing everything again, which lets a
test kill hundreds of them.

FOLDER holds `target/`, `prompts.parquet` and `settings.json` (the section `server`, and
`concurrency`); the journal is in FOLDER/work, the artifact in FOLDER/out. Everything is the real
thing except the renderer, which needs no tokenizer and so starts at once."""

import itertools
import json
import os
import sys
import traceback
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[1] / "workflow")]

from eagle3.core import schema  # noqa: E402
from eagle3.core.process import exclusive  # noqa: E402
from eagle3.responses import answering as generation  # noqa: E402
from eagle3.responses.journal import Journal  # noqa: E402
from eagle3.responses.sglang_engine import SGLangEngine  # noqa: E402
from eagle3.target.model import Target  # noqa: E402

SAMPLING = schema.Sampling(max_new_tokens=16)


class PlainRenderer:
    """Text whose words are numbers is its own ids; 5 opens an answer."""

    def prompt_ids(self, messages, tools=None) -> list[int]:
        return [int(word) for message in messages for word in message["content"].split()] + [5]

    def decode(self, ids: list[int]) -> str:
        return " ".join(map(str, ids))


def main(folder: Path) -> None:
    settings = json.loads((folder / "settings.json").read_text())
    target = Target(folder / "target")
    target.stop_ids = [2]  # the misbehaving server's; the target has no tokenizer to say so
    with (
        exclusive(folder / "work", "the worker"),
        Journal(folder / "work", SAMPLING.model_dump()) as journal,
    ):
        answering = generation.Answering(
            folder / "prompts.parquet",
            PlainRenderer(),
            journal,
            SAMPLING.model_dump(),
            256,
            settings.get("token_budget"),
        )
        requests = answering.requests()
        if first := next(requests, None):
            runtime = schema.Runtime(
                concurrency=settings["concurrency"], max_attempts=50, stall_timeout=30
            )
            engine = SGLangEngine(
                target, SAMPLING, schema.Server(**settings["server"]), runtime, log=print
            )
            with engine as made_by:
                journal.note_maker(made_by)
                engine.run(itertools.chain([first], requests), answering.on_result)
        answering.publish(folder / "out", {"made_by": journal.made_by()})


def fork(folder: Path) -> int:
    """Starts a run in a process of its own, whose output goes to FOLDER/worker.log. Returns its
    pid."""
    if pid := os.fork():
        return pid
    code = 1
    try:
        log = os.open(folder / "worker.log", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.chdir(folder.parent)
        main(folder)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(code)


if __name__ == "__main__":
    for line in sys.stdin:
        child = fork(Path(line.strip()))
        print(child, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
