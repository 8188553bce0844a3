"""The bench in process: both arms, figures, agreement with simulation. Alone: python -m pytest
tests/bench/test_in_process.py"""

import pytest
import tiny_drafter
from eagle3.bench import in_process as benching
from eagle3.bench import statistics as measuring
from eagle3.bench import verdict as judging
from eagle3.bench.replay import Simulator
from eagle3.bench.speculate import Decoder
from eagle3.bench.statistics import Variant
from eagle3.target import layers


@pytest.fixture(scope="module")
def cells(tiny_target, learnt):
    captured = layers.captured_layers(tiny_target.num_layers)
    prompts = [
        {"dataset": "ab"[i % 2], "id": str(i), "prompt_ids": ids}
        for i, ids in enumerate(learnt.prompts)
    ]
    variant = Variant("3-1-4", learnt.folder, 3)
    measured = benching.measure(
        tiny_target, learnt.drafter, captured, prompts, variant, 12, repeats=2
    )
    hits = Simulator(tiny_target, learnt.drafter, captured).hits
    return measured, measuring.cells(measured, [variant], prompts, lambda _: hits)


def test_served_and_replayed_agree_exactly_in_process(cells):
    """The bound is 5 %; the same arithmetic on the same states leaves nothing between them."""
    (cell,) = cells[1]
    for figures in (cell["all"], *cell["datasets"].values()):
        assert figures["accept_length"]["replayed"] == figures["accept_length"]["served"]
    judging.check_sound(cell, 1.05, 1e-9, exact=True)


def test_sets_add_up_to_all(cells):
    (cell,) = cells[1]
    for key in ("prompts", "verify_cycles"):
        assert sum(f[key] for f in cell["datasets"].values()) == cell["all"][key]
    assert cell["all"]["prompts"] == 8 and cell["all"]["outputs"]["equal"] == 8
    assert cell["all"]["tokens"]["baseline"] == 2 * 8 * 12


def test_arms_take_turns_at_going_first(cells):
    """catalogue F05: whoever always comes second finds warm caches."""
    measured, _ = cells
    plain, drafted = measured.arms[None, 1].rows, measured.arms["3-1-4", 1].rows
    assert [row.id for row in plain] == [*map(str, range(8)), *map(str, reversed(range(8)))]
    assert [row.repeat for row in drafted] == [0] * 8 + [1] * 8
    assert sum(measured.arms[None, 1].walls.values()) == pytest.approx(
        sum(row.seconds for row in plain)
    )


def test_both_arms_warm_up_alike(tiny_target, learnt, monkeypatch):
    """Whatever a first run costs, it costs neither arm."""
    runs = []
    for name in ("plain", "speculative"):
        real = getattr(Decoder, name)

        def counted(self, prompt, *more, name=name, real=real):
            runs.append((name, more[0]))
            return real(self, prompt, *more)

        monkeypatch.setattr(Decoder, name, counted)
    prompts = [{"dataset": "a", "id": "0", "prompt_ids": learnt.prompts[0]}]
    captured = layers.captured_layers(tiny_target.num_layers)
    variant = Variant("3-1-4", learnt.folder, 3)
    measured = benching.measure(tiny_target, learnt.drafter, captured, prompts, variant, 12)
    assert sorted(runs[:2]) == [("plain", 8), ("speculative", 8)]
    assert sorted(runs[2:]) == [("plain", 12), ("speculative", 12)]
    assert all(len(arm.rows) == 1 for arm in measured.arms.values())


def test_an_untrained_drafter_is_refused(tiny_target, learnt):
    drafter = tiny_drafter.random_drafter(tiny_target, seed=5)
    captured = layers.captured_layers(tiny_target.num_layers)
    prompts = [
        {"dataset": "a", "id": str(i), "prompt_ids": ids}
        for i, ids in enumerate(learnt.prompts[:3])
    ]
    variant = Variant("2-1-3", learnt.folder, 2)
    measured = benching.measure(tiny_target, drafter, captured, prompts, variant, 12)
    (cell,) = measuring.cells(measured, [variant], prompts, None)
    assert cell["all"]["accept_length"]["replayed"] is None
    with pytest.raises(judging.UserError, match="min_accept_length"):
        judging.check_sound(cell, 1.3, 0.05, exact=True)
