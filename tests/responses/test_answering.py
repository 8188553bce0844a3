"""What is wanted, done and to go; caps, budgets, turns, the artifact. Alone: python -m pytest
tests/responses/test_answering.py"""

import json
import random

import pytest
from answer_worker import PlainRenderer
from eagle3.core.errors import Reject, UserError
from eagle3.prompts import prompts
from eagle3.responses import answering as generation
from eagle3.responses import responses
from eagle3.responses.engines import Result
from eagle3.responses.journal import Journal

SAMPLING = {"max_new_tokens": 8, "temperature": 0, "seed": 0}


def make_prompts(path, count, turns=1):
    made = []
    for i in range(count):
        messages = [
            m
            for t in range(turns)
            for m in (
                {"role": "user", "content": f"{i + 10} {t + 3}"},
                {"role": "assistant", "content": None},
            )
        ]
        made.append(prompts.Prompt(f"row{i:03}", messages, [], [i + 10, 3, 5], i))
    prompts.write(path, made, [], {})
    return path


def answering(folder, path, journal, context=64, budget=None, sampling=SAMPLING):
    return generation.Answering(path, PlainRenderer(), journal, sampling, context, budget)


def answer(request, order=random.Random(0)):
    length = 1 + request.prompt_ids[0] % request.max_new_tokens
    cut = length == request.max_new_tokens
    return Result(request, [7] * length, "length" if cut else "stop")


def run(state, engine=answer, at_once=4, shuffle=None):
    """An engine that holds `at_once` requests and finishes them in any order. Returns how many it
    answered."""
    requests, held, count = state.requests(), [], 0
    while True:
        while len(held) < at_once and (request := next(requests, None)):
            held.append(request)
        if not held:
            return count
        request = held.pop(shuffle.randrange(len(held)) if shuffle else 0)
        count += 1
        if following := state.on_result(engine(request)):
            held.append(following)


def rows(folder):
    return [json.loads(line) for line in open(folder / responses.ROWS)]


@pytest.fixture
def journal(in_tmp):
    with Journal(in_tmp / "work", SAMPLING) as journal:
        yield journal


def test_a_raised_cap_asks_for_the_difference_only(in_tmp, journal):
    small, large = make_prompts(in_tmp / "s.parquet", 7), make_prompts(in_tmp / "l.parquet", 10)
    assert run(answering(in_tmp, small, journal)) == 7
    state = answering(in_tmp, large, journal)
    assert state.count()[:2] == (10, 7)
    assert run(state) == 3
    state.publish(in_tmp / "out", {})
    assert [row["id"] for row in rows(in_tmp / "out")] == [f"row{i:03}" for i in range(10)]
    assert run(answering(in_tmp, large, journal)) == 0  # so that no server is started


def test_inputs_are_responses_plus_errors(in_tmp, journal):
    """Catalogue A14, C01: failures go to their own file with reason and tries; identity decides,
    not position."""
    path = make_prompts(in_tmp / "p.parquet", 9)

    def engine(request):
        if request.prompt_ids[0] in (12, 15):
            return Result(request, error="timeout", detail="slow", tries=3)
        return answer(request)

    state = answering(in_tmp, path, journal)
    run(state, engine)
    state.publish(in_tmp / "out", {})
    errors = [json.loads(line) for line in open(in_tmp / "out" / responses.ERRORS)]
    assert errors == [
        {"id": i, "turn": 0, "reason": "timeout", "detail": "slow", "tries": 3}
        for i in ("row002", "row005")
    ]
    assert sorted([r["id"] for r in rows(in_tmp / "out")] + [e["id"] for e in errors]) == [
        f"row{i:03}" for i in range(9)
    ]
    again = answering(in_tmp, path, journal)
    assert run(again) == 2  # what failed is tried again, what is there is not
    again.publish(in_tmp / "out", {})
    assert len(rows(in_tmp / "out")) == 9


def test_a_missing_row_is_no_artifact(in_tmp, journal):
    with pytest.raises(UserError, match="row000 has neither an answer nor an error"):
        answering(in_tmp, make_prompts(in_tmp / "p.parquet", 2), journal).publish(
            in_tmp / "out", {}
        )
    assert not (in_tmp / "out").exists()


def test_too_many_errors_fail_the_stage(in_tmp, journal):
    state = answering(in_tmp, make_prompts(in_tmp / "p.parquet", 4), journal)
    run(state, lambda request: Result(request, error="http_400", tries=1))
    with pytest.raises(UserError, match="http_400 4"):
        generation.check_errors("own", state.publish(in_tmp / "out", {}), 0.5)


@pytest.mark.parametrize("seed", range(6))
def test_a_token_budget_cuts_at_the_same_row_whatever_the_order(in_tmp, journal, seed):
    """The shortest run of prompts from the first that holds the budget; real tokens; requests in
    flight finish."""
    path = make_prompts(in_tmp / "p.parquet", 40)
    lengths = [1 + (i + 10) % 8 for i in range(40)]
    expected = next(n for n in range(41) if sum(lengths[:n]) >= 50)
    state = answering(in_tmp, path, journal, budget=50)
    asked = run(state, at_once=1 + 3 * seed, shuffle=random.Random(seed))
    state.publish(in_tmp / "out", {})
    assert [row["id"] for row in rows(in_tmp / "out")] == [f"row{i:03}" for i in range(expected)]
    assert expected <= asked <= expected + 2 * (1 + 3 * seed)
    assert len(journal) == asked  # what was in flight is kept for a raised budget
    more = answering(in_tmp, path, journal, budget=10**6)
    assert run(more) == 40 - asked


def test_turns_are_answered_in_sequence_with_the_answers_before_them(in_tmp, journal):
    path = make_prompts(in_tmp / "p.parquet", 6, turns=3)
    state = answering(in_tmp, path, journal)
    run(state, shuffle=random.Random(1))
    state.publish(in_tmp / "out", {})
    for i, row in enumerate(rows(in_tmp / "out")):
        first = row["turns"][0]
        assert first["prompt_ids"] == [i + 10, 3, 5]
        for before, turn in zip(row["turns"], row["turns"][1:]):
            history = before["prompt_ids"][:-1] + before["output_ids"]
            assert turn["prompt_ids"][: len(history)] == history
        cut = [turn["finish_reason"] == "length" for turn in row["turns"]]
        assert not any(cut[:-1]) and (
            cut[-1] or len(row["turns"]) == 3
        )  # nothing follows half a sentence


def test_a_kill_between_turns_continues_at_the_next_one(in_tmp, journal):
    path = make_prompts(in_tmp / "p.parquet", 1, turns=3)
    state = answering(in_tmp, path, journal)
    [request] = state.requests()
    state.on_result(answer(request))
    assert run(answering(in_tmp, path, journal)) == 2


def test_a_full_context_ends_the_conversation_and_a_prompt_that_never_fits_is_an_error(
    in_tmp, journal
):
    """Catalogue C12: the room is counted before anything is sent."""
    path = make_prompts(in_tmp / "p.parquet", 2, turns=3)
    state = answering(in_tmp, path, journal, context=7)
    [first, _] = list(state.requests())
    assert first.max_new_tokens == 4
    state = answering(in_tmp, path, journal, context=7)
    run(state, lambda request: Result(request, [7] * request.max_new_tokens, "stop"))
    state.publish(in_tmp / "out", {})
    assert [len(row["turns"]) for row in rows(in_tmp / "out")] == [1, 1]
    none = answering(in_tmp, path, journal, context=3)
    assert run(none) == 0
    none.publish(in_tmp / "none", {})
    assert {json.loads(line)["reason"] for line in open(in_tmp / "none" / responses.ERRORS)} == {
        "prompt_too_long"
    }


def test_published_rows_count_on_a_machine_without_a_journal(in_tmp, journal):
    path = make_prompts(in_tmp / "p.parquet", 8, turns=2)
    state = answering(in_tmp, path, journal)
    run(state)
    state.publish(in_tmp / "out", {})
    with Journal(in_tmp / "elsewhere", SAMPLING) as other:
        again = answering(in_tmp, path, other)
        assert again.adopt(rows(in_tmp / "out")) == len(journal)
        assert run(again) == 0
        again.publish(in_tmp / "again", {})
    assert (in_tmp / "again" / responses.ROWS).read_bytes() == (
        in_tmp / "out" / responses.ROWS
    ).read_bytes()
    with Journal(in_tmp / "warmer", {**SAMPLING, "temperature": 1}) as other:
        assert answering(in_tmp, path, other).adopt(rows(in_tmp / "out")) == 0


def test_broken_answers_are_counted(in_tmp):
    """Catalogue C19: corrupt output with a success status shows in the shares, not in the rows."""
    good, loop = list(range(200)), [*range(100), *[7, 8, 9] * 30]
    assert not responses.looks_broken(good, "text") and responses.looks_broken(loop, "text")
    assert responses.looks_broken(good, "te\ufffdxt") and not responses.looks_broken(
        good, "cut\ufffd"
    )
    assert not responses.looks_broken([7] * 20, "short")
    with responses.writing(in_tmp / "out", {}) as writer:
        for ids in (good, loop, good):
            writer.answer("x", [{"output_ids": ids, "text": "", "finish_reason": "stop"}])
    assert (writer.broken, writer.answered) == (1, 3)


class Rendering:
    """A template that writes `<role> ids </role>` and, as some do, drops the thoughts (ids over
    900) of history."""

    class tokenizer:
        eos_token_id = 2

    def __init__(self, drops=False, rewrites=False):
        self.drops, self.rewrites = drops, rewrites

    def full_ids(self, messages, tools=None):
        ids = []
        for place, message in enumerate(messages):
            content = [int(w) for w in message["content"].split()]
            if self.drops and place < len(messages) - 1:
                content = [i for i in content if i < 900]
            ids += [3 if message["role"] == "user" else 4, *content, 2, 10]
        return ids if not self.rewrites else [len(messages), *ids]

    def prompt_ids(self, messages, tools=None):
        return [*self.full_ids(messages, tools), 4]

    def decode(self, ids):
        return " ".join(map(str, ids))


CONVERSATION = prompts.Prompt(
    "x",
    [
        {"role": "user", "content": "20 21"},
        {"role": "assistant", "content": "901 30 31"},
        {"role": "user", "content": "30 31"},
        {"role": "assistant", "content": "30 31"},
    ],
    [],
    [],
    0,
)


def supervised(turns):
    from eagle3.records.records import sequences

    return [[i for i, kept in zip(ids, mask) if kept] for ids, mask in sequences(turns)]


def test_the_mask_of_given_answers_covers_them_exactly(in_tmp):
    """Catalogue B10, B18: found by ids, so the user's repetition of an answer is not taken for
    one."""
    turns = generation.given_turns(CONVERSATION, Rendering(), 100)
    assert [turn["output_ids"] for turn in turns] == [[901, 30, 31, 2], [30, 31, 2]]
    assert supervised(turns) == [
        [901, 30, 31, 2, 30, 31, 2]
    ]  # one record; the newline after the end token is not one


def test_a_template_that_rewrites_history_gives_records_as_the_server_saw_them(in_tmp):
    """Catalogue B04."""
    turns = generation.given_turns(CONVERSATION, Rendering(drops=True), 100)
    assert supervised(turns) == [[901, 30, 31, 2], [30, 31, 2]]
    assert 901 not in turns[1]["prompt_ids"]


def test_a_template_that_changes_the_prompt_is_refused_with_the_reason(in_tmp):
    """Catalogue B10."""
    with pytest.raises(Reject, match="template_changes_prompt: turn 0"):
        generation.given_turns(CONVERSATION, Rendering(rewrites=True), 100)
    with pytest.raises(Reject, match="answer_too_long: 4 tokens"):
        generation.given_turns(CONVERSATION, Rendering(), 3)
