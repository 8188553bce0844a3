"""Environment variables that libraries read while they are loaded. Every script imports this first,
and so do the tests."""

import os

DEFAULTS = {
    # How often a thread of OpenMP looks before it sleeps. By default for milliseconds, in which it
    # keeps the core from the thread that it waits for: beside one other busy process, small
    # products on two cores took 20 times as long as on idle ones, with this 4 times, and 1.1 times
    # on idle ones (benchmarks/openmp_spin.py).
    "GOMP_SPINCOUNT": "1000",
    "TOKENIZERS_PARALLELISM": "false",
    # Other libraries' bars, which a log keeps as one endless line.
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "TQDM_DISABLE": "1",
}
for _name, _value in DEFAULTS.items():
    os.environ.setdefault(_name, _value)
