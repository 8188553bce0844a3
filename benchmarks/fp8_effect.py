"""What storing hidden states in fp8 does to a drafter: the same training on the same states, rounded and not.

    PYTHONPATH=workflow python benchmarks/fp8_effect.py --params params.yaml

Needs a built data/hidden_states in bf16. Each variant is a copy of it in which the training sequences went through the
rounding; the validation sequences stay as they are, so that all drafters are judged by the same teacher. Variants:

    bf16            as stored
    fp8 blocks      what hidden_states.dtype float8_e4m3fn stores: a power of two for every 64 numbers of a token
    fp8 channels    one power of two for each channel of a sequence (measured and not used)
    bf16, new seed  the noise of training, for scale
"""

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path

import torch
import yaml
from eagle3 import fp8, shards
from eagle3.files import read_json, write_json
from eagle3.records import Record
from eagle3.shard_layout import block_of
from eagle3.shards import QUARANTINED, ShardSet, ShardWriter


def blocks(states: torch.Tensor, hidden_size: int) -> torch.Tensor:
    """[L, W] as fp8 with a scale for every block of a token gives it back."""
    return fp8.dequantise(*fp8.quantise(states, block_of(hidden_size)))


def channels(states: torch.Tensor, hidden_size: int) -> torch.Tensor:
    """[L, W] as fp8 with a scale for every channel of the sequence gives it back."""
    turned = states.T.contiguous()
    return fp8.dequantise(*fp8.quantise(turned, turned.shape[1])).T.contiguous()


VARIANTS = {"bf16": None, "fp8 blocks": blocks, "fp8 channels": channels, "bf16, new seed": None}


def copy(source: Path, folder: Path, name: str) -> dict[str, float]:
    """Writes the data sets of `source` with the variant's rounding of training sequences; its relative errors."""
    rounding, sums = VARIANTS[name], {"aux": [0.0, 0.0], "last": [0.0, 0.0]}
    shutil.rmtree(folder, ignore_errors=True)
    for dataset in sorted(path.parent.name for path in source.glob("*/manifest.json")):
        manifest = shards.read_manifest(source / dataset)
        sets = {split: iter(ShardSet([source / dataset], split, {}, verify=False)) for split in ("train", "validation")}
        (folder / dataset).mkdir(parents=True)
        entries = []
        for entry in manifest["shards"]:
            rows = [next(sets[split]) for split in entry["splits"] if split != QUARANTINED]
            splits = [split for split in entry["splits"] if split != QUARANTINED]
            records = [Record(row["id"], row["input_ids"].tolist(), row["loss_mask"].tolist(), split)
                       for row, split in zip(rows, splits)]
            writer = ShardWriter(folder / dataset, Path(entry["file"]).stem, records, manifest["hidden_size"], "bfloat16")
            for place, (row, split) in enumerate(zip(rows, splits)):
                stored = {"bad": torch.zeros(len(row["aux"]), 4, dtype=torch.bool)}
                for part in ("aux", "last"):
                    stored[part] = row[part].to(torch.bfloat16)
                    if rounding and split == "train":
                        rounded = rounding(stored[part], manifest["hidden_size"])
                        sums[part][0] += (rounded.float() - stored[part].float()).square().sum().item()
                        sums[part][1] += stored[part].float().square().sum().item()
                        stored[part] = rounded
                writer.write(place, stored, 0, len(row["aux"]))
            entries.append(writer.finish())
        # The variant's name is part of what training compares, so that none continues another's checkpoints.
        shards.write_manifest(folder / dataset, {**manifest, "dtype": "bfloat16", "engine": f"{manifest['engine']}, {name}"},
                              entries)
    return {part: (error / max(total, 1e-30)) ** 0.5 for part, (error, total) in sums.items()}


def train(options: argparse.Namespace, name: str, states: Path) -> dict:
    """metrics.json of a drafter trained on `states`."""
    params, out = options.work / "params.yaml", options.work / "drafter"
    content = yaml.safe_load(options.params.read_text())
    if name.endswith("new seed"):
        content["train"]["seed"] = content["train"].get("seed", 0) + 1
    content["hidden_states"]["dtype"] = "bfloat16"
    params.write_text(yaml.safe_dump(content))
    subprocess.run([sys.executable, "workflow/scripts/train.py", "--target", str(options.target), "--vocab",
                    str(options.vocab), "--hidden-states", str(states), "--out", str(out), "--params", str(params)],
                   check=True)
    return read_json(out / "metrics.json")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--params", type=Path, default=Path("params.yaml"))
    parser.add_argument("--target", type=Path, default=Path("data/target"))
    parser.add_argument("--vocab", type=Path, default=Path("data/vocab/draft_vocab.safetensors"))
    parser.add_argument("--hidden-states", type=Path, default=Path("data/hidden_states"))
    parser.add_argument("--variants", nargs="+", default=list(VARIANTS), choices=list(VARIANTS))
    parser.add_argument("--work", type=Path, default=Path(".work/fp8_effect"))
    options = parser.parse_args()
    found = {}
    for name in options.variants:
        folder = options.work / "states"
        errors = copy(options.hidden_states, folder, name)
        found[name] = {"relative_error": errors, **train(options, name, folder)}
        shutil.rmtree(folder)
    write_json(Path(os.environ.get("OUT", options.work)) / "fp8_effect.json", found)
    first = next(iter(found.values()))
    print("\nvariant           accept length  difference   accuracy by step          error aux, last")
    for name, one in found.items():
        print(f"{name:17} {one['accept_length']:12.4f} {one['accept_length'] / first['accept_length'] - 1:11.2%}   "
              f"{' '.join(f'{a:.4f}' for a in one['accuracy'].values()):24}  "
              f"{one['relative_error']['aux']:.4f}, {one['relative_error']['last']:.4f}")


if __name__ == "__main__":
    main()
