"""Places shared by processes. Alone: python -m pytest tests/responses/test_slots.py"""

import asyncio
import subprocess
import sys
import time
from pathlib import Path

import server_parts as serving
from eagle3.responses.slots import Slots

HOLDER = """
import asyncio, sys, time
from pathlib import Path
from eagle3.responses.slots import Slots
async def hold(count):
    slots = Slots(Path("slots"), 5)
    held = [slots.one() for _ in range(count)]
    for one in held:
        await one.__aenter__()
    print("held", flush=True)
    time.sleep(600)
asyncio.run(hold(int(sys.argv[1])))
"""


def most_at_once(path: Path, tasks: int = 12) -> int:
    slots, now, most = Slots(path, 5), 0, 0

    async def work():
        nonlocal now, most
        async with slots.one():
            now += 1
            most = max(most, now)
            await asyncio.sleep(0.01)
            now -= 1

    async def all_of_them():
        await asyncio.gather(*(work() for _ in range(tasks)))

    asyncio.run(all_of_them())
    slots.close()
    return most


def test_a_process_has_what_others_leave_and_gets_back_what_the_dead_held(in_tmp):
    slots = in_tmp / "slots"
    assert most_at_once(slots) == 5
    other = subprocess.Popen(
        [sys.executable, "-c", HOLDER, "3"],
        stdout=subprocess.PIPE,
        text=True,
        env={"PYTHONPATH": ":".join(sys.path)},
    )
    try:
        assert other.stdout.readline() == "held\n"
        assert most_at_once(slots) == 2
    finally:
        other.kill()
        other.wait()
    assert most_at_once(slots) == 5


def test_who_finds_all_taken_waits(in_tmp):
    other = subprocess.Popen(
        [sys.executable, "-c", HOLDER, "5"],
        stdout=subprocess.PIPE,
        text=True,
        env={"PYTHONPATH": ":".join(sys.path)},
    )
    assert other.stdout.readline() == "held\n"
    begun, seconds = time.monotonic(), 0.5

    async def wait_for_one():
        asyncio.get_running_loop().call_later(seconds, other.kill)
        async with Slots(in_tmp / "slots", 5).one():
            return time.monotonic() - begun

    assert asyncio.run(wait_for_one()) >= seconds
    serving.wait_until(lambda: other.poll() is not None)
