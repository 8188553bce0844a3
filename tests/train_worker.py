"""One of two training processes of test_trainer.py: FOLDER DATA KIND OUT. Stops at a signal in its
third update."""

import json
import os
import signal
import sys
from pathlib import Path

import training_parts as training
from eagle3.core.errors import UserError
from eagle3.training.trainer import Stop

folder, data, kind, out = sys.argv[1:]
around, seen = {"parallel": kind, "checkpoint_every": 1000}, {}
try:
    training.make_trainer(Path(folder), Path(data), micro_batches=1, runtime=around)
except UserError as error:
    seen["refused"] = str(error)
trainer = training.make_trainer(Path(folder), Path(data), micro_batches=2, runtime=around)
if trainer.leader:  # the other process gets none and must stop after the same update all the same
    step = trainer._step

    def then_signal(update):
        figures = step(update)
        if update.number == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return figures

    trainer._step = then_signal
try:
    trainer.run()
except Stop as stop:
    seen["stopped"] = str(stop)
if trainer.leader:
    Path(out).write_text(json.dumps(seen))
trainer.processes.close()
