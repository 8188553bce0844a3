"""What the modules of the bridge share: where key files lie, the mark of a Snakemake that only
touches, and messages."""

import sys
from pathlib import Path

KEYS = Path(".build/keys")
TOUCHING = (
    "EAGLEMAKE_TOUCHING"  # set in the Snakemake that sync.py starts, which must not sync in turn
)


def log(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
