"""vocab: chooses the draft vocabulary from the supervised tokens of all data sets."""

import _path  # noqa: F401, I001  (first: see there)
import argparse
from collections import Counter
from pathlib import Path

from eagle3.records import records
from eagle3.records import draft_vocab as vocab
from eagle3.core.errors import UserError
from eagle3.core.files import digest_file, write_json
from eagle3.core.progress import counted
from eagle3.core.stage import main, running
from eagle3.target.model import Target


def build(arguments: argparse.Namespace) -> None:
    with running("vocab", arguments.params, [arguments.target, arguments.records]) as stage:
        names = sorted(stage.params.datasets)
        target, size = Target(arguments.target), stage.params.vocab.size
        counts = {name: count_supervised(arguments.records / f"{name}.parquet") for name in names}
        train = sum((c["train"] for c in counts.values()), Counter())
        required = vocab.required_ids(target.tokenizer, target.stop_ids, target.vocab_size)
        ids = vocab.choose(train, required, size, target.vocab_size)
        chosen = set(ids)
        coverage = {
            split: share(sum((c[split] for c in counts.values()), Counter()), chosen)
            for split in ("train", "validation")
        }
        if coverage["train"] < stage.params.vocab.min_coverage:
            raise UserError(
                f"the draft vocabulary of {size} covers {coverage['train']:.1%} of supervised "
                "tokens, less than "
                f"vocab.min_coverage {stage.params.vocab.min_coverage:.1%}; raise vocab.size"
            )
        write_json(
            arguments.out.with_suffix(".json"),
            {
                "size": size,
                "distinct_supervised": len(train),
                "coverage": coverage,
                "coverage_by_dataset": {
                    name: share(c["train"] + c["validation"], chosen) for name, c in counts.items()
                },
                "datasets": {
                    name: digest_file(arguments.records / f"{name}.parquet") for name in names
                },
            },
        )
        vocab.write(arguments.out, ids, target.vocab_size)
        stage.log(
            f"{size} draft tokens; {len(train)} distinct ones are supervised, "
            f"{coverage['train']:.2%} of their occurrences covered"
        )


def count_supervised(path: Path) -> dict[str, Counter]:
    counts = {"train": Counter(), "validation": Counter()}
    for record in counted(records.read(path), f"vocab {path.stem}", records.count(path), "records"):
        counts[record.split].update(
            i for i, kept in zip(record.input_ids, record.loss_mask) if kept
        )
    return counts


def share(counts: Counter, chosen: set[int]) -> float:
    """Share of occurrences that the draft vocabulary covers; 1 where nothing was counted."""
    total = sum(counts.values())
    return sum(n for i, n in counts.items() if i in chosen) / total if total else 1.0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", type=Path, default=Path("data/target"))
    parser.add_argument("--records", type=Path, default=Path("data/records"))
    parser.add_argument("--out", type=Path, default=Path("data/vocab/draft_vocab.safetensors"))
    main(parser, build)
