"""One run of generation in a process that tests can kill: python tests/answer_worker.py FOLDER

FOLDER holds `target/`, `prompts.parquet` and `settings.json` (the section `server`, and `concurrency`); the journal is
in FOLDER/work, the artifact in FOLDER/out. Everything is the real thing except the renderer, which needs no tokenizer
and so starts at once.
"""

import itertools
import json
import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[1] / "workflow")]

from eagle3 import generation, schema  # noqa: E402
from eagle3.journal import Journal  # noqa: E402
from eagle3.process import exclusive  # noqa: E402
from eagle3.sglang_engine import SGLangEngine  # noqa: E402
from eagle3.target import Target  # noqa: E402

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
    with exclusive(folder / "work", "the worker"), Journal(folder / "work", SAMPLING.model_dump()) as journal:
        answering = generation.Answering(folder / "prompts.parquet", PlainRenderer(), journal, SAMPLING.model_dump(), 256,
                                         settings.get("token_budget"))
        requests = answering.requests()
        if first := next(requests, None):
            runtime = schema.Runtime(concurrency=settings["concurrency"], max_tries=50, stall_timeout=30)
            engine = SGLangEngine(target, SAMPLING, schema.Server(**settings["server"]), runtime, say=print)
            with engine as made_by:
                journal.note_maker(made_by)
                engine.run(itertools.chain([first], requests), answering.on_result)
        answering.publish(folder / "out", {"made_by": journal.made_by()})


if __name__ == "__main__":
    main(Path(sys.argv[1]))
