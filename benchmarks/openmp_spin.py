"""What threads of OpenMP that wait in place cost: small products alone, and beside one other busy
process.

    python benchmarks/openmp_spin.py

Two threads on as many cores. Each row is a process of its own with another GOMP_SPINCOUNT (how
often a thread looks before it sleeps); `eagle3.environment` sets the middle one. The busy process
takes one core."""

import os
import subprocess
import sys

WORK = """
import time, torch
torch.set_num_threads(2)
x, up, down = torch.randn(8, 576), torch.randn(1536, 576), torch.randn(576, 1536)
began = time.monotonic()
for _ in range(4000):
    torch.nn.functional.silu(x @ up.T) @ down.T
print(time.monotonic() - began)
"""


def seconds(spins: str | None) -> float:
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("OMP_", "GOMP_"))}
    environment |= {"GOMP_SPINCOUNT": spins} if spins else {}
    done = subprocess.run(
        [sys.executable, "-c", WORK], env=environment, check=True, capture_output=True, text=True
    )
    return float(done.stdout)


def main() -> None:
    print("GOMP_SPINCOUNT   alone s   beside a busy process s")
    for spins in (None, "1000", "0"):
        alone = seconds(spins)
        busy = subprocess.Popen([sys.executable, "-c", "while True: pass"])
        try:
            beside = seconds(spins)
        finally:
            busy.kill()
            busy.wait()
        print(f"{spins or 'default':14} {alone:9.2f} {beside:25.2f}")


if __name__ == "__main__":
    main()
