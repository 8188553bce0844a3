"""trace: lists what a drafter was made from, down to data set rows and server fingerprint, and what
is missing here."""

import _path  # noqa: F401, I001  (first: see there)
import argparse
import json
import sys
from pathlib import Path

from eagle3.commands import trace as lineage
from eagle3.core.errors import UserError


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "drafter",
        type=Path,
        nargs="?",
        default=Path("data/drafter"),
        help="folder that train wrote",
    )
    parser.add_argument("--json", action="store_true", help="print plain values for programs")
    arguments = parser.parse_args()
    try:
        found = lineage.trace(arguments.drafter)
    except UserError as error:
        sys.exit(f"error: {error}")
    print(json.dumps(found, indent=2) if arguments.json else lineage.page(found), end="")


if __name__ == "__main__":
    main()
