"""The stage's script on finished shards. Alone: python -m pytest
tests/training/test_train_script.py"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import tiny
import tiny_drafter
import training_parts as training
from eagle3.core.files import write_json
from eagle3.drafter import export
from eagle3.hidden_states import shards
from eagle3.records import draft_vocab as vocab
from eagle3.target import layers

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def project(in_tmp, tiny_model):
    """A folder with everything that the train stage reads."""
    target = tiny_drafter.make_target(in_tmp / "data/target", tiny_model)
    rows = [
        training.make_row(f"r{i}", [False] * 4 + [True] * (6 + i % 5), i, 32, 400)
        for i in range(10)
    ]
    folder = training.write_shards(in_tmp / "data/hidden_states/one", rows)
    kept = shards.read_manifest(folder)
    shards.write_manifest(
        folder,
        {
            "target_digest": target.digest,
            "hidden_size": 32,
            "layers": layers.captured_layers(8),
            "convention": layers.PLUS_ONE,
            "last_is": "after_norm",
            "dtype": "float32",
        },
        kept["shards"],
    )
    vocab.write(in_tmp / "data/vocab/draft_vocab.safetensors", list(range(0, 400, 2)), 400)
    write_json(in_tmp / "data/vocab/draft_vocab.json", {"datasets": {"one": "digest"}})
    (in_tmp / "dvc.yaml").write_text((ROOT / "dvc.yaml").read_text())
    (in_tmp / "workflow").symlink_to(ROOT / "workflow")
    return in_tmp


def settings(project, runtime: dict, **train) -> None:
    content = tiny.params(project, {"one": (project / "none.jsonl", "generate")})
    content["train"].update(batch_tokens=32, epochs=2, **train)
    content["runtime"].update(runtime)
    tiny.write_params(project, content)


def start(project) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "workflow/scripts/train.py"],
        cwd=project,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def test_two_processes_leave_a_drafter_that_loads(project):
    settings(
        project,
        {"nproc_per_node": 2, "parallel": "fsdp"},
        micro_batches=2,
        init="least_squares",
    )
    done = start(project)
    said = done.communicate(timeout=300)[0]
    assert done.returncode == 0, said[-3000:]
    tensors, config = export.read(project / "data/drafter")
    assert tensors["d2t"].tolist() == list(range(200)) and config["draft_vocab_size"] == 200
    metrics = json.loads((project / "data/drafter/metrics.json").read_text())
    assert metrics["accept_length"] >= metrics["accept_length_untrained"] >= 1
    training_json = json.loads((project / "data/drafter/training.json").read_text())
    assert (
        training_json["params"]["init"] == "least_squares"
        and training_json["hidden_states"]["one"]["rows"] == 10
    )


def test_sigterm_saves_and_the_same_command_continues(project):
    settings(project, {"checkpoint_every": 100000}, max_updates=100000)
    content = tiny.read_params(project)
    content["train"]["epochs"] = 50000
    tiny.write_params(project, content)
    first = start(project)
    time.sleep(0.1)
    while "continues" not in (line := first.stdout.readline()) and "updates/s" not in line:
        assert line, "ended before its first update"
    first.send_signal(signal.SIGTERM)
    said = first.communicate(timeout=120)[0]
    assert first.returncode == 130 and "the same command continues it" in said
    kept = [int(p.stem.split("-")[1]) for p in (project / ".work/train").glob("*/update-*.pt")]
    assert len(kept) == 1 and kept[0] > 0
    second = start(project)
    while f"continues at update {kept[0]} of" not in (line := second.stdout.readline()):
        assert line, "did not continue"
    second.send_signal(signal.SIGTERM)
    second.communicate(timeout=120)
    assert not (project / "data/drafter").exists()
