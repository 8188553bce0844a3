"""target: checks that every stage can work with the target model, and brings it to data/target or
describes it where it lies."""

import _path  # noqa: F401, I001  (first: see there)
import argparse
from pathlib import Path

from eagle3.core import params as parameters
from eagle3.core import sources
from eagle3.core.files import replacing, write_json
from eagle3.core.stage import main, running
from eagle3.preflight import checks
from eagle3.target.model import convert_gguf, describe, model_config


def build(arguments: argparse.Namespace) -> None:
    with running("target", arguments.params, []) as stage:
        params = stage.params.target
        source = params.source
        path = sources.hub_snapshot(source) if source.hub else sources.local_path(source)
        whole = parameters.load(arguments.params)
        with replacing(arguments.out) as folder:
            folder.mkdir(parents=True)
            if path.suffix == ".gguf":
                stage.log(f"converting {path.name} to a Hugging Face directory")
                convert_gguf(path, folder / "model")
                path = folder / "model"
            checks.check_config(model_config(path), whole, stage.log)
            checks.check_files(path, whole)
            info = describe(path, params, outside=path != folder / "model")
            write_json(folder / "target.json", info)
        stage.log(
            f"{info['architecture']}, {info['num_layers']} layers, hidden size "
            f"{info['hidden_size']}, "
            f"vocabulary {info['vocab_size']}, digest {info['digest'][:12]}"
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("data/target"))
    main(parser, build)
