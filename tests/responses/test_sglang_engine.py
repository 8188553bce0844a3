"""The client against a real server that misbehaves. Alone: python -m pytest
tests/responses/test_sglang_engine.py"""

import dataclasses
import itertools
import json
import time

import pytest
import server_parts as serving
from eagle3.core import schema
from eagle3.core.errors import UserError
from eagle3.responses import sglang_engine
from eagle3.responses.engines import Request
from eagle3.responses.sglang_engine import SGLangEngine
from eagle3.serving import server
from eagle3.serving.client import Client

GREEDY = schema.Sampling(max_new_tokens=16)


@pytest.fixture
def target(in_tmp):
    return serving.make_target(in_tmp / "target")


def run(target, urls, requests, on_result=None, sampling=GREEDY, **runtime):
    """Results by row, and the engine; every request must be answered exactly once."""
    runtime = schema.Runtime(
        **{"concurrency": 16, "request_timeout": 20, "stall_timeout": 10, **runtime}
    )
    engine = SGLangEngine(target, sampling, schema.Server(endpoints=urls), runtime, log=print)
    results = {}

    def keep(result):
        assert result.request.key not in results
        results[result.request.key] = result
        return on_result(result) if on_result else None

    with engine:
        engine.run(iter(requests), keep)
    return results, engine


def assert_all_right(requests, results):
    assert results.keys() == {request.key for request in requests}
    for request in requests:
        assert results[request.key].output_ids == serving.right(request), results[request.key]


def test_answers_are_the_servers_ids(target, in_tmp):
    requests = serving.requests(200)
    with serving.started(target, events=in_tmp / "events") as (url, _):
        results, engine = run(target, [url], requests)
    assert_all_right(requests, results)
    kinds = {result.finish_reason for result in results.values()}
    assert kinds == {"stop", "length"} and not engine.counts
    assert len((in_tmp / "events").read_text().split()) == 200  # nothing was asked twice


def test_a_server_that_refuses_cuts_and_lies_costs_no_row(target):
    """Catalogue C15 (an answer without choices is no answer), C16 (busy is no failure), C19
    (aborted is no answer)."""
    requests = serving.requests(150)
    faults = {
        "refuse": 0.15,
        "cut": 0.1,
        "garbage": 0.1,
        "wrong_ids": 0.1,
        "wrong_row": 0.1,
        "abort": 0.05,
    }
    with serving.started(target, **faults) as (url, _):
        results, engine = run(target, [url], requests, max_attempts=60)
    assert_all_right(requests, results)
    assert {"busy", "garbage", "wrong_ids", "wrong_row", "aborted"} <= set(engine.counts)


@pytest.mark.parametrize(
    "fault, reason",
    [
        ("404", "http_404"),
        ("503_inside", "busy"),
        ("404_inside", "http_404"),
        ("abort_503", "busy"),
        ("other_model", "wrong_model"),
        ("no_stop_id", "wrong_ids"),
        ("unmatched_stop", "wrong_ids"),
        ("goes_on", "wrong_ids"),
        ("no_id", "garbage"),
        ("no_counts", "garbage"),
        ("longer_prompt", "wrong_row"),
    ],
)
def test_an_answer_that_is_none_is_asked_for_again(target, fault, reason):
    """By another model, to another request, or not ended as it says; counted by reason."""
    requests = [r for r in serving.requests(40) if 1 < len(serving.right(r)) < 16]
    with serving.started(target, once=[fault]) as (url, _):
        results, engine = run(target, [url], requests[:5], concurrency=1)
    assert_all_right(requests[:5], results)
    assert engine.counts == {reason: 1}


def test_an_end_in_the_last_place_is_an_end(target):
    """SGLang calls it a matter of length, since it looks at the length first."""
    [request] = [r for r in serving.requests(40) if len(serving.right(r)) == 9][:1]
    request = dataclasses.replace(request, max_new_tokens=9)
    length = {"type": "length", "length": 9}
    meta = {"id": "x", "finish_reason": length, "prompt_tokens": 7, "completion_tokens": 9}
    answer = {"output_ids": serving.right(request), "meta_info": meta}
    assert answer["output_ids"][-1] == 2
    checked = sglang_engine.checked(answer, request, "x", None, target, Client("http://x"))
    assert checked == (answer["output_ids"], "stop")


def test_a_model_that_was_swapped_stops_the_run(target):
    """The next look at it finds another model, and says both."""
    with serving.started(target, once=["other_model"] * 3) as (url, _):
        for _ in range(2):  # the same server, before and after
            results, _ = run(target, [url], serving.requests(2), max_attempts=60)
            assert not any(r.error for r in results.values())
    other = serving.make_target(target.folder.parent / "other", digest="e" * 32)
    with (
        serving.started(other) as (url, _),
        pytest.raises(UserError, match=f"weight version {'e' * 32}.*digest {'d' * 32}"),
    ):
        run(target, [url], serving.requests(2))


def test_a_row_that_the_server_turns_down_is_an_error_at_once(target):
    """Catalogue C12: a 4xx is permanent."""
    requests = serving.requests(20)
    with serving.started(target, reject=3 + 7) as (url, _):
        results, engine = run(target, [url], requests)
    failed = [r for r in results.values() if r.error]
    assert {r.request.row_id for r in failed} >= {"row7"} and all(
        10 in r.request.prompt_ids for r in failed
    )
    assert (
        failed[0].error == "http_400" and failed[0].tries == 1 and "not for us" in failed[0].detail
    )
    assert not engine.counts


def test_tries_end_and_say_why(target):
    with serving.started(target, garbage=1) as (url, _):
        results, _ = run(target, [url], serving.requests(3), max_attempts=2)
    assert [(r.error, r.tries) for r in results.values()] == [("garbage", 2)] * 3


def test_a_request_has_a_deadline_of_its_own(target):
    """Catalogue C13: the time runs from sending, and queued requests do not share one clock."""
    requests = serving.requests(40)
    with serving.started(target, late=0.2) as (
        url,
        _,
    ):  # 40 requests, 4 at once: 2 s in all, more than one deadline
        results, engine = run(target, [url], requests, concurrency=4, request_timeout=1.0)
        assert_all_right(requests, results)
        assert not engine.counts
    with serving.started(target, hang=1) as (url, _):
        begun = time.monotonic()
        results, _ = run(target, [url], serving.requests(2), request_timeout=0.5, max_attempts=2)
    assert {r.error for r in results.values()} == {"timeout"} and time.monotonic() - begun < 10


def test_a_long_answer_is_no_stall_and_a_silent_server_is(target):
    """Catalogue C10: the port is open, health pages are green, and no token comes."""
    with serving.started(target, late=1.5) as (url, _):
        results, _ = run(target, [url], serving.requests(4), concurrency=1, stall_timeout=1000)
        assert not any(r.error for r in results.values())
    with (
        serving.started(target, stall_at=5) as (url, _),
        pytest.raises(UserError, match="no token from http.* for 1 s"),
    ):
        run(target, [url], serving.requests(30), stall_timeout=1)


def test_a_stalled_server_is_restarted_and_costs_no_row(target, monkeypatch):
    """Catalogue C07, C10, as seen with a real SGLang whose scheduler was killed: the state file
    calls the old process ready until the supervisor has ended it, and believing that used up the
    tries of every row in flight."""
    monkeypatch.setenv("MISBEHAVE", json.dumps({"stall_at": 20, "deaf": True}))
    requests = serving.requests(50)
    settings = serving.server_settings(
        max_restarts=8, stop_timeout=1.5
    )  # a slow end, as the real one's
    engine = SGLangEngine(
        target, GREEDY, settings, schema.Runtime(concurrency=8, stall_timeout=1.5), log=print
    )
    results = {}
    with engine:
        engine.run(iter(requests), lambda result: results.__setitem__(result.request.key, result))
        assert server.read_state()["restarts"] >= 2
    assert_all_right(requests, results)


def test_another_server_takes_over_and_the_first_one_returns(target, in_tmp):
    requests = serving.requests(300)
    first = serving.free_port()
    served = itertools.count()
    with serving.started(target, late=0.01) as (other, _):
        with serving.started(target, port=first, late=0.01) as (url, process):
            revived = []

            def on_result(result):
                number = next(served)
                if number == 60:
                    process.kill()
                if number == 150:
                    revived.append(serving.started(target, port=first, events=in_tmp / "again"))
                    revived[0].__enter__()

            results, engine = run(target, [url, other], requests, on_result)
            revived[0].__exit__(None, None, None)
    assert_all_right(requests, results)
    assert (in_tmp / "again").read_text()  # it worked again after its return


def test_a_row_that_kills_the_server_ends_alone(target, in_tmp, monkeypatch):
    """Catalogue C18: a death is expected; a row that causes it every time becomes an error, its
    neighbours do not."""
    monkeypatch.setenv("MISBEHAVE", json.dumps({"poison": 3 + 30, "late": 0.01}))
    requests = [r for r in serving.requests(60) if 33 not in r.prompt_ids[1:]]
    settings = serving.server_settings(max_restarts=8)
    engine = SGLangEngine(
        target, GREEDY, settings, schema.Runtime(concurrency=16, stall_timeout=20), log=print
    )
    results = {}
    with engine:
        engine.run(iter(requests), lambda result: results.__setitem__(result.request.key, result))
    failed = [r for r in results.values() if r.error]
    assert [(r.request.row_id, r.error) for r in failed] == [("row30", "server_died")]
    assert_all_right(
        [r for r in requests if r.row_id != "row30"],
        {k: r for k, r in results.items() if not r.error},
    )


def test_following_requests_run_before_new_ones(target):
    requests = serving.requests(30)
    order = []

    def on_result(result):
        order.append(result.request.key)
        if result.request.turn == 0:
            ids = result.request.prompt_ids + result.output_ids + [9]
            return Request(result.request.row_id, 1, f"{'f'}{result.request.key[1:]}", ids, 16, 0)
        return None

    with serving.started(target) as (url, _):
        results, _ = run(target, [url], requests, on_result, concurrency=1)
    assert len(results) == 60
    assert [key[1:] for key in order[::2]] == [
        key[1:] for key in order[1::2]
    ]  # each turn right after its predecessor


def test_sampling_reaches_the_server_whole(target):
    """Greedy is greedy and a temperature is what it says, whatever the server fills in."""

    def params(**sampling):
        engine = SGLangEngine(
            target, schema.Sampling(**sampling), schema.Server(), schema.Runtime()
        )
        return engine._sampling_params(serving.requests(1)[0])

    neutral = {
        "min_p": 0,
        "frequency_penalty": 0,
        "presence_penalty": 0,
        "repetition_penalty": 1,
        "min_new_tokens": 0,
        "ignore_eos": False,
        "n": 1,
        "stop_token_ids": [2],
    }
    greedy = params(max_new_tokens=16)
    assert greedy.items() >= {**neutral, "temperature": 0, "top_p": 1, "top_k": -1}.items()
    assert "sampling_seed" not in greedy
    warm = params(max_new_tokens=8, temperature=0.7, top_p=0.9, seed=3)
    assert warm.items() >= {**neutral, "temperature": 0.7, "top_p": 0.9, "top_k": -1}.items()
    assert warm["sampling_seed"] == serving.requests(1)[0].seed
    with pytest.raises(UserError, match="preferred-sampling-params .* is set by generate.sampling"):
        server.flags_for(schema.Server(flags={"preferred-sampling-params": '{"min_p": 1}'}), target)
