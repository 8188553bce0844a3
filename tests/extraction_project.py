"""Records of random ids, and a DVC project whose only stage is extract."""

import json
import random
import shutil
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import tiny
import yaml
from eagle3.core.files import write_json
from eagle3.records import records as record_files
from eagle3.records.records import Record
from eagle3.target.model import describe

BAD = 399  # an id that no record has unless asked for


def make_records(path: Path, count: int, bad: tuple[int, ...] = ()) -> Path:
    made = []
    for n in range(count):
        chooser = random.Random(n)
        ids = [chooser.randrange(3, 390) for _ in range(chooser.randrange(8, 40))]
        made.append(
            Record(
                f"r{n}",
                ids + [BAD] * (n in bad),
                [i > 3 for i in range(len(ids) + (n in bad))],
                "train",
            )
        )
    stats = Counter(
        tokens=sum(len(r.input_ids) for r in made), supervised=sum(sum(r.loss_mask) for r in made)
    )
    record_files.write(
        path,
        made,
        stats,
        SimpleNamespace(min_supervised_share=0, max_supervised_share=1),
        greedy=False,
    )
    return path


def describe_target(folder: Path, model: Path) -> Path:
    """data/target of a model that stays where it is."""
    params = SimpleNamespace(
        dtype="float32",
        quantization=None,
        kv_cache_dtype="auto",
        context_length=256,
        chat_template_kwargs={},
        template_date="2025-01-01",
        trust_remote_code=False,
    )
    write_json(folder / "target.json", describe(model, params, outside=True))
    return folder


def make(folder: Path, model: Path, count: int = 20) -> Path:
    """A project with `count` records of one data set, "one"."""
    folder.mkdir(parents=True)
    shutil.copytree(
        tiny.ROOT / "workflow", folder / "workflow", ignore=shutil.ignore_patterns("__pycache__")
    )
    stage = yaml.safe_load((tiny.ROOT / "dvc.yaml").read_text())["stages"]["extract"]["do"]
    stage = json.loads(json.dumps(stage).replace("${key}", "${item}"))
    (folder / "dvc.yaml").write_text(
        yaml.safe_dump({"stages": {"extract": {"foreach": ["one"], "do": stage}}})
    )
    describe_target(folder / "data/target", model)
    (folder / "data/records").mkdir()
    make_records(folder / "data/records/one.parquet", count)
    content = tiny.params(model, {"one": (Path("none"), "given")})
    content["hidden_states"] = {"dtype": "bfloat16", "shard_bytes": 65536}
    tiny.write_params(folder, content)
    tiny.run(folder, "dvc", "init", "--no-scm", "-q")
    tiny.run(folder, "dvc", "config", "cache.type", "symlink")
    return folder
