"""Real SGLang on the CPU for tests, started with our hooks. SGLANG names the launcher that
sglang_cpu/install.sh wrote."""

import contextlib
import os
import signal
import socket
import subprocess
import time
import urllib.request
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PROGRAM = Path(os.environ.get("SGLANG", "none").split()[0])
# What sglang_cpu/install.sh puts in place of packages that a CPU has no use for.
ENVIRONMENT = {
    "SGLANG_USE_CPU_ENGINE": "1",
    "HF_HUB_OFFLINE": "1",
    "PYTHONPATH": str(PROGRAM.parent.parent / "stand_ins"),
}
FLAGS = {
    "device": "cpu",
    "attention-backend": "torch_native",
    "disable-overlap-schedule": True,
    "max-total-tokens": 8192,
    "max-running-requests": 32,
}
# With these it speculates as well: the kernels of its CPU path, in PyTorch, and the attention
# backend that calls them.
KERNELS = Path(__file__).parent / "sglang_cpu_kernels"
SPECULATIVE = {
    "environment": {**ENVIRONMENT, "PYTHONPATH": f"{KERNELS}:{ENVIRONMENT['PYTHONPATH']}"},
    "flags": {
        "device": "cpu",
        "attention-backend": "torch_native",
        "prefill-attention-backend": "intel_amx",
        "decode-attention-backend": "intel_amx",
        "disable-overlap-schedule": True,
        "max-total-tokens": 8192,
    },
}


def python() -> str:
    """The interpreter that has SGLang: SGLANG's own first word, or the one beside its launcher."""
    return str(PROGRAM if PROGRAM.name.startswith("python") else PROGRAM.parent / "python")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextlib.contextmanager
def serving(model: Path, flags: dict, log: Path, timeout: float = 420):
    """URL of a server of `model`, ready; it is gone when the block ends."""
    port = free_port()
    command = [
        python(),
        "-m",
        "sglang.launch_server",
        "--dtype",
        "float32",
        "--host",
        "127.0.0.1",
        "--model-path",
        str(model),
        "--port",
        str(port),
        "--skip-server-warmup",
    ]
    for name, value in {**FLAGS, **flags}.items():
        if value is not False:
            command += [
                f"--{name}",
                *([] if value is True else map(str, value if isinstance(value, list) else [value])),
            ]
    environment = {
        **os.environ,
        **ENVIRONMENT,
        "PYTHONPATH": f"{ROOT / 'workflow'}:{ENVIRONMENT['PYTHONPATH']}",
    }
    with open(log, "wb") as output:
        process = subprocess.Popen(
            command,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )
    try:
        end = time.monotonic() + timeout
        while True:
            assert process.poll() is None and time.monotonic() < end, log.read_text()[-4000:]
            with contextlib.suppress(OSError):
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5)
                break
            time.sleep(1)
        yield f"http://127.0.0.1:{port}"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
