"""The training loop. Alone: python -m pytest tests/training/test_trainer.py"""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import server_parts as serving
import torch
import training_parts as training
from eagle3.core.errors import UserError
from eagle3.hidden_states.shards import ShardSet
from eagle3.training.schedule import learning_rate
from eagle3.training.trainer import Stop


@pytest.fixture
def data(in_tmp):
    return training.write_shards(in_tmp / "set", training.many_rows())


def interrupt_at(trainer, update: int) -> None:
    """The signal arrives in the middle of an update, as it would from outside."""
    step = trainer._step

    def then_signal(what):
        found = step(what)
        if what.number == update:
            os.kill(os.getpid(), signal.SIGTERM)
        return found

    trainer._step = then_signal


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"micro_batches": 2, "schedule": "wsd"},
        {"path": "readable"},
    ],
)
def test_stopped_anywhere_and_resumed_it_ends_with_the_same_bits(data, in_tmp, more):
    """Catalogue E15: weights, optimizer, learning rate and history go on where they were."""
    whole = training.make_trainer(in_tmp / "whole", data, **more)
    expected = whole.run()
    for update in range(0, whole.total - 1, 2):
        folder = in_tmp / f"stopped-{update}"
        first = training.make_trainer(folder, data, runtime={"checkpoint_every": 1000}, **more)
        interrupt_at(first, update)
        with pytest.raises(Stop, match=f"update {update + 1} of {whole.total}"):
            first.run()
        said = []
        found = training.make_trainer(
            folder, data, said.append, runtime={"checkpoint_every": 1000}, **more
        ).run()
        assert said == [f"continues at update {update + 1} of {whole.total}"]
        assert found.history == expected.history and found.best_update == expected.best_update
        assert all(torch.equal(found.best[name], expected.best[name]) for name in expected.best)


def test_weights_of_the_last_checkpoint_are_the_same_bits(data, in_tmp):
    whole = training.make_trainer(in_tmp / "whole", data)
    whole.run()
    stopped = training.make_trainer(in_tmp / "stopped", data)
    interrupt_at(stopped, 3)
    with pytest.raises(Stop):
        stopped.run()
    again = training.make_trainer(in_tmp / "stopped", data)
    again.run()
    for mine, other in zip(again.drafter.parameters(), whole.drafter.parameters()):
        assert torch.equal(mine, other)


def test_the_paths_train_alike(data, in_tmp):
    ends = [
        training.make_trainer(in_tmp / path, data, path=path, epochs=20).run().history
        for path in ("fast", "readable")
    ]
    assert ends[0][-1]["loss"] == pytest.approx(ends[1][-1]["loss"], rel=1e-3)
    assert ends[0][-1]["loss"] < 0.8 * ends[0][1]["loss"]


def test_a_broken_state_stops_at_once_and_names_the_records(in_tmp):
    """Catalogue E13: NaN must not reach the weights that are kept."""
    rows = training.many_rows()
    rows[2]["last"][4] = float("nan")
    trainer = training.make_trainer(in_tmp / "run", training.write_shards(in_tmp / "set", rows))
    with pytest.raises(
        UserError, match=r"loss of update \d is nan; records in the batch: .*\br2\b"
    ):
        trainer.run()
    kept = trainer.checkpoints.latest()
    assert kept is None or all(
        torch.isfinite(t).all() for t in kept["weights"].values() if t.is_floating_point()
    )


def test_an_update_without_supervision_stops_and_names_the_records(in_tmp):
    rows = [training.make_row(f"r{i}", [False] * 8, i) for i in range(5)] + training.many_rows(2)
    trainer = training.make_trainer(in_tmp / "run", training.write_shards(in_tmp / "set", rows))
    with pytest.raises(UserError, match="no supervised token; records in the batch: r"):
        trainer.run()


def test_rows_without_supervision_cost_nothing_beside_others(in_tmp):
    rows = [
        *training.many_rows(6),
        training.make_row("empty", [False] * 8, 7),
        *training.many_rows(2),
    ]
    done = training.make_trainer(
        in_tmp / "run", training.write_shards(in_tmp / "set", rows), batch_tokens=1000
    ).run()
    assert done.update == 3


def test_the_best_validation_is_kept_not_the_last(data, in_tmp):
    """Catalogue E16: loss may fall while accept length has passed its peak."""
    done = training.make_trainer(
        in_tmp / "run", data, epochs=12, lr=5e-2, schedule="constant"
    ).run()
    lengths = [row["accept_length"] for row in done.history]
    assert (
        done.best_length == max(lengths)
        and done.history[lengths.index(max(lengths))]["update"] == done.best_update
    )


def test_no_training_sequence_is_refused(in_tmp):
    data = training.write_shards(in_tmp / "set", training.many_rows(2))
    with pytest.raises(UserError, match="validation_fraction"):
        training.make_trainer(in_tmp / "run", data)


def test_learning_rates_depend_on_the_update_alone():
    rates = {
        kind: [learning_rate(u, 100, 1.0, 0.1, kind) for u in range(100)]
        for kind in ("cosine", "constant", "wsd")
    }
    for found in rates.values():
        assert found[:10] == pytest.approx([(u + 1) / 10 for u in range(10)])
    assert rates["constant"][99] == 1 and rates["wsd"][80] == 1 and rates["wsd"][99] < 0.1
    assert rates["cosine"][55] == pytest.approx(0.5)


def test_curves_reach_the_trackers_without_a_network(data, in_tmp, monkeypatch):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    training.make_trainer(
        in_tmp / "run", data, runtime={"trackers": ["tensorboard", "wandb"]}
    ).run()
    events = EventAccumulator(str(in_tmp / "logs/trackers/tensorboard"))
    events.Reload()
    assert "loss" in events.Tags()["scalars"] and len(events.Scalars("loss")) >= 2
    [offline] = (in_tmp / "logs/trackers/wandb").glob("offline-run-*/*.wandb")
    serving.wait_until(
        lambda: b"accept_length" in offline.read_bytes()
    )  # a process of its own writes it


def test_a_tracker_that_is_not_installed_is_refused_by_name(data, in_tmp, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(UserError, match="pip install wandb"):
        training.make_trainer(in_tmp / "run", data, runtime={"trackers": ["wandb"]}).run()


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_two_processes_train_as_one_and_another_number_resumes(data, in_tmp, kind):
    """Two processes stop at a signal that one of them got; one process goes on from their
    checkpoint. Losses and accept lengths of both parts are those of one process from the start.
    Also: batches that two cannot share out are refused."""
    expected = training.make_trainer(in_tmp / "one", data, micro_batches=2).run()
    out, here = in_tmp / "seen.json", Path(__file__).parents[1]
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node=2",
            str(here / "train_worker.py"),
            str(in_tmp / "run"),
            str(data),
            kind,
            str(out),
        ],
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=280,
        env={
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": f"{here.parent / 'workflow'}:{here}",
        },
    )
    assert out.exists(), done.stdout[-3000:]
    seen = json.loads(out.read_text())
    assert (
        "train.micro_batches is 1, but 2 processes" in seen["refused"]
        and "update 3 of" in seen["stopped"]
    )
    said = []
    found = training.make_trainer(in_tmp / "run", data, said.append, micro_batches=2).run()
    assert said == [f"continues at update 3 of {expected.update}"]
    assert [row["loss"] for row in found.history[1:]] == pytest.approx(
        [row["loss"] for row in expected.history[1:]], rel=1e-4
    )
    assert found.history[-1]["accept_length"] == pytest.approx(
        expected.history[-1]["accept_length"], abs=0.05
    )


def test_several_threads_read_the_rows_in_order(data):
    from eagle3.training import loader

    rows = ShardSet([data], "train", {})
    reader = loader.Reader(rows)
    found = list(loader.ahead(lambda i: reader.rows([i])[0]["id"], range(len(rows)), 3))
    assert found == [rows[i]["id"] for i in range(len(rows))]
