"""extract: captures the target's hidden states for the records of a data set."""

import _path  # noqa: F401, I001  (first: see there)
import argparse
from pathlib import Path

from eagle3 import extraction, layers, records
from eagle3.files import digest_file
from eagle3.published import cached_file
from eagle3.stage import main, running
from eagle3.target import Target


def build(arguments: argparse.Namespace) -> None:
    name = arguments.dataset
    with running(f"extract@{name}", arguments.params, [arguments.records, arguments.target]) as stage:
        params, target = stage.params.hidden_states, Target(arguments.target)
        captured = layers.captured_layers(target.num_layers, params.layers)
        identity = {
            "target_digest": target.digest, "hidden_size": target.hidden_size, "architecture": target.info["architecture"],
            "layers": captured, "convention": layers.convention_of(target.info["architecture"], params.convention),
            "last_is": "after_final_norm", "dtype": params.dtype, "engine": params.engine}

        def make_capture():
            from eagle3.capture import TransformersCapture

            return TransformersCapture(target, captured)

        extraction.extract(
            arguments.records, arguments.out, stage.work, make_capture, target, identity, params, stage.params.runtime,
            reusable=lambda key: cached_file(stage.name, str(arguments.out), f"{key}.safetensors"),
            greedy=records.metadata(arguments.records)["greedy"], more={"records_digest": digest_file(arguments.records),
                                "tokenizer_digest": target.info["tokenizer_digest"]}, say=stage.say)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("dataset", help="name of a data set in params.yaml")
    parser.add_argument("--records", type=Path, required=True)
    parser.add_argument("--target", type=Path, default=Path("data/target"))
    parser.add_argument("--out", type=Path, required=True)
    main(parser, build)
