"""Hidden states of the target through a SGLang server whose hooks (`sglang_hooks.py`) write them
into our shards.

Over HTTP go token ids and one generated token; the states go from the server's process to the file,
and a line in
`written.acks` says so. A row is done when its tokens are covered from the first to the last,
whatever the server answered.

The server never waits for a file: rows are taken ahead, and while the states of answered ones are
on their way to the shard, the next are sent. Three times `concurrency` rows are under way at most.
"""

import asyncio
import contextlib
import itertools
import json
import os
import subprocess
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from eagle3.capture.sglang_hooks import ACKS, PREFIX
from eagle3.capture.transformers_capture import Job
from eagle3.core.errors import UserError
from eagle3.serving.client import Client, Failure

ROWS = 8  # in one HTTP call
POLL = 0.005
LAYER_NAMES = ("first layer", "second layer", "third layer", "last")


def engine_version(
    python: str, command: list[str] | None = None, environment: dict[str, str] | None = None
) -> str:
    """Version of SGLang in the environment of the command's interpreter or of the one beside its
    program, else of `python`.

    Raises UserError if there is none.
    """
    if command:
        program = Path(command[0])
        beside = program.parent / "python"
        python = (
            command[0]
            if program.name.startswith("python")
            else str(beside)
            if beside.exists()
            else python
        )
    code = "from importlib.metadata import version; print(version('sglang'))"
    try:
        return subprocess.run(
            [python, "-c", code],
            capture_output=True,
            text=True,
            check=True,
            env={**os.environ, **(environment or {})},
        ).stdout.strip()
    except (OSError, subprocess.CalledProcessError) as error:
        raise UserError(
            f"{python} has no SGLang ({error}); set server.python to the interpreter of its "
            "environment"
        ) from None


def server_environment(given: dict[str, Any]) -> dict[str, str]:
    """Variables with which a server finds our hooks; what it had in PYTHONPATH stays behind
    them."""
    before = str(given.get("PYTHONPATH") or os.environ.get("PYTHONPATH", ""))
    return {
        "PYTHONPATH": os.pathsep.join(
            [str(Path(__file__).resolve().parents[2]), *filter(None, [before])]
        )
    }


class Pending:
    """A row on its way: which tokens the server says it wrote."""

    def __init__(self, job: Job):
        self.job = job
        self.rid = ""
        self.complete: asyncio.Event = asyncio.Event()
        self.problem = ""
        self.refused = False  # by the server's answer, so that no states will come


class SglangCapture:
    """Sends jobs to the servers of `clients`, `concurrency` rows at once.

    `recover` is called when a server does not answer; it returns when it is back, or raises
    UserError."""

    last_is = "after_final_norm"

    def __init__(
        self,
        clients: list[Client],
        concurrency: int = 128,
        max_attempts: int = 5,
        patience: float = 60,
        recover: Callable[[], None] = lambda: None,
    ):
        self.clients, self.calls = clients, max(2, concurrency // ROWS)
        self.max_attempts, self.patience = max_attempts, patience
        self.recover, self.root = recover, ""
        self.waiting: dict[str, Pending] = {}

    def run(self, jobs: Iterator[Job], done: Callable[[Job], None]) -> None:
        asyncio.run(self._run(jobs, done))

    async def _run(self, jobs: Iterator[Job], done: Callable[[Job], None]) -> None:
        # One thread takes jobs: making one may wait for the disk. Others hash the rows that are
        # complete.
        with ThreadPoolExecutor(1) as taker, ThreadPoolExecutor(4) as hashers:
            async with contextlib.AsyncExitStack() as connections:
                for client in self.clients:
                    await connections.enter_async_context(client)
                if not self.root:
                    self.root = os.path.commonpath(
                        [await self._checked_root(client) for client in self.clients]
                    )
                folders: dict[str, int] = {}
                taken: asyncio.Queue[list[Job]] = asyncio.Queue(self.calls)
                reader = asyncio.create_task(self._read_acks(folders, hashers))
                calls = asyncio.gather(
                    self._take(jobs, taker, taken),
                    *(self._call(n, taken, done, hashers, folders) for n in range(self.calls)),
                )
                try:
                    finished, _ = await asyncio.wait(
                        [reader, calls], return_when=asyncio.FIRST_COMPLETED
                    )
                    for task in finished:
                        task.result()
                finally:
                    reader.cancel()
                    calls.cancel()
                    await asyncio.gather(reader, calls, return_exceptions=True)

    async def _checked_root(self, client: Client) -> str:
        """The folder under which a server's hooks write. Raises UserError if it was not started for
        this."""
        info = await asyncio.to_thread(client.info)
        url = client.url
        if not info.get("disable_radix_cache"):
            raise UserError(
                f"the server at {url} has its prefix cache on, so cached tokens would have no "
                "states; restart it "
                "with --disable-radix-cache"
            )
        hooks = info.get("forward_hooks") or []
        hooks = json.loads(hooks) if isinstance(hooks, str) else hooks
        roots = {
            hook.get("config", {}).get("root")
            for hook in hooks
            if str(hook.get("name")).startswith(PREFIX)
        }
        if len(roots) != 1:
            raise UserError(
                f"the server at {url} was started without our --forward-hooks; leave "
                "server.endpoints empty and "
                "let the stage start it"
            )
        return roots.pop()

    async def _take(
        self, jobs: Iterator[Job], taker: ThreadPoolExecutor, taken: asyncio.Queue
    ) -> None:
        """Takes rows ahead, so that no call waits while the next shard is read and laid out;
        nothing, for each call, last."""
        loop = asyncio.get_running_loop()
        while rows := await loop.run_in_executor(taker, lambda: list(itertools.islice(jobs, ROWS))):
            await taken.put(rows)
        for _ in range(self.calls):
            await taken.put([])

    async def _call(self, number: int, taken: asyncio.Queue, done, hashers, folders) -> None:
        """One of the calls that are under way at the same time: sends rows, and the next when these
        are answered and the states of those before are written."""
        client = self.clients[number % len(self.clients)]
        settling = asyncio.create_task(asyncio.sleep(0))
        try:
            while rows := await taken.get():
                pending = [Pending(job) for job in rows]
                await self._send(client, pending, folders)
                await settling
                settling = asyncio.create_task(
                    self._settle(client, pending, done, hashers, folders)
                )
            await settling
        finally:
            settling.cancel()
            await asyncio.gather(settling, return_exceptions=True)

    async def _settle(self, client: Client, pending: list[Pending], done, hashers, folders) -> None:
        """Waits for the states of rows that were answered, asks once more for those that have none,
        and calls all done."""
        await self._written(pending)
        if len(pending) > 1 or any(p.problem for p in pending):
            for one in [
                p for p in pending if not p.complete.is_set()
            ]:  # alone, so that no row fails for another's sake
                one.problem, one.refused = "", False
                await self._send(client, [one], folders)
                await self._written([one])
        for one in pending:
            if not one.complete.is_set() and one.problem:
                one.job.writer.problems.setdefault(one.job.row, one.problem)
            await asyncio.get_running_loop().run_in_executor(hashers, done, one.job)

    async def _send(self, client: Client, pending: list[Pending], folders: dict[str, int]) -> None:
        """Sends rows in one request and waits for its answer."""
        for one in pending:
            part = one.job.writer.path.resolve()
            if self.root not in map(str, part.parents):
                raise UserError(
                    f"the server writes states under {self.root}, but {part} is not there; "
                    "restart it from here"
                )
            name = part.relative_to(self.root).with_suffix("")
            one.rid = f"{PREFIX}:{name}:{one.job.row}:{uuid.uuid4().hex[:8]}"
            self.waiting[one.rid] = one
            acks = str(part.parent / ACKS)
            folders.setdefault(acks, os.path.getsize(acks) if os.path.exists(acks) else 0)
        body = {
            "rid": [p.rid for p in pending],
            "input_ids": [p.job.record.input_ids for p in pending],
            "sampling_params": {"max_new_tokens": 1, "temperature": 0},
        }
        if problem := await self._post(client, body):
            for one in pending:
                one.problem, one.refused = problem, True

    async def _written(self, pending: list[Pending]) -> None:
        """Returns when the states of answered rows are written, or will not be."""
        end = time.monotonic() + self.patience
        for one in pending:
            try:
                if not one.refused:
                    await asyncio.wait_for(one.complete.wait(), max(0.01, end - time.monotonic()))
            except TimeoutError:
                one.problem = one.problem or "the server answered, but wrote no states"
            self.waiting.pop(one.rid, None)

    async def _post(self, client: Client, body: dict[str, Any]) -> str:
        """Why the server refuses the request; empty if it answered. Raises UserError when it stays
        away."""
        for attempt in range(self.max_attempts):
            try:
                await client.generate(body)
                return ""
            except Failure as failure:
                if not failure.again:
                    return f"the server refuses the row: {failure}"
                reason = str(failure)
            await asyncio.sleep(min(30, 2**attempt))
            await asyncio.to_thread(self.recover)
        raise UserError(
            f"the server at {client.url} gave no answer in {self.max_attempts} tries (last: "
            f"{reason}); finished shards are kept: see the server's log and run the same command "
            "again"
        )

    async def _read_acks(self, folders: dict[str, int], hashers: ThreadPoolExecutor) -> None:
        """Follows the acknowledgement files and completes rows. Raises UserError when the server
        says that none can come."""
        loop = asyncio.get_running_loop()
        while True:
            for path, place in list(folders.items()):
                if not os.path.exists(path):
                    continue
                with open(path, "rb") as file:
                    file.seek(place)
                    lines = file.read().splitlines(keepends=True)
                for line in lines:
                    if line.endswith(b"\n"):
                        folders[path] += len(line)
                        self._acknowledge(json.loads(line), loop, hashers)
            await asyncio.sleep(POLL)

    def _acknowledge(self, ack: dict[str, Any], loop, hashers) -> None:
        if ack.get("fatal"):
            raise UserError(ack["fatal"])
        one = self.waiting.get(ack["rid"])
        if one is None:
            return
        if ack.get("problem"):
            one.problem = ack["problem"]
            return
        problem = ""
        if ack["bad"]:
            names = ", ".join(name for name, bad in zip(LAYER_NAMES, ack["bad"]) if bad)
            problem = f"NaN or inf in {names} from token {ack['bad_token']} on"

        def cover():
            if one.job.writer.cover(one.job.row, ack["token"], ack["count"], problem):
                loop.call_soon_threadsafe(one.complete.set)

        loop.run_in_executor(hashers, cover)
