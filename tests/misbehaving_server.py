"""A server of SGLang's HTTP interface that misbehaves on purpose. Alone: python
tests/misbehaving_server.py --port 30000

It takes SGLang's flags (and ignores those that it does not know), answers with ids that depend on
the prompt alone, as a greedy model would, and does what the JSON in the variable MISBEHAVE says:

    refuse, hang, cut, garbage, wrong_ids, wrong_row, abort   share of requests that end so
    once            list of faults, each of one answer, in this order: 404, or see `spoiled`
    status          list of codes for `refuse` (default 408 425 429 500 503)
    late            seconds before each answer
    reject          a token id: prompts that hold it get 400
    poison          a token id: prompts that hold it kill the server
    die_at          the process ends at its k-th answer
    stall_at        from the k-th answer on nothing is answered any more
    kv_cache_dtype  what to report instead of the truth
    starting        seconds from open port to first token
    die_starting    text to print before ending with code 3 while starting
    deaf            ignore SIGTERM
    worker          start a child process, as SGLang's schedulers are
    tokens          length of every answer
    key             the API key that it wants; it repeats what it got in refusals

The file in the variable EVENTS gets one line for each whole answer: the digest of its prompt's ids.
"""

import argparse
import asyncio
import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import time

from aiohttp import web

STOP = 2


def answer_ids(
    prompt: list[int], max_new_tokens: int, vocab: int = 400, length: int | None = None
) -> list[int]:
    """The one right answer to a prompt: 1 to 24 ids, the last one STOP unless cut at
    `max_new_tokens`."""
    seed = hashlib.blake2b(json.dumps(prompt).encode(), digest_size=8).digest()
    chooser = random.Random(seed)
    wanted = length or chooser.randint(1, 24)
    ids = [chooser.randrange(3, vocab) for _ in range(wanted - 1)] + [STOP]
    return ids[:max_new_tokens]


def spoiled(fault: str, ids: list[int], meta: dict) -> tuple[list[int], dict, dict | None]:
    """(ids, meta_info, whole event in their place or None) of an answer that is none."""
    stop, count = {"type": "stop", "matched": STOP}, len(ids)
    if fault.endswith("_inside"):
        return ids, meta, {"error": {"message": "not now", "code": int(fault[:3])}}
    if fault == "abort_503":
        abort = {"type": "abort", "message": "queue is full", "status_code": 503}
        return ids, meta | {"finish_reason": abort}, None
    if fault == "other_model":
        return ids, meta | {"weight_version": "another"}, None
    if fault == "no_stop_id":
        ids = [*[7] * (count - 1), 9]
        return ids, meta | {"finish_reason": {"type": "stop", "matched": 9}}, None
    if fault == "unmatched_stop":
        return [7] * count, meta | {"finish_reason": {"type": "stop"}}, None
    if fault == "goes_on":
        ids = [STOP, *[7] * (count - 1), STOP]
        return ids, meta | {"finish_reason": stop, "completion_tokens": count + 1}, None
    if fault == "no_id":
        return ids, {k: v for k, v in meta.items() if k != "id"}, None
    if fault == "no_counts":
        return ids, {k: v for k, v in meta.items() if not k.endswith("_tokens")}, None
    if fault == "longer_prompt":
        return ids, meta | {"prompt_tokens": meta["prompt_tokens"] + 1}, None
    raise ValueError(fault)


class Server:
    def __init__(self, flags, misbehave: dict):
        self.flags, self.misbehave = flags, misbehave
        self.started, self.count, self.running = time.monotonic(), 0, 0
        self.events = open(os.environ["EVENTS"], "a") if os.environ.get("EVENTS") else None
        self.chance = random.Random()

    @web.middleware
    async def wants_key(self, request: web.Request, handler) -> web.StreamResponse:
        given, key = request.headers.get("Authorization"), self.misbehave.get("key")
        if key and given != f"Bearer {key}":
            return web.Response(status=401, text=f"no good key: {given}")
        return await handler(request)

    def happens(self, name: str) -> bool:
        return self.chance.random() < self.misbehave.get(name, 0)

    async def generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        ids, params = body["input_ids"], body["sampling_params"]
        if params.get("ignore_eos"):  # the question whether it is ready
            while (
                time.monotonic() - self.started < self.misbehave.get("starting", 0)
                or self.stalled()
            ):
                await asyncio.sleep(0.05)
            return web.json_response({"output_ids": [5], "meta_info": {}})
        if not body.get("stream"):
            answers = [
                {
                    "output_ids": answer_ids(
                        one, params["max_new_tokens"], length=self.misbehave.get("tokens")
                    )
                }
                for one in (ids if ids and isinstance(ids[0], list) else [ids])
            ]
            return web.json_response(answers if ids and isinstance(ids[0], list) else answers[0])
        self.running += 1
        try:
            return await self.answer(request, body, ids, params)
        finally:
            self.running -= 1

    def stalled(self) -> bool:
        return self.count >= self.misbehave.get("stall_at", float("inf"))

    async def answer(self, request, body, ids, params) -> web.StreamResponse:
        if self.misbehave.get("poison") in ids:
            os._exit(139)
        if self.misbehave.get("reject") in ids:
            return web.json_response(
                {
                    "error": {
                        "message": "this prompt is not for us: "
                        + request.headers.get("Authorization", "")
                    }
                },
                status=400,
            )
        if self.happens("refuse"):
            return web.Response(
                status=self.chance.choice(self.misbehave.get("status", [408, 425, 429, 500, 503]))
            )
        once = self.misbehave.get("once") or [None]
        fault = once.pop(0) if once[0] else None
        if fault == "404":
            return web.Response(status=404)
        if self.happens("hang") or self.stalled():
            await asyncio.sleep(3600)
        if self.misbehave.get("late"):
            await asyncio.sleep(self.misbehave["late"])
        out = answer_ids(ids, params["max_new_tokens"], length=self.misbehave.get("tokens"))
        finish = (
            {"type": "stop", "matched": STOP}
            if out[-1] == STOP
            else {"type": "length", "length": len(out)}
        )
        meta = {
            "id": body["rid"],
            "finish_reason": finish,
            "prompt_tokens": len(ids),
            "completion_tokens": len(out),
            "weight_version": self.flags.weight_version,
        }
        if self.happens("abort"):
            meta["finish_reason"] = {
                "type": "abort",
                "message": "out of memory",
                "status_code": 500,
            }
        if fault:
            out, meta, inside = spoiled(fault, out, meta)
        else:
            inside = None
        if self.happens("wrong_row"):
            meta["id"] = "another"
        if self.happens("wrong_ids"):
            out = self.chance.choice(
                [out[:-1], [*out, 3], [100_000, *out[1:]], [None, *out[1:]], [str(i) for i in out]]
            )
        event = json.dumps(inside or {"text": "", "output_ids": out, "meta_info": meta}).encode()
        if self.happens("garbage"):
            event = self.chance.choice(
                [b"{}", b'{"output_ids": [1]}', event[: len(event) // 2], b"\xff\xfe", b'"text"']
            )
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        early = json.dumps(
            {"text": None, "output_ids": out[:1], "meta_info": {**meta, "finish_reason": None}}
        ).encode()
        await response.write(b"data: " + early + b"\n\n")
        if self.happens("cut"):
            request.transport.close()
            return response
        self.count += 1
        if self.count == self.misbehave.get("die_at"):
            os._exit(137)
        if self.events:
            self.events.write(
                hashlib.blake2b(json.dumps(ids).encode(), digest_size=8).hexdigest() + "\n"
            )
            self.events.flush()
        await response.write(b"data: " + event + b"\n\ndata: [DONE]\n\n")
        await response.write_eof()
        return response

    async def model_info(self, _):
        return web.json_response(
            {"model_path": self.flags.model_path, "weight_version": self.flags.weight_version}
        )

    async def server_info(self, _):
        return web.json_response(
            {
                "version": "0.0.test",
                "dtype": self.flags.dtype,
                "quantization": self.flags.quantization,
                "kv_cache_dtype": self.misbehave.get("kv_cache_dtype", self.flags.kv_cache_dtype),
                "context_length": self.flags.context_length,
                "tp_size": 1,
                "speculative_algorithm": None,
            }
        )

    async def flush_cache(self, _):
        return web.Response(text="flushed")

    async def metrics(self, _):
        lines = [
            f'sglang:num_running_reqs{{model_name="m"}} {self.running}',
            'sglang:num_queue_reqs{model_name="m"} 0',
            'sglang:token_usage{model_name="m"} 0.25',
            'sglang:gen_throughput{model_name="m"} 123.0',
        ]
        return web.Response(text="\n".join(lines) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("host", "model-path", "weight-version", "dtype", "kv-cache-dtype", "quantization"):
        parser.add_argument(
            f"--{name}",
            default={"host": "127.0.0.1", "dtype": "auto", "kv-cache-dtype": "auto"}.get(name),
        )
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--context-length", type=int)
    flags, _ = parser.parse_known_args()
    misbehave = json.loads(os.environ.get("MISBEHAVE", "{}"))
    if "die_starting" in misbehave:
        print(misbehave["die_starting"], flush=True)
        sys.exit(3)
    if misbehave.get("deaf"):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if misbehave.get("worker"):
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"])
    server = Server(flags, misbehave)
    app = web.Application(client_max_size=1 << 30, middlewares=[server.wants_key])
    app.router.add_post("/generate", server.generate)
    app.router.add_get("/model_info", server.model_info)
    app.router.add_get(
        "/get_server_info", server.server_info
    )  # the older name of one, the newer one of the other
    app.router.add_get("/metrics", server.metrics)
    app.router.add_post("/flush_cache", server.flush_cache)
    web.run_app(
        app,
        host=flags.host,
        port=flags.port,
        print=lambda text: print(text, flush=True),
        handle_signals=not misbehave.get("deaf"),
        shutdown_timeout=0.2,
        access_log=None,
    )


if __name__ == "__main__":
    main()
