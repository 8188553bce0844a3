"""status: how generation stands. Changes nothing; works while a build runs and after a crash."""

import _path  # noqa: F401, I001  (first: see there)
import argparse
import contextlib
import sys

from eagle3.core import params
from eagle3.responses import status
from eagle3.core.errors import UserError


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--params", default="params.yaml")
    parser.add_argument(
        "--watch",
        nargs="?",
        type=float,
        const=2.0,
        metavar="SECONDS",
        help="show it again and again",
    )
    parser.add_argument(
        "--json", action="store_true", help="everything known of the data sets, for programs"
    )
    arguments = parser.parse_args()
    try:
        content = params.load(arguments.params)
    except UserError as error:
        sys.exit(f"error: {error}")
    names = [name for name, dataset in content.datasets.items() if dataset.answers == "generate"]
    if arguments.json:
        print(status.as_json(names))
    elif arguments.watch:
        with contextlib.suppress(KeyboardInterrupt, BrokenPipeError):
            status.watch(names, content.server, arguments.watch)
    else:
        given = [
            f"{name}: its answers are given, nothing to generate"
            for name in content.datasets
            if name not in names
        ]
        print("\n".join([*status.lines(names, content.server), *given]))


if __name__ == "__main__":
    main()
