"""plan: what the build of params.yaml costs in rows, tokens, bytes and hours, before anything
runs."""

import _path  # noqa: F401, I001  (first: see there)
import argparse
import json
import re
import sys

from eagle3.core import params as parameters
from eagle3.commands import plan
from eagle3.commands import planpage
from eagle3.core.errors import UserError

UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}


def byte_count(text: str) -> int:
    """'9.2TB' -> 9200000000000."""
    match = re.fullmatch(r"([0-9.]+)\s*([kmgt]?)b?", text.strip().lower())
    if not match:
        raise argparse.ArgumentTypeError(f"{text!r} is no size; write 9.2TB or a number of bytes")
    return int(float(match[1]) * UNITS[match[2]])


def say(text: str) -> None:
    print(f"plan: {text}", file=sys.stderr)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--params", default="params.yaml", help="parameter file, a recipe for example"
    )
    parser.add_argument("--json", action="store_true", help="print plain values for programs")
    parser.add_argument(
        "--hidden-size", type=int, help="width of the target's states, while the target is not here"
    )
    parser.add_argument(
        "--disk", type=byte_count, help="plan for this much free disk, such as 9.2TB"
    )
    for name, what in (("generate", "answered"), ("extract", "extracted"), ("train", "trained")):
        parser.add_argument(f"--{name}-rate", type=float, help=f"tokens {what} per second")
    arguments = parser.parse_args()
    try:
        params = parameters.load(arguments.params)
        assumed = plan.Rates.assumed(params)
        rates = plan.Rates(
            arguments.generate_rate or assumed.generate,
            arguments.extract_rate or assumed.extract,
            arguments.train_rate or assumed.train,
        )
        found = plan.make(params, rates, arguments.hidden_size, arguments.disk, log=say)
    except UserError as error:
        sys.exit(f"error: {error}")
    print(json.dumps(found, indent=2) if arguments.json else planpage.page(found), end="")


if __name__ == "__main__":
    main()
