"""Both arms over HTTP, against a stand-in that really decodes, and ways in which a server is wrong.

Alone: python -m pytest tests/bench/test_sglang_bench.py
"""

import contextlib
import threading

import pytest
import standin_sglang
from eagle3.bench import sglang as sglang_bench
from eagle3.bench import statistics as measuring
from eagle3.bench import verdict as judging
from eagle3.bench.bench_client import BenchClient, read_answer
from eagle3.bench.figures import Served
from eagle3.bench.replay import Simulator
from eagle3.bench.sglang import Plan
from eagle3.bench.statistics import Variant
from eagle3.core.errors import UserError
from eagle3.target import layers


class Servers:
    """Stand-ins by flags; `wrong` is what is wrong with those that speculate. Keeps what it was
    asked for."""

    def __init__(self, model, wrong: str = "", both: bool = False):
        self.model, self.wrong, self.both = model, wrong, both
        self.started: list[dict] = []
        self.standins: list[standin_sglang.Standin] = []

    @contextlib.contextmanager
    def serve(self, flags: dict):
        self.started.append(flags)
        words = ["--port", "0", "--model-path", str(self.model)]
        for name, value in flags.items():
            words += [f"--{name}", str(value)]
        if self.both or "speculative-algorithm" in flags:
            words += ["--wrong", self.wrong]
        server, standin = standin_sglang.run(standin_sglang.arguments(words))
        self.standins.append(standin)
        thread = threading.Thread(
            target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True
        )
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            server.server_close()


@pytest.fixture(scope="module")
def prompts(learnt):
    return [
        {"dataset": "ab"[i % 2], "id": str(i), "prompt_ids": ids}
        for i, ids in enumerate(learnt.prompts[:4])
    ]


def small_plan(learnt, **more) -> Plan:
    given = {"concurrencies": [1, 2], "max_new_tokens": 10, "repeats": 1, **more}
    return Plan([Variant("3-1-4", learnt.folder, 3)], **given)


@pytest.fixture(scope="module")
def matrix(learnt, tiny_model, prompts):
    """Two variants, two batch sizes, two repeats, two rounds."""
    servers = Servers(tiny_model)
    plan = Plan(
        [Variant("3-1-4", learnt.folder, 3), Variant("1-1-2", learnt.folder, 1)],
        [1, 3],
        10,
        repeats=2,
        rounds=2,
    )
    return servers, plan, sglang_bench.measure(servers.serve, prompts, plan)


def test_the_whole_matrix_is_measured_and_served_equals_replayed(
    matrix, learnt, tiny_target, prompts
):
    _, plan, measured = matrix
    hits = Simulator(
        tiny_target, learnt.drafter, layers.captured_layers(tiny_target.num_layers)
    ).hits
    cells = measuring.cells(measured, plan.variants, prompts, lambda _: hits)
    assert [(c["variant"], c["concurrency"]) for c in cells] == [
        ("3-1-4", 1),
        ("3-1-4", 3),
        ("1-1-2", 1),
        ("1-1-2", 3),
    ]
    for cell in cells:
        figures = cell["all"]
        assert figures["accept_length"]["served"] == figures["accept_length"]["replayed"]
        assert figures["outputs"] == {
            "compared": 4,
            "equal": 4,
            "common_prefix_share": 1.0,
            "equal_to_itself": {"baseline": 4, "speculative": 4},
        }
        assert figures["tokens"]["speculative"] == 4 * 4 * 10 and figures["errors"] == {
            "baseline": 0,
            "speculative": 0,
        }
        assert figures["acceptance"].keys() == {f"position_{k}" for k in range(cell["steps"])}
        assert (
            figures["first_token"]["speculative"]["median"] > 0
            and figures["inter_token"]["baseline"]["p95"] > 0
        )
        assert figures["seconds"]["verify_cycle"] > 0
        judging.check_sound(cell, 1.05, 1e-9, exact=True)


def test_arms_differ_by_speculation_only_and_order_turns_round(matrix):
    """catalogue F04, F05"""
    servers, _, measured = matrix
    assert [flags.get("speculative-num-steps") for flags in servers.started] == [
        None,
        3,
        1,
        1,
        3,
        None,
    ]
    common = [
        {k: v for k, v in flags.items() if not k.startswith("speculative")}
        for flags in servers.started
    ]
    assert all(
        flags == {"max-running-requests": 3, "cuda-graph-max-bs-decode": 3, "random-seed": 0}
        for flags in common
    )
    rows = measured.arms["3-1-4", 1].rows
    assert [row.id for row in rows[:8]] == list("01233210")
    assert sorted(measured.arms["3-1-4", 1].walls) == [0, 1, 2, 3]


def test_the_cache_is_flushed_before_every_run_and_the_warm_up_not_counted(matrix):
    """catalogue F05. Per server: 2 repeats x 2 batch sizes, and a streamed run for each batch
    size."""
    servers, _, measured = matrix
    assert [standin.flushes for standin in servers.standins] == [6] * 6
    assert servers.standins[0].asked == (1 + 3) + 4 * 4 + 2 * 4
    assert len(measured.arms[None, 1].rows) == 4 * 4


@pytest.mark.parametrize(
    "wrong, message",
    [
        ("limit", "max_running_requests 1"),
        ("ignores", "speculative_algorithm None, but 'EAGLE3' was asked for"),
        ("silent", "no spec_verify_ct"),
        ("busy", "does not flush its cache"),
        ("short", "all 4 requests failed.*completion_tokens 11"),
    ],
)
def test_a_wrong_server_is_refused(wrong, message, learnt, tiny_model, prompts):
    """catalogue F04 (limit), E01 (ignores, silent), F05 (busy)"""
    with pytest.raises(UserError, match=message):
        sglang_bench.measure(Servers(tiny_model, wrong).serve, prompts, small_plan(learnt))


def test_accept_length_of_one_is_measured_and_then_refused(learnt, tiny_model, prompts):
    """catalogue E01: the server is up and fast, and accepts nothing."""
    plan = small_plan(learnt, concurrencies=[1])
    measured = sglang_bench.measure(Servers(tiny_model, "counts").serve, prompts, plan)
    (cell,) = measuring.cells(measured, plan.variants, prompts, None)
    assert cell["all"]["accept_length"]["per_cycle"] == 1
    with pytest.raises(UserError, match="accept length is 1.000.*check, in this order"):
        judging.check_sound(cell, 1.05, 0.05, exact=False)


def test_failed_requests_are_rows_and_are_counted(learnt, tiny_model, prompts):
    plan = small_plan(learnt, concurrencies=[1])
    measured = sglang_bench.measure(Servers(tiny_model, "errors").serve, prompts, plan)
    (cell,) = measuring.cells(measured, plan.variants, prompts, None)
    assert cell["all"]["errors"] == {"baseline": 0, "speculative": 1}
    assert "out of memory" in next(r.error for r in measured.arms["3-1-4", 1].rows if r.error)


def test_a_baseline_that_speculates_is_refused(learnt, tiny_model, prompts):
    with pytest.raises(UserError, match="baseline server reports speculative_algorithm"):
        sglang_bench.measure(
            Servers(tiny_model).serve,
            prompts,
            small_plan(learnt),
            {
                "speculative-algorithm": "EAGLE3",
                "speculative-draft-model-path": str(learnt.folder),
                "speculative-num-steps": 3,
            },
        )


def test_too_few_prompts_and_a_missing_drafter_are_refused_before_a_server_starts(
    learnt, tiny_model, prompts, tmp_path
):
    """catalogue E18"""
    servers = Servers(tiny_model)
    with pytest.raises(UserError, match="goes to 8, but there are 4"):
        sglang_bench.measure(servers.serve, prompts, small_plan(learnt, concurrencies=[8]))
    with pytest.raises(UserError, match="no drafter at"):
        sglang_bench.measure(servers.serve, prompts, Plan([Variant("x", tmp_path, 3)], [1], 8))
    assert servers.started == []


def test_a_server_that_is_gone_is_a_refusal_and_its_requests_are_errors():
    client = BenchClient("http://127.0.0.1:9", timeout=5)
    with pytest.raises(UserError, match="does not answer"):
        client.settings()
    rows, _ = client.answers([{"dataset": "a", "id": "1", "prompt_ids": [1]}], 1, 4)
    assert "no_connection" in rows[0].error


def test_aborted_answers_are_errors():
    with pytest.raises(ValueError, match="aborted: too long"):
        read_answer(
            Served("a", "1"),
            {
                "output_ids": [],
                "meta_info": {
                    "completion_tokens": 0,
                    "finish_reason": {"type": "abort", "message": "too long"},
                },
            },
        )
