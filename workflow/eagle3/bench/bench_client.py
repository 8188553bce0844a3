"""What a bench asks of a SGLang server: settings, an empty cache, and many answers timed from
outside."""

import asyncio
import json
import time
from typing import Any

import aiohttp

from eagle3.bench.figures import Served
from eagle3.bench.statistics import Prompt
from eagle3.core.errors import UserError


class BenchClient:
    """One server at `url`. Methods are plain ones; each runs its own event loop."""

    def __init__(self, url: str, timeout: float = 3600):
        self.url, self.timeout = url.rstrip("/"), timeout

    def settings(self) -> dict[str, Any]:
        """The server's own description of itself. Raises UserError if it gives none."""
        for path in ("/server_info", "/get_server_info"):
            status, text = asyncio.run(self._call("GET", path))
            if status == 200:
                return json.loads(text)
        raise UserError(
            f"{self.url} answers {status} to /server_info and /get_server_info, so the arms "
            "cannot be compared; "
            "is this a SGLang server?"
        )

    def flush(self, tries: int = 20) -> None:
        """Empties the prefix cache. A server that still works on something refuses; it is asked
        again for a while."""
        for _ in range(tries):
            status, text = asyncio.run(self._call("POST", "/flush_cache"))
            if status == 200:
                return
            time.sleep(0.25)
        raise UserError(
            f"{self.url} does not flush its cache ({status}: {text[:100]}); something else is "
            "using this server"
        )

    async def _call(self, method: str, path: str) -> tuple[int, str]:
        try:
            async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(60)) as session:
                async with session.request(method, self.url + path) as response:
                    return response.status, await response.text()
        except (aiohttp.ClientError, TimeoutError) as error:
            raise UserError(
                f"the server at {self.url} does not answer {path}: {error or 'timeout'}; see its "
                "log"
            ) from None

    def answers(
        self,
        prompts: list[Prompt],
        concurrency: int,
        max_new_tokens: int,
        repeat: int = 0,
        stream: bool = False,
    ) -> tuple[list[Served], float]:
        """(a row per prompt, seconds in all), greedy, `concurrency` requests in flight. Failures
        are rows with `error`."""
        return asyncio.run(self._answers(prompts, concurrency, max_new_tokens, repeat, stream))

    async def _answers(self, prompts, concurrency, max_new_tokens, repeat, stream):
        waiting = iter(prompts)
        rows: list[Served] = []
        # An event of a stream is one line with all tokens so far: longer than the default buffer
        # for long answers.
        async with aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0),
            read_bufsize=1 << 24,
            timeout=aiohttp.ClientTimeout(self.timeout),
        ) as session:

            async def work():
                for prompt in waiting:
                    rows.append(await self._answer(session, prompt, max_new_tokens, repeat, stream))

            start = time.perf_counter()
            await asyncio.gather(*(work() for _ in range(concurrency)))
            wall = time.perf_counter() - start
        return rows, wall

    async def _answer(
        self, session, prompt: Prompt, max_new_tokens: int, repeat: int, stream: bool
    ) -> Served:
        body = {
            "input_ids": prompt["prompt_ids"],
            "stream": stream,
            "sampling_params": {"temperature": 0, "max_new_tokens": max_new_tokens},
        }
        row = Served(prompt["dataset"], prompt["id"], repeat)
        start = time.perf_counter()
        try:
            async with session.post(f"{self.url}/generate", json=body) as response:
                if response.status != 200:
                    row.error = f"{response.status}: {(await response.text())[:200]}"
                    return row
                if stream:
                    answer, row.first = await _read_stream(response, start)
                else:
                    answer = await response.json(content_type=None)
            row.seconds = time.perf_counter() - start
            read_answer(row, answer)
        except (aiohttp.ClientError, TimeoutError, ValueError, KeyError, TypeError) as error:
            row.error = f"{type(error).__name__}: {error}"
        return row


async def _read_stream(response, start: float) -> tuple[dict[str, Any], float | None]:
    """(last event of a stream, seconds to the first one that holds a token). Raises ValueError on
    an error event.

    Each event holds all tokens so far. An event of server-sent events may arrive in pieces;
    `readline` joins them."""
    answer: dict[str, Any] = {}
    first = None
    while line := await response.content.readline():
        line = line.strip()
        if not line.startswith(b"data:") or line.endswith(b"[DONE]"):
            continue
        answer = json.loads(line[5:])
        if "error" in answer:
            raise ValueError(str(answer["error"])[:200])
        if first is None and answer.get("output_ids"):
            first = time.perf_counter() - start
    return answer, first


def read_answer(row: Served, answer: dict[str, Any]) -> None:
    """Fills a row from SGLang's answer. Raises KeyError if ids or counts are missing, ValueError if
    it was aborted."""
    meta = answer["meta_info"]
    reason = meta.get("finish_reason") or {}
    if reason.get("type") == "abort":
        raise ValueError(f"aborted: {reason.get('message', '')[:200]}")
    row.ids = list(answer["output_ids"])
    if meta["completion_tokens"] != len(row.ids):
        raise ValueError(
            f"{len(row.ids)} output_ids, but completion_tokens {meta['completion_tokens']}"
        )
    row.cycles = meta.get("spec_verify_ct", 0)
    row.accepted = list(
        meta.get("spec_correct_drafts_histogram") or meta.get("spec_accept_histogram") or []
    )
    row.cached = meta.get("cached_tokens", 0)
