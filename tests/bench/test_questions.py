"""Held-out prompts and leakage. Alone: python -m pytest tests/bench/test_questions.py"""

from types import SimpleNamespace

import pytest
import tiny
import tiny_drafter
from eagle3.bench import questions as held_out
from eagle3.core.errors import UserError
from eagle3.prompts.chat_template import Renderer


def write(folder, name, prompts, split):
    return tiny_drafter.write_records(folder, name, prompts, [[7, 2]] * len(prompts), split)


def test_validation_prompts_of_all_sets_in_turn(tmp_path):
    write(tmp_path, "a", [[11, i] for i in range(5)], "validation")
    write(tmp_path, "b", [[12, i] for i in range(2)], "validation")
    chosen, counts = held_out.collect(tmp_path, 5, set())
    assert [row["dataset"] for row in chosen] == ["a", "b", "a", "b", "a"]
    assert all(row["prompt_ids"][0] == {"a": 11, "b": 12}[row["dataset"]] for row in chosen)
    assert counts["a"] == {"source": "validation", "available": 5, "seen_in_training": 0, "used": 3}


def test_what_training_has_seen_is_left_out_whatever_it_is_called(tmp_path):
    write(tmp_path, "a", [[11, 1], [11, 2], [11, 2, 3]], "validation")
    write(tmp_path, "b", [[11, 2]], "train")
    chosen, counts = held_out.collect(tmp_path, 9, held_out.trained_prompts(tmp_path))
    assert sorted(row["prompt_ids"] for row in chosen) == [[11, 1], [11, 2, 3]]
    assert counts["a"]["seen_in_training"] == 1 and counts["b"]["available"] == 0


def test_nothing_left_is_a_refusal(tmp_path):
    write(tmp_path, "a", [[11, 1]], "validation")
    write(tmp_path, "b", [[11, 1]], "train")
    with pytest.raises(UserError, match="1 left out because training has seen them"):
        held_out.collect(tmp_path, 9, held_out.trained_prompts(tmp_path))


def wanted(**more):
    return SimpleNamespace(**{"format": "auto", "columns": {}, "max_samples": None, **more})


def test_questions_are_rendered_as_everywhere(tiny_target):
    """catalogue F07: the template of training, and the same first ids."""
    renderer = Renderer(tiny_target)
    rows = [
        (0, {"prompt": "count the birds"}),
        (1, {"instruction": "sings", "output": "no"}),
        (2, {"turns": ["stone", "more"]}),
    ]
    (first,) = held_out.questions("set", rows[:1], wanted(), renderer, 100, set())
    assert first["prompt_ids"] == renderer.prompt_ids(
        [{"role": "user", "content": "count the birds"}]
    )
    (second,) = held_out.questions("set", rows[1:2], wanted(), renderer, 100, set())
    assert second["prompt_ids"] == renderer.prompt_ids([{"role": "user", "content": "sings"}])
    (third,) = held_out.questions(
        "set", rows[2:], wanted(columns={"prompt": "turns"}), renderer, 100, set()
    )
    assert third["prompt_ids"] == renderer.prompt_ids([{"role": "user", "content": "stone"}])


def test_unseen_questions_come_first_and_a_raised_cap_keeps_the_earlier_ones(tiny_target):
    renderer = Renderer(tiny_target)
    rows = list(enumerate({"prompt": tiny.text(i)} for i in range(12)))
    everything = held_out.questions("set", rows, wanted(), renderer, 100, set())
    seen = {row["id"] for row in everything[:3]}
    few, more = (
        held_out.questions("set", rows, wanted(max_samples=n), renderer, 100, seen) for n in (4, 8)
    )
    assert few == more[:4] == everything[3:7]


def test_unusable_questions_are_a_refusal_with_reasons(tiny_target):
    rows = [(0, ValueError("line 1")), (1, {"prompt": "a " * 300}), (2, {"prompt": "<|im_end|>"})]
    with pytest.raises(UserError) as caught:
        held_out.questions("set", rows, wanted(), Renderer(tiny_target), 20, set())
    for reason in ("unreadable", "prompt_too_long", "special_token_in_text"):
        assert reason in str(caught.value)
