"""What a bench asks of a SGLang server: settings, an empty cache, and many answers timed from
outside."""

import asyncio
import json
import time
from typing import Any

from eagle3.bench.figures import Served
from eagle3.bench.statistics import Prompt
from eagle3.core.errors import UserError
from eagle3.serving.client import Client, Failure


class BenchClient:
    """One server at `url`. Methods are plain ones; each runs its own event loop."""

    def __init__(self, url: str, timeout: float = 3600):
        self.url, self.timeout = url.rstrip("/"), timeout

    def settings(self) -> dict[str, Any]:
        """The server's own description of itself. Raises UserError if it gives none."""
        return Client(self.url).info()

    def flush(self, tries: int = 20) -> None:
        """Empties the prefix cache. A server that still works on something refuses; it is asked
        again for a while."""
        for _ in range(tries):
            if not (reason := Client(self.url).flush()):
                return
            time.sleep(0.25)
        raise UserError(
            f"{self.url} does not flush its cache ({reason}); something else is using this server"
        )

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
        async with Client(self.url, timeout=self.timeout) as client:

            async def work():
                for prompt in waiting:
                    rows.append(await self._answer(client, prompt, max_new_tokens, repeat, stream))

            start = time.perf_counter()
            await asyncio.gather(*(work() for _ in range(concurrency)))
            wall = time.perf_counter() - start
        return rows, wall

    async def _answer(
        self, client: Client, prompt: Prompt, max_new_tokens: int, repeat: int, stream: bool
    ) -> Served:
        body = {
            "input_ids": prompt["prompt_ids"],
            "stream": stream,
            "sampling_params": {"temperature": 0, "max_new_tokens": max_new_tokens},
        }
        row = Served(prompt["dataset"], prompt["id"], repeat)
        start = time.perf_counter()

        def note_first(event: bytes) -> None:
            if row.first is None and json.loads(event).get("output_ids"):
                row.first = time.perf_counter() - start

        try:
            answer = await client.generate(body, note_first)
            row.seconds = time.perf_counter() - start
            read_answer(row, answer)
        except Failure as failure:
            row.error = str(failure)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            row.error = f"{type(error).__name__}: {error}"
        return row


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
