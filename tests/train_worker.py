"""One of several training processes of test_trainer.py: FOLDER DATA KIND MICRO_BATCHES STOP_AT OUT."""

import json
import os
import signal
import sys
from pathlib import Path

import training
from eagle3.errors import Refusal
from eagle3.trainer import Stop

folder, data, kind, micro_batches, stop_at, out = sys.argv[1:]
found = {}
try:
    trainer = training.make_trainer(Path(folder), Path(data), micro_batches=int(micro_batches),
                                    runtime={"parallel": kind, "checkpoint_every": 1000})
    if stop_at != "None" and trainer.leader:  # one process gets the signal; all of them stop after the same update
        step = trainer._step

        def then_signal(update):
            figures = step(update)
            if update.number == int(stop_at):
                os.kill(os.getpid(), signal.SIGTERM)
            return figures

        trainer._step = then_signal
    done = trainer.run()
    found = {"update": done.update, "history": done.history}
except Stop as stop:
    found = {"update": int(str(stop).split("update ")[1].split()[0])}
except Refusal as refusal:
    found = {"refused": str(refusal)}
if os.environ.get("RANK", "0") == "0":
    Path(out).write_text(json.dumps(found))
