"""tokenize: joins served prompt and answer ids to training sequences with a loss mask."""

import _path  # noqa: F401, I001  (first: see there)
import argparse
from collections import Counter
from pathlib import Path

from eagle3.records import records
from eagle3.responses import responses
from eagle3.core.progress import counted
from eagle3.core.stage import main, running


def build(arguments: argparse.Namespace) -> None:
    with running(f"tokenize@{arguments.dataset}", arguments.params, [arguments.responses]) as stage:
        params, stats = stage.params.records, Counter()
        greedy = (
            responses.fingerprint(arguments.responses).get("sampling", {}).get("temperature") == 0
        )
        rows = counted(
            responses.read(arguments.responses),
            f"tokenize {arguments.dataset}",
            None,
            "conversations",
        )
        made = records.build(rows, params, stats)
        records.write(arguments.out, made, stats, params, greedy)
        stage.log(
            f"{stats['records']} records, {stats['tokens']:,} tokens, "
            f"{stats['supervised'] / stats['tokens']:.0%} supervised, {stats['cut']} cut, "
            f"{stats['truncated']} with a truncated answer"
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("dataset", help="name of a data set in params.yaml")
    parser.add_argument("--responses", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    main(parser, build)
