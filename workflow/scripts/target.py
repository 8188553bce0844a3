"""target: brings the target model to data/target, or describes it where it lies."""

import _path  # noqa: F401, I001  (first: see there)
import argparse
from pathlib import Path

from eagle3.core import sources
from eagle3.core.files import replacing, write_json
from eagle3.core.stage import main, running
from eagle3.target.model import convert_gguf, describe


def build(arguments: argparse.Namespace) -> None:
    with running("target", arguments.params, []) as stage:
        params = stage.params.target
        source = params.source
        path = sources.hub_snapshot(source) if source.hub else sources.local_path(source)
        with replacing(arguments.out) as folder:
            folder.mkdir(parents=True)
            if path.suffix == ".gguf":
                stage.log(f"converting {path.name} to a Hugging Face directory")
                convert_gguf(path, folder / "model")
                info = describe(folder / "model", params, outside=False)
            else:
                info = describe(path, params, outside=True)
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
