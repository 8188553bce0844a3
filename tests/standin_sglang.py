"""A small server with SGLang's HTTP API that really decodes, with and without a drafter; and ways
of being wrong.

    python tests/standin_sglang.py --port 30000 --model-path DIR [--speculative-... as for SGLang]
    [--wrong KIND]

SGLang itself speculates without a GPU only with tests/sglang_cpu_kernels. KIND: `limit` (fewer
requests at once than asked),
`ignores` (starts without speculation, whatever the flags log), `silent` (no spec_verify_ct),
`counts` (every cycle reported as accepting nothing), `errors` (every third request fails), `short`
(completion_tokens disagree with output_ids), `busy` (never flushes)."""

import argparse
import json
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

sys.path[:0] = [
    str(Path(__file__).resolve().parents[1] / "workflow"),
    str(Path(__file__).resolve().parent),
]

KINDS = ("", "limit", "ignores", "silent", "counts", "errors", "short", "busy")


def arguments(command_line: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--model-path", required=True)
    parser.add_argument("--weight-version")
    parser.add_argument("--speculative-algorithm")
    parser.add_argument("--speculative-draft-model-path")
    for name in (
        "speculative-num-steps",
        "speculative-eagle-topk",
        "speculative-num-draft-tokens",
        "max-running-requests",
        "cuda-graph-max-bs-decode",
        "random-seed",
        "context-length",
    ):
        parser.add_argument(f"--{name}", type=int)
    parser.add_argument("--wrong", choices=KINDS, default="")
    return parser.parse_known_args(command_line)[0]


class Standin:
    """The model behind the server; `given` are its arguments."""

    def __init__(self, given: argparse.Namespace):
        import torch
        from eagle3.bench.speculate import Decoder
        from eagle3.core.files import read_json
        from eagle3.drafter import export
        from eagle3.target import layers
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(1)
        self.given, self.asked, self.flushes, self.lock = given, 0, 0, threading.Lock()
        if given.wrong == "ignores":
            given.speculative_algorithm = None
        model = (
            AutoModelForCausalLM.from_pretrained(given.model_path, dtype=torch.float32)
            .eval()
            .requires_grad_(False)
        )
        stop = read_json(Path(given.model_path) / "config.json")["eos_token_id"]
        drafter, captured = None, []
        if given.speculative_algorithm:
            drafter = export.load_drafter(
                given.speculative_draft_model_path, model.get_input_embeddings().weight
            )
            ids = drafter.config["eagle_config"]["eagle_aux_hidden_state_layer_ids"]
            captured = layers.served_layers(ids, layers.PLUS_ONE)
        self.decoder = Decoder(model, captured, [stop], drafter)

    def info(self) -> dict:
        keys = [key for key in vars(self.given) if key not in ("wrong", "port")]
        found = {key: getattr(self.given, key) for key in keys}
        limit = (
            1
            if self.given.wrong == "limit" and self.given.speculative_algorithm
            else self.given.max_running_requests
        )
        return {
            **found,
            "version": "0.5.14",
            "dtype": "float32",
            "max_running_requests": limit,
            "internal_states": [
                {
                    "effective_max_running_requests_per_dp": limit,
                    "memory_usage": {"token_capacity": 4096},
                }
            ],
        }

    def model_info(self) -> dict:
        return {"model_path": self.given.model_path, "weight_version": self.given.weight_version}

    def answer(self, body: dict):
        """Yields one event per decoding step, as a stream does; the last one is the whole
        answer."""
        self.asked += 1
        if self.given.wrong == "errors" and self.asked % 3 == 0:
            raise RuntimeError("out of memory, on purpose")
        wanted = body["sampling_params"]["max_new_tokens"]
        with self.lock:
            if self.decoder.drafter:
                made = self.decoder.speculative(
                    body["input_ids"], wanted, self.given.speculative_num_steps
                )
            else:
                made = self.decoder.plain(body["input_ids"], wanted)
        meta = {
            "prompt_tokens": len(body["input_ids"]),
            "cached_tokens": 0,
            "finish_reason": {"type": "length"},
        }
        if made.accepted and self.given.wrong != "silent":
            histogram = [
                made.accepted.count(n) for n in range(self.given.speculative_num_steps + 1)
            ]
            if self.given.wrong == "counts":
                histogram, made.accepted = [len(made.ids) - 1], [0] * (len(made.ids) - 1)
            meta |= {
                "spec_verify_ct": len(made.accepted),
                "spec_correct_drafts_histogram": histogram,
            }
        for end in range(1, len(made.ids)) if body.get("stream") else []:
            yield {
                "text": None,
                "output_ids": made.ids[:end],
                "meta_info": {**meta, "completion_tokens": end},
            }
            time.sleep(0.0002)
        count = len(made.ids) + (self.given.wrong == "short")
        yield {
            "text": "",
            "output_ids": made.ids,
            "meta_info": {**meta, "completion_tokens": count},
        }


def handler(standin: Standin):
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_):
            pass

        def reply(self, status: int, text: str, kind: str = "application/json") -> None:
            content = text.encode()
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def do_GET(self):
            known = {"/server_info": standin.info, "/model_info": standin.model_info}
            self.reply(200, json.dumps(known[self.path]())) if self.path in known else self.reply(
                404, "{}"
            )

        def do_POST(self):
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            if self.path == "/flush_cache":
                standin.flushes += 1
                self.reply(
                    *(400, "pending requests")
                    if standin.given.wrong == "busy"
                    else (200, "Cache flushed.")
                )
                return
            body = json.loads(body)
            try:
                events = list(standin.answer(body))
            except RuntimeError as error:
                self.reply(500, json.dumps({"error": {"message": str(error)}}))
                return
            if not body.get("stream"):
                self.reply(200, json.dumps(events[-1]))
                return
            lines = (
                "".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n"
            )
            self.reply(200, lines, "text/event-stream")

    return Handler


def run(given: argparse.Namespace) -> tuple[ThreadingHTTPServer, Standin]:
    """The server, listening; the caller runs `serve_forever` and closes it."""
    standin = Standin(given)
    return ThreadingHTTPServer(("127.0.0.1", given.port), handler(standin)), standin


if __name__ == "__main__":
    run(arguments(sys.argv[1:]))[0].serve_forever()
