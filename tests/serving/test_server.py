"""The life of a server: leases, start, crash, orphan, ports. Alone: python -m pytest
tests/serving/test_server.py

Every server here is a real process group under a real supervisor.
"""

import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import time

import pytest
import server_parts as serving
from eagle3.capture import sglang_hooks
from eagle3.core import schema
from eagle3.core.errors import UserError
from eagle3.serving import server, supervisor
from server_parts import gone, wait_until

LIBRARY = serving.SERVER.parents[1] / "workflow"


@pytest.fixture
def target(in_tmp):
    yield serving.make_target(in_tmp / "target")
    server.stop(log=lambda text: None)


def misbehave(monkeypatch, **what):
    monkeypatch.setenv("MISBEHAVE", json.dumps(what))


def group_of(state) -> list[int]:
    return supervisor.members(state["server"])


def holder(target, settings, then="time.sleep(3600)"):
    """Another process that takes a lease, prints a line, and does `then`."""
    script = textwrap.dedent(f"""
        import sys, time; sys.path[:0] = [{str(LIBRARY)!r}]
        from pathlib import Path
        from eagle3.core import schema
        from eagle3.serving import server
        from eagle3.target.model import Target
        settings = schema.Server.model_validate_json({settings.model_dump_json()!r})
        model = Target(Path({str(target.folder)!r}))
        with server.lease(settings, model, log=lambda text: None) as lease:
            print("held", flush=True)
            {then}
    """)
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "held\n"
    return process


def test_a_lease_is_a_server_that_generates_and_leaves_nothing(target, monkeypatch):
    """Catalogue C09: ready means a token came back, however long the port has been open."""
    misbehave(monkeypatch, starting=1.5, worker=True)
    begun = time.monotonic()
    with server.lease(serving.server_settings(), target, log=lambda text: None) as lease:
        assert time.monotonic() - begun > 1.5
        assert lease.client(lease.urls[0]).generates(5)
        state = server.read_state()
        members = group_of(state)
        assert len(members) == 2  # the server and its worker
        assert lease.fingerprint["weight_version"] == target.digest
    wait_until(lambda: all(map(gone, [*members, state["supervisor"][0]])), 20)
    assert server.read_state()["phase"] == "stopped"


def test_a_second_lease_shares_the_server_and_another_configuration_replaces_it(target):
    settings, said = serving.server_settings(), []
    with server.lease(settings, target, log=said.append):
        first = server.read_state()["server"]
        with server.lease(settings, target, log=said.append):
            assert server.read_state()["server"] == first
    assert len(said) == 1
    other = settings.model_copy(update={"environment": {"NCCL_PROTO": "LL"}})
    with server.lease(other, target, log=said.append):
        state = server.read_state()
        assert state["server"] != first and gone(first)
        variables = (open(f"/proc/{state['server']}/environ", "rb").read()).split(b"\0")
        assert b"NCCL_PROTO=LL" in variables


def test_a_server_in_use_is_waited_for(target):
    settings, said = serving.server_settings(), []
    other = holder(target, settings, "time.sleep(2)")
    with server.lease(
        settings.model_copy(update={"flags": {"tp-size": 8}}), target, log=said.append
    ):
        assert "--tp-size 8" in open(
            f"/proc/{server.read_state()['server']}/cmdline"
        ).read().replace("\0", " ")
    assert other.wait() == 0
    assert any("in use; waiting for it" in line for line in said)


def test_death_while_starting_fails_at_once_with_the_log(target, monkeypatch):
    misbehave(monkeypatch, die_starting="CUDA out of memory: tried to allocate 7 GiB")
    begun = time.monotonic()
    with pytest.raises(
        UserError,
        match="ended with code 3 while starting(.|\n)*CUDA out of memory: tried to allocate",
    ):
        with server.lease(
            serving.server_settings(start_timeout=600), target, log=lambda text: None
        ):
            pass
    assert time.monotonic() - begun < 30


def test_a_command_that_is_not_there_is_named(target):
    with pytest.raises(UserError, match="cannot run /nowhere/python.*server.python"):
        with server.lease(
            serving.server_settings(command=["/nowhere/python"]), target, log=lambda text: None
        ):
            pass


def test_a_crash_is_followed_by_a_restart_up_to_the_limit(target):
    with server.lease(
        serving.server_settings(max_restarts=2), target, log=lambda text: None
    ) as lease:
        for crash in range(1, 3):
            before = server.read_state()["server"]
            os.kill(before, signal.SIGKILL)
            wait_until(
                lambda: (
                    server.read_state()["phase"] == "ready"
                    and server.read_state()["restarts"] == crash
                )
            )
            assert server.read_state()["server"] != before
        os.kill(server.read_state()["server"], signal.SIGKILL)
        wait_until(lambda: server.read_state()["phase"] == "failed")
        with pytest.raises(UserError, match="ended with code -9"):
            lease.state(lease.urls[0])


def test_a_stuck_server_is_ended_and_restarted(target, monkeypatch):
    """Catalogue C07, C10: who says that it is stuck is the client, which gets no tokens."""
    misbehave(monkeypatch, deaf=True)
    with server.lease(
        serving.server_settings(stop_timeout=0.2), target, log=lambda text: None
    ) as lease:
        before = server.read_state()["server"]
        os.kill(before, signal.SIGSTOP)
        lease.report_stuck()
        wait_until(
            lambda: server.read_state()["restarts"] == 1 and server.read_state()["phase"] == "ready"
        )
        assert gone(before) and "gave no token" in server.read_state()["last_crash"]


@pytest.mark.parametrize("sig", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_the_server_ends_with_whoever_wanted_it(target, monkeypatch, sig):
    """Catalogue C06: also when it ignores SIGTERM and has workers."""
    misbehave(monkeypatch, worker=True, deaf=True)
    other = holder(target, serving.server_settings(stop_timeout=0.5))
    state = server.read_state()
    members = group_of(state)
    other.send_signal(sig)
    other.wait()
    wait_until(lambda: all(map(gone, [*members, state["supervisor"][0]])), 20)


def test_the_server_ends_with_its_supervisor_and_the_lease_says_so(target, monkeypatch):
    misbehave(monkeypatch, worker=True, deaf=True)
    with server.lease(serving.server_settings(), target, log=lambda text: None) as lease:
        state = server.read_state()
        members = group_of(state)
        os.kill(state["supervisor"][0], signal.SIGKILL)
        wait_until(lambda: all(map(gone, [*members, state["supervisor"][0]])), 10)
        with pytest.raises(UserError, match="the supervisor of the server ended"):
            lease.state(lease.urls[0])


def test_an_orphan_of_a_killed_run_is_recognised_and_ended(target):
    """Catalogue C06: a process of ours without a supervisor holds the port."""
    settings = serving.server_settings()
    folder = server.FOLDER.resolve()
    orphan = subprocess.Popen(
        [*serving.COMMAND, "--port", str(settings.port)],
        start_new_session=True,
        env={**os.environ, supervisor.MARK: str(folder)},
        stdout=subprocess.DEVNULL,
    )
    wait_until(lambda: serving.listens(settings.port))
    with server.lease(settings, target, log=lambda text: None):
        assert orphan.wait(10) is not None
        assert f"process {orphan.pid}, the orphan of a killed run" in server.read_state()["note"]


def test_a_taken_port_is_named_with_its_holder(target):
    settings = serving.server_settings()
    with serving.started(target, port=settings.port) as (_, stranger):
        with pytest.raises(
            UserError,
            match=f"port {settings.port} is held by process {stranger.pid} .*misbehaving_server",
        ):
            with server.lease(settings, target, log=lambda text: None):
                pass
    own = subprocess.Popen(
        [*serving.COMMAND, "--port", str(settings.port)],
        stdout=subprocess.DEVNULL,
        env={**os.environ, supervisor.MARK: "/another/build/.work/server"},
    )
    wait_until(lambda: serving.listens(settings.port))
    with pytest.raises(UserError, match="the server of the build in /another/build/.work/server"):
        with server.lease(settings, target, log=lambda text: None):
            pass
    own.kill()
    own.wait()


def test_what_the_server_says_must_be_what_was_asked_for(target, monkeypatch):
    """A server that lies about its KV cache makes other answers. Catalogue C04."""
    misbehave(monkeypatch, kv_cache_dtype="fp8_e4m3")
    message = "reports kv_cache_dtype 'fp8_e4m3', but target.kv_cache_dtype is 'auto'"
    with pytest.raises(UserError, match=message):
        with server.lease(serving.server_settings(), target, log=lambda text: None):
            pass
    found = {
        "model_path": "/elsewhere",
        "weight_version": "default",
        "kv_cache_dtype": "auto",
        "quantization": None,
        "dtype": "float32",
        "context_length": 256,
    }
    with pytest.raises(UserError, match="runs /elsewhere .*, not .*digest " + target.digest):
        server.check_same(found, target, "http://x")
    server.check_same({**found, "weight_version": target.digest}, target, "http://x")
    server.check_same({**found, "model_path": str(target.path)}, target, "http://x")
    with pytest.raises(UserError, match="context_length 128, but target.context_length is 256"):
        server.check_same(
            {**found, "weight_version": target.digest, "context_length": 128}, target, "http://x"
        )


def test_flags_that_decide_the_answers_belong_to_the_target(target):
    with pytest.raises(
        UserError, match="server.flags.kv_cache_dtype is 'fp8_e4m3', but that flag is set by target"
    ):
        server.flags_for(schema.Server(flags={"kv_cache_dtype": "fp8_e4m3"}), target)


def test_the_reference_command(tmp_path):
    """The flags and variables of the reference case arrive as they stand in params.yaml."""
    target = serving.make_target(
        tmp_path / "t", quantization="compressed-tensors", trust_remote_code=True
    )
    variables = {
        "NCCL_PROTO": "LL",
        "NCCL_ALGO": "Ring",
        "NCCL_P2P_LEVEL": "SYS",
        "NCCL_MAX_NCHANNELS": 16,
        "NCCL_BUFFSIZE": 16777216,
        "NCCL_NTHREADS": 512,
    }
    flags = {
        "tp-size": 8,
        "mem-fraction-static": 0.85,
        "num-continuous-decode-steps": 4,
        "disable-custom-all-reduce": True,
        "enable-hierarchical-cache": True,
        "hicache-size": 100,
    }
    spec = server.specification(
        schema.Server(python="/opt/sglang/bin/python", flags=flags, environment=variables), target
    )
    line = " ".join(spec["command"])
    assert line.startswith("/opt/sglang/bin/python -m sglang.launch_server --model-path ")
    for part in (
        "--tp-size 8",
        "--mem-fraction-static 0.85",
        "--num-continuous-decode-steps 4",
        "--hicache-size 100",
        "--quantization compressed-tensors",
        "--disable-custom-all-reduce",
        "--trust-remote-code",
    ):
        assert re.search(rf"{part}( --|$)", line), part
    assert spec["environment"]["NCCL_BUFFSIZE"] == "16777216"


@pytest.mark.parametrize("version", ["0.5.14", "0.5.23"])
def test_capture_takes_the_flags_of_the_reference_case_without_its_cache(target, version):
    """SGLang refuses --enable-hierarchical-cache beside --disable-radix-cache, which capture
    needs."""
    settings = schema.Server(
        flags={"enable_hierarchical_cache": True, "hicache-size": 64, "tp-size": 8}
    )
    capture = sglang_hooks.server_flags(version, [2, 4, 5], [1, 3, 4], "/work")
    words = server.command_line(settings, server.flags_for(settings, target, capture))
    assert (
        "--disable-radix-cache" in words
        and "--enable-hierarchical-cache" not in words
        and "--tp-size" in words
    )
    assert "--enable-hierarchical-cache" in server.command_line(
        settings, server.flags_for(settings, target)
    )


def test_warming_needs_a_build_and_ends_with_it(target, monkeypatch):
    """The server that `prepare` warms belongs to the build above it, here a process that calls
    itself snakemake."""
    settings = serving.server_settings(idle_timeout=600)
    server.warm(settings, target, log=lambda text: None)
    assert not server.read_state()  # nobody drives this process: nothing was started
    warming, build = target.folder.parent / "warming.py", target.folder.parent / "snakemake"
    warming.write_text(
        textwrap.dedent(f"""
        import sys; sys.path[:0] = [{str(LIBRARY)!r}]
        from pathlib import Path
        from eagle3.core import schema
        from eagle3.serving import server
        from eagle3.target.model import Target
        settings = schema.Server.model_validate_json({settings.model_dump_json()!r})
        server.warm(settings, Target(Path({str(target.folder)!r})), log=print)
    """)
    )
    build.write_text(
        "import subprocess, sys, time\nsubprocess.run([sys.executable, "
        f"{str(warming)!r}])\ntime.sleep(3600)\n"
    )
    driver = subprocess.Popen([sys.executable, str(build)], stdout=subprocess.DEVNULL)
    wait_until(lambda: server.read_state().get("phase") == "ready")
    with server.lease(
        settings, target, log=lambda text: None
    ):  # attaches; ending it leaves the warm server
        members = group_of(server.read_state())
    time.sleep(0.5)
    assert not any(map(gone, members))
    driver.kill()
    driver.wait()
    wait_until(lambda: all(map(gone, members)), 20)


def test_idle_time_is_over(target, monkeypatch):
    monkeypatch.setattr(
        server, "driving_ancestors", lambda: [(os.getpid(), supervisor.start_time(os.getpid()))]
    )
    with server.lease(serving.server_settings(idle_timeout=1.0), target, log=lambda text: None):
        members = group_of(server.read_state())
    time.sleep(0.3)
    assert not any(map(gone, members))
    wait_until(lambda: all(map(gone, members)), 10)
