"""Generation with a real SGLang: `make test-sglang SGLANG="COMMAND"`, a command that takes
launch_server's flags.

Minutes on a CPU. The target is the embedded one, and for the bench, in which the server speculates,
a tiny one."""

import itertools
import json
import os
import random
import shlex
import signal
import subprocess
import time

import pytest
import server_parts as serving
import sglang_server
from eagle3.bench import sglang as sglang_bench
from eagle3.bench import speculation
from eagle3.bench.statistics import Variant
from eagle3.core import schema
from eagle3.core.errors import UserError
from eagle3.prompts.chat_template import Renderer
from eagle3.responses import status
from eagle3.responses.engines import Request
from eagle3.responses.sglang_engine import SGLangEngine
from eagle3.responses.transformers_engine import TransformersEngine
from eagle3.serving import server, supervisor
from server_parts import gone, wait_until

from tests.bench.test_bench import folder as project  # noqa: F401  (a fixture)
from tests.bench.test_bench import run as run_bench
from tests.test_embedded import embedded  # noqa: F401  (a fixture)

pytestmark = [
    pytest.mark.skipif("SGLANG" not in os.environ, reason="needs SGLang; make test-sglang runs it"),
    pytest.mark.timeout(1200),
]
SAMPLING = schema.Sampling(max_new_tokens=12)
QUESTIONS = [
    "What is the capital of France?",
    "Count from 1 to 5.",
    "Name a colour.",
    "What is 2 + 2?",
    "Say hello.",
    "Who wrote Hamlet?",
    "What is a river?",
    "Write one line of Python.",
]


@pytest.fixture(scope="module")
def settings():
    return schema.Server(
        command=shlex.split(os.environ["SGLANG"]),
        port=serving.free_port(),
        start_timeout=600,
        restart_backoff=1,
        idle_timeout=600,
    )


@pytest.fixture(scope="module")
def requests(embedded):
    renderer, made = Renderer(embedded), []
    for i, question in enumerate(QUESTIONS):
        ids = renderer.prompt_ids([{"role": "user", "content": question}])
        made.append(Request(f"row{i}", 0, f"{i:032x}", ids, 12, i))
    return made


@pytest.fixture(scope="module")
def running(embedded, settings, tmp_path_factory):
    """One server for all tests but the last, in a folder of its own."""
    folder, before = tmp_path_factory.mktemp("sglang"), os.getcwd()
    os.chdir(folder)
    with server.lease(settings, embedded, log=print) as lease:
        yield lease
    os.chdir(before)


def answers(target, settings, requests, on_result=lambda result: None, **runtime):
    engine, found = (
        SGLangEngine(
            target, SAMPLING, settings, schema.Runtime(concurrency=8, **runtime), log=print
        ),
        {},
    )
    with engine as made_by:
        engine.run(
            iter(requests),
            lambda result: found.__setitem__(result.request.key, result) or on_result(result),
        )
    return found, made_by


def test_it_reports_what_was_asked_for(running, embedded):
    found = running.fingerprint
    assert found["weight_version"] == embedded.digest and found["dtype"] == embedded.info["dtype"]
    assert found["context_length"] == embedded.info["context_length"] and found["version"]
    with pytest.raises(
        UserError, match="kv_cache_dtype 'auto', but target.kv_cache_dtype is 'fp8_e4m3'"
    ):
        embedded.info["kv_cache_dtype"] = "fp8_e4m3"
        try:
            server.check_same(found, embedded, running.urls[0])
        finally:
            embedded.info["kv_cache_dtype"] = "auto"


def test_its_answers_are_those_of_transformers(running, embedded, settings, requests):
    """Greedy ids, end token included, equal up to rounding: a tie may fall the other way in one
    answer of eight."""
    found, made_by = answers(embedded, settings, requests)
    assert made_by["engine"] == "sglang" and not any(result.error for result in found.values())
    reference = {}
    engine = TransformersEngine(embedded, SAMPLING, 8)
    with engine:
        engine.run(iter(requests), lambda result: reference.__setitem__(result.request.key, result))
    same = [found[r.key].output_ids == reference[r.key].output_ids for r in requests]
    assert sum(same) >= len(requests) - 1, [
        (found[r.key].output_ids, reference[r.key].output_ids) for r in requests
    ]
    kinds = {(result.finish_reason, result.output_ids[-1] == 2) for result in found.values()}
    assert kinds <= {("stop", True), ("length", False)}


def test_a_prompt_that_is_too_long_is_an_error_at_once(running, embedded, settings):
    long = Request("long", 0, "f" * 32, [5] * (embedded.info["context_length"] + 10), 4, 0)
    found, _ = answers(embedded, settings, [long])
    assert found[long.key].error in ("http_400", "refused_by_server") and found[long.key].tries == 1
    assert "context" in found[long.key].detail or "long" in found[long.key].detail


def test_status_reads_its_metrics(running):
    [line] = status.of_server(schema.Server())
    assert "ready for" in line and "running" in line and "KV cache" in line


def test_the_client_killed_in_the_middle_aborts_its_requests(running, embedded, settings, requests):
    """The server is free again at once: what nobody waits for is not computed."""

    class Enough(Exception):
        pass

    def stop(result):
        raise Enough

    endless = [Request(r.row_id, 0, r.key, r.prompt_ids, 1500, 0) for r in requests[:4]]
    with pytest.raises(Enough):
        answers(embedded, settings, [*endless, requests[4]], stop)
    begun = time.monotonic()
    wait_until(lambda: "running 0" in status.metrics(running.client(running.urls[0])), 60)
    assert time.monotonic() - begun < 60


def test_killed_in_the_middle_it_comes_back_and_no_row_is_lost(
    running,
    embedded,
    settings,
    requests,
):
    """Its scheduler, then the whole of it; every row is answered as before."""
    before, _ = answers(embedded, settings, requests)
    many = [
        Request(f"{r.row_id}-{n}", 0, f"{n}{r.key[1:]}", r.prompt_ids, 12, 0)
        for n in range(3)
        for r in requests
    ]
    victims, number = [], itertools.count()

    def kill(result):
        if next(number) == 4:
            group = server.read_state()["server"]
            workers = [pid for pid in supervisor.members(group) if pid != group]
            victims.append(random.choice(workers))
            os.kill(victims[0], signal.SIGKILL)

    found, _ = answers(embedded, settings, many, kill, stall_timeout=60)
    assert victims and server.read_state()["restarts"] >= 1
    assert not any(result.error for result in found.values())
    for request in many:
        assert found[request.key].output_ids == before["0" + request.key[1:]].output_ids


def test_nothing_is_left_of_it(embedded, settings, in_tmp):
    """SIGKILL of the process that holds the lease, while the real thing is starting."""
    from tests.serving.test_server import holder

    other = holder(embedded, settings.model_copy(update={"port": serving.free_port()}))
    state = server.read_state()
    members = supervisor.members(state["server"])
    assert len(members) >= 2
    other.kill()
    other.wait()
    wait_until(lambda: all(map(gone, [*members, state["supervisor"][0]])), 60)


def test_every_flag_that_a_bench_gives_is_one_of_this_version(learnt):
    """Flags are renamed between versions, and argparse refuses an ambiguous beginning of one."""
    plan = sglang_bench.Plan([Variant("3-1-4", learnt.folder, 3)], [1, 8], 64)
    given = [
        part
        for name, value in plan.flags(plan.variants[0], {}).items()
        for part in (f"--{name}", str(value))
    ]
    code = (
        "import argparse, sys; from sglang.srt.server_args import ServerArgs; parser = "
        "argparse.ArgumentParser(); "
        "ServerArgs.add_cli_args(parser); "
        "print(parser.parse_args(sys.argv[1:]).cuda_graph_max_bs_decode)"
    )
    done = subprocess.run(
        [sglang_server.python(), "-c", code, "--model-path", "x", *given],
        text=True,
        capture_output=True,
        env={**os.environ, **sglang_server.ENVIRONMENT},
    )
    assert done.returncode == 0 and done.stdout.split()[-1] == "8", done.stderr[-2000:]


@pytest.mark.skipif(
    sglang_server.PROGRAM.name != "sglang-cpu",
    reason="the kernels are those of SGLang 0.5.23 for the CPU",
)
def test_a_bench_on_a_server_that_speculates(project):
    """Both arms on SGLang through the supervisor. Its EAGLE worker drafts with our drafter and
    verifies: it accepts what a replay of its own answers says, and writes what it writes
    without."""
    command = [sglang_server.python(), "-m", "sglang.launch_server"]
    done = run_bench(
        project,
        bench={"engine": "sglang", "concurrency": [1, 3], "repeats": 1, "max_difference": 0.02},
        server={
            "command": command,
            "port": serving.free_port(),
            "start_timeout": 400,
            **sglang_server.SPECULATIVE,
        },
    )
    report = json.loads((project / "data/bench/report.json").read_text())
    baseline, speculative = (report["settings"][name] for name in ("baseline", "3-1-4"))
    assert [speculative[key] for key in speculation.SPECULATIVE] == [
        "EAGLE3",
        str(project / "data/drafter"),
        3,
        1,
        4,
    ]
    assert not baseline.get("speculative_algorithm")
    assert all(baseline.get(key) == speculative.get(key) for key in speculation.EQUAL)
    assert [cell["concurrency"] for cell in report["cells"]] == [1, 3]
    for cell in report["cells"]:
        length, outputs = cell["all"]["accept_length"], cell["all"]["outputs"]
        assert length["served"] > 1.05 and length["served"] == pytest.approx(
            length["replayed"], rel=0.02
        )
        assert outputs["compared"] == outputs["equal"] == 4 and not any(
            cell["all"]["errors"].values()
        )
    served = [row for row in report["rows"] if row["variant"] != "baseline"]
    assert served and all(row["cycles"] and sum(row["accepted"]) == row["cycles"] for row in served)
    assert all(not row["cycles"] for row in report["rows"] if row["variant"] == "baseline")
    assert report["verdict"] in done.stderr
