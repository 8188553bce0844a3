"""Answers from SGLang servers over HTTP: many requests at once, none lost, none twice, none mixed.

An answer counts only if it is whole and belongs to its request (`checked`). A server that dies,
hangs or refuses costs time, never a row: the request is tried again, elsewhere if there is another
server."""

import asyncio
import contextlib
import random
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from typing import Any

from eagle3.core.errors import UserError
from eagle3.responses.engines import Request, Result
from eagle3.responses.slots import Slots
from eagle3.serving.client import BUSY, REFUSED, Client, Failure
from eagle3.serving.server import FOLDER, SERVERS, Lease, lease
from eagle3.target.model import Target

STREAM_INTERVAL = 64  # tokens between signs of life of a request
LONGEST_PAUSE = 30.0
# Sampling parameters that leave the target's distribution as it is.
NEUTRAL = {
    "top_p": 1.0,
    "top_k": -1,
    "min_p": 0.0,
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
    "repetition_penalty": 1.0,
    "min_new_tokens": 0,
    "n": 1,
    "ignore_eos": False,
}


class Endpoint:
    """A server's address with the requests that it is working on. `down`: no requests until it is
    ready again."""

    def __init__(self, client: Client):
        self.client, self.url = client, client.url
        self.down_since: float | None = None
        self.probe: asyncio.Future | None = None  # the question whether it is ready again
        self.deadlines: set[asyncio.Timeout] = set()  # one for each request in flight
        self.failures = 0  # since the last token
        self.token_at = time.monotonic()

    def alive(self) -> None:
        self.token_at, self.failures = time.monotonic(), 0

    def take_down(self) -> None:
        self.down_since = self.down_since or time.monotonic()


class SGLangEngine:
    """Client of one server that a supervisor owns, or of several that others run
    (`server.endpoints`).

    `settings` and `runtime` are the sections `server` and `runtime` of params.yaml.
    """

    def __init__(
        self, target: Target, sampling, settings, runtime, log: Callable[[str], None] = print
    ):
        self.target, self.sampling, self.settings, self.runtime, self.log = (
            target,
            sampling,
            settings,
            runtime,
            log,
        )
        self.counts: Counter = Counter()  # failures that were tried again, by reason
        self.stack = contextlib.ExitStack()

    def __enter__(self) -> dict[str, Any]:
        self.server: Lease = self.stack.enter_context(
            lease(self.settings, self.target, log=self.log)
        )
        found = self.server.fingerprint
        self.log(
            f"server ready: SGLang {found['version']}, dtype {found['dtype']}, KV cache "
            f"{found['kv_cache_dtype']}, "
            f"quantisation {found['quantization']}, context {found['context_length']}"
        )
        reported = {k: v for k, v in found.items() if k != "model_path"}
        return {
            "engine": "sglang",
            "reported": reported,
            "flags": dict(self.settings.flags),
            "environment": {k: str(v) for k, v in self.settings.environment.items()},
        }

    def __exit__(self, *_) -> None:
        self.stack.close()
        if self.counts:
            self.log(
                "tried again: "
                + ", ".join(f"{reason} {count}" for reason, count in self.counts.most_common())
            )
        if self.counts["busy"] > 100:
            self.log("the server often had no room; a smaller runtime.concurrency wastes less")

    def run(
        self, requests: Iterator[Request], on_result: Callable[[Result], Request | None]
    ) -> None:
        asyncio.run(self._run(iter(requests), on_result))

    async def _run(self, requests, on_result) -> None:
        self.endpoints = [Endpoint(self.server.client(url)) for url in self.server.urls]
        if (
            self.server.folder is None
        ):  # the lease waited for one of them; each is compared with the target before its use
            for endpoint in self.endpoints:
                endpoint.take_down()
        self.following: deque[Request] = deque()
        slots = Slots(
            (FOLDER if self.server.folder else SERVERS) / "slots", self.runtime.concurrency
        )
        self.open = 0  # requests taken and not finished: while there are any, more may follow
        # A row that was in flight at several deaths of its server may be their cause: it goes on in
        # ever smaller company, until it dies alone or is cleared.
        self.lanes = {
            2: asyncio.Semaphore(max(1, self.runtime.concurrency // 16)),
            3: asyncio.Semaphore(1),
        }
        async with contextlib.AsyncExitStack() as connections:
            for endpoint in self.endpoints:
                await connections.enter_async_context(endpoint.client)
            workers = asyncio.gather(
                *[self._work(requests, on_result, slots) for _ in range(self.runtime.concurrency)]
            )
            watch = asyncio.create_task(self._watch())
            try:
                done, _ = await asyncio.wait([workers, watch], return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()
            finally:
                workers.cancel()
                watch.cancel()
                await asyncio.gather(workers, watch, return_exceptions=True)
                slots.close()

    async def _work(self, requests: Iterator[Request], on_result, slots: Slots) -> None:
        while True:
            # A conversation's next turn goes before a new conversation, so that what is begun gets
            # finished.
            request = self.following.popleft() if self.following else next(requests, None)
            if request is None:
                if not self.open:
                    return
                await asyncio.sleep(0.05)
                continue
            self.open += 1
            async with slots.one():
                result = await self._answer(request)
            if following := on_result(result):
                self.following.append(following)
            self.open -= 1

    async def _answer(self, request: Request) -> Result:
        """Tries until there is an answer, or a reason to give the row up."""
        tries = deaths = 0
        pause, begun, last = 0.0, time.monotonic(), None
        while True:
            async with self.lanes.get(min(deaths, 3)) or contextlib.nullcontext():
                last = await self._endpoint(last)
                try:
                    ids, reason = await self._ask(last, request)
                    return Result(request, ids, reason, tries=tries + deaths + 1)
                except Failure as failure:
                    again = failure
            if not again.again:
                return Result(
                    request, error=again.reason, detail=again.detail, tries=tries + deaths + 1
                )
            self.counts[again.reason] += 1
            last.failures += 1
            tries += again.costs
            if again.reason == "server_died":
                deaths += 1
            patience = self.runtime.request_timeout * self.runtime.max_attempts
            if (
                tries >= self.runtime.max_attempts
                or deaths > 3
                or time.monotonic() - begun > patience
            ):
                return Result(
                    request, error=again.reason, detail=again.detail, tries=tries + deaths
                )
            if again.down:
                last.take_down()
                continue
            pause = min(LONGEST_PAUSE, max(0.1, 2 * pause))
            await asyncio.sleep(pause * random.uniform(0.5, 1))

    async def _endpoint(self, last: Endpoint | None) -> Endpoint:
        """The server with the fewest requests; not the one that just failed if there is another.
        Waits for one."""
        while not (up := [e for e in self.endpoints if e.down_since is None]):
            await asyncio.sleep(0.02)
        return min([e for e in up if e is not last] or up, key=lambda e: len(e.deadlines))

    async def _ask(self, endpoint: Endpoint, request: Request) -> tuple[list[int], str]:
        """(ids, "stop" or "length"). Raises Failure."""
        # names this try: an answer to an earlier one is no answer
        identity = f"{request.key}-{time.monotonic_ns():x}"
        body = {
            "rid": identity,
            "input_ids": request.prompt_ids,
            "stream": True,
            "sampling_params": self._sampling_params(request),
        }
        deadline = asyncio.timeout(self.runtime.request_timeout)
        try:
            async with deadline:
                endpoint.deadlines.add(deadline)
                answer = await endpoint.client.generate(body, lambda event: endpoint.alive())
            version = self.server.weight_versions.get(endpoint.url)
            return checked(answer, request, identity, version, self.target, endpoint.client)
        except TimeoutError:
            if endpoint.down_since:
                raise Failure(
                    "server_died", "it gave no token and was given up", costs=False, down=True
                ) from None
            raise Failure(
                "timeout", f"no whole answer in {self.runtime.request_timeout:.0f} s"
            ) from None
        finally:
            endpoint.deadlines.discard(deadline)

    def _sampling_params(self, request: Request) -> dict[str, Any]:
        """What decides the answer, all of it: a server fills in what is left out from
        --preferred-sampling-params."""
        sampling = self.sampling
        params = NEUTRAL | {
            "max_new_tokens": request.max_new_tokens,
            "temperature": sampling.temperature,
            "stop_token_ids": self.target.stop_ids,
            "stream_interval": STREAM_INTERVAL,
        }
        if sampling.temperature > 0:
            # The seed counts where the server runs with --enable-deterministic-inference.
            params |= {
                "top_p": sampling.top_p,
                "top_k": sampling.top_k or -1,
                "sampling_seed": request.seed,
            }
        return params

    async def _watch(self) -> None:
        """Brings back servers that are down, and gives up those that hold requests and give no
        token: the time since the last token is what counts, of any request, since a long answer or
        a long queue is no failure."""
        loop, patience = asyncio.get_running_loop(), self.runtime.stall_timeout
        while True:
            await asyncio.sleep(0.05)
            now = time.monotonic()
            for endpoint in self.endpoints:
                if endpoint.down_since is not None:
                    if endpoint.probe is None:
                        endpoint.probe = loop.run_in_executor(
                            None, self.server.state, endpoint.url, min(patience, 60)
                        )
                    elif endpoint.probe.done():
                        probe, endpoint.probe = endpoint.probe, None
                        if probe.result() == "ready":
                            self._bring_back(endpoint)
                elif not endpoint.deadlines and not endpoint.failures:
                    endpoint.token_at = now
                elif now - endpoint.token_at > patience:
                    self.log(
                        f"{endpoint.url}: {len(endpoint.deadlines)} requests and no token for "
                        f"{patience:.0f} s"
                    )
                    endpoint.take_down()
                    self.server.report_stuck()
                    for deadline in list(endpoint.deadlines):
                        deadline.reschedule(loop.time())
            if self.server.folder is None and all(
                e.down_since is not None and now - e.down_since > patience for e in self.endpoints
            ):
                raise UserError(
                    f"no token from {', '.join(self.server.urls)} for {patience:.0f} s; finished "
                    "rows are kept: "
                    "start a server and run the same command again"
                )

    def _bring_back(self, endpoint: Endpoint) -> None:
        away = time.monotonic() - endpoint.down_since
        endpoint.down_since = None
        if away > 1:  # a moment's absence proves nothing, and must not set the watch back
            endpoint.alive()
            self.log(f"{endpoint.url} is back after {away:.0f} s")


def checked(
    answer: Any,
    request: Request,
    identity: str,
    weight_version: str | None,
    target: Target,
    client: Client,
) -> tuple[list[int], str]:
    """(ids, "stop" or "length") of an answer that is whole, belongs to `request`, comes from the
    model that was checked (`weight_version`) and ends as it says. Raises Failure."""
    try:
        meta, ids = answer["meta_info"], answer["output_ids"]
        finish = meta["finish_reason"]
        kind = finish["type"]
        if kind == "abort":
            status, message = finish.get("status_code"), str(finish.get("message"))
            known = status in (*BUSY, *REFUSED)
            raise client.failure(status, message) if known else Failure("aborted", message)
        whole = isinstance(ids, list) and ids and all(type(i) is int for i in ids)
        given = (meta["id"], meta["prompt_tokens"], meta["completion_tokens"])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise Failure("garbage", f"{type(error).__name__} in {str(answer)[:200]!r}") from None
    if kind not in ("stop", "length") or not whole:
        raise Failure("garbage", f"finish reason {kind!r}, {len(ids or [])} ids")
    if given[:2] != (identity, len(request.prompt_ids)):
        raise Failure(
            "wrong_row",
            f"the answer is for request {given[0]} of {given[1]} prompt ids, not {identity} of "
            f"{len(request.prompt_ids)}",
        )
    if meta.get("weight_version", weight_version) != weight_version:
        raise Failure(  # down: what it serves now is compared with the target before its next use
            "wrong_model",
            f"weight version {meta['weight_version']}, {weight_version} before",
            down=True,
        )
    check_ids(ids, kind, finish.get("matched"), given[2], request, target)
    # A stop id in the last place is an end as well: SGLang looks at the length first.
    return ids, "stop" if ids[-1] in target.stop_ids else kind


def check_ids(ids: list[int], kind: str, matched: Any, counted: Any, request, target) -> None:
    """Raises Failure if ids are not what an answer of this length and end can have."""
    stop = set(target.stop_ids)
    problem = ""
    if max(ids) >= target.vocab_size or min(ids) < 0:
        problem = f"id {max(ids)} in a vocabulary of {target.vocab_size}"
    elif len(ids) > request.max_new_tokens or counted != len(ids):
        problem = f"{len(ids)} ids, {counted} counted, {request.max_new_tokens} asked"
    elif kind == "length" and len(ids) < request.max_new_tokens:
        problem = f"cut at {len(ids)} ids, {request.max_new_tokens} asked"
    elif not stop.isdisjoint(ids[:-1]):
        problem = f"goes on after the stop id {next(i for i in ids if i in stop)}"
    elif kind == "stop" and ids[-1] not in stop:
        problem = f"stopped at {ids[-1]}, but the target's stop ids are {sorted(stop)}"
    elif kind == "stop" and isinstance(matched, int) and ids[-1] != matched:
        problem = f"stopped at token {matched}, but the last id is {ids[-1]}"
    if problem:
        raise Failure("wrong_ids", problem)
