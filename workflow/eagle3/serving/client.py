"""How to talk to a SGLang server: everything that does so goes through here.

The API key (`server.api_key_env`) goes along with every request and into no message: what a server
says is cleaned of it before it is passed on."""

import asyncio
import contextlib
import json
import os
from collections.abc import Callable
from typing import Any

import aiohttp

from eagle3.core.errors import UserError

BUSY = (408, 425, 429, 503)  # "later": asked again for as long as the request's time lasts
REFUSED = (400, 413, 422)  # this request is wrong, and will be at the next attempt
DENIED = (401, 403)
REPORTED = (
    "version",
    "dtype",
    "quantization",
    "kv_cache_dtype",
    "context_length",
    "tp_size",
    "speculative_algorithm",
)


class Failure(Exception):
    """A request without an answer. `again`: another attempt may succeed; `costs`: this one counts
    as one of the row's attempts; `down`: the server is suspect."""

    def __init__(self, reason: str, detail: str, again=True, costs=True, down=False):
        super().__init__(f"{reason}: {detail}")
        self.reason, self.detail = reason, detail[:500]
        self.again, self.costs, self.down = again, costs, down


def api_key(settings) -> str | None:
    """The key for `server.endpoints`. Raises UserError if the variable that should hold it is
    empty."""
    if not settings.endpoints or not settings.api_key_env:
        return None
    if key := os.environ.get(settings.api_key_env, "").strip():
        return key
    raise UserError(
        f"server.api_key_env is {settings.api_key_env}, but that environment variable is not set; "
        f"export {settings.api_key_env}=… in the shell that runs the build"
    )


class Client:
    """One server at `url`. Plain methods run an event loop of their own, so they must not be called
    from one; `generate` needs `async with client:` around it."""

    def __init__(self, url: str, key: str | None = None, timeout: float | None = None):
        self.url, self.key, self.timeout = url.rstrip("/"), key, timeout
        self.session: aiohttp.ClientSession | None = None

    def _new_session(self, timeout: float | None) -> aiohttp.ClientSession:
        # No limit of the client's own, since a request's time runs from when it is sent, never from
        # when it queues; kept alive for less than the server's 5 s; a proxy (trust_env) has no
        # business between us and the server.
        return aiohttp.ClientSession(
            headers={"Authorization": f"Bearer {self.key}"} if self.key else None,
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=3),
            timeout=aiohttp.ClientTimeout(total=timeout, sock_connect=30),
            trust_env=False,
        )

    async def __aenter__(self) -> "Client":
        self.session = self._new_session(self.timeout)
        return self

    async def __aexit__(self, *_) -> None:
        await self.session.close()

    def cleaned(self, text: str) -> str:
        """`text` without the key, which a server may repeat in an error message."""
        return text.replace(self.key, "***") if self.key else text

    async def generate(
        self, body: dict[str, Any], on_event: Callable[[bytes], None] = lambda line: None
    ) -> Any:
        """The answer to POST /generate, of a stream the last event. `on_event` gets the JSON text
        of each event as it arrives.

        Raises Failure; TimeoutError only where the caller set a time limit around the call."""
        try:
            async with self.session.post(
                f"{self.url}/generate", json=body, allow_redirects=False
            ) as response:
                if response.status != 200:
                    raise self.failure(response.status, await response.text(errors="replace"))
                if body.get("stream"):
                    content = await self._last_event(response, on_event)
                else:
                    content = await response.read()
        except aiohttp.ClientConnectorError as error:
            raise Failure(
                "no_connection", self.cleaned(str(error)), costs=False, down=True
            ) from None
        except aiohttp.ClientPayloadError as error:
            raise Failure("cut", self.cleaned(str(error)), down=True) from None
        except TimeoutError:
            raise Failure("timeout", f"no whole answer in {self.timeout} s") from None
        except (aiohttp.ClientError, ConnectionError) as error:
            detail = self.cleaned(f"{type(error).__name__} {error}")
            raise Failure("server_died", detail, costs=False, down=True) from None
        try:
            answer = json.loads(content)
        except ValueError as error:
            raise Failure("garbage", f"{type(error).__name__} in {content[:200]!r}") from None
        if isinstance(answer, dict) and "error" in answer:
            error = answer["error"] if isinstance(answer["error"], dict) else {}
            raise self.failure(error.get("code"), str(error.get("message", answer["error"])))
        return answer

    async def _last_event(self, response, on_event: Callable[[bytes], None]) -> bytes:
        """The last event of a stream, which holds the whole answer. Events of server-sent events
        are lines, and may arrive in pieces."""
        last, rest = b"", b""
        async for chunk in response.content.iter_any():
            *lines, rest = (rest + chunk).split(b"\n")
            for line in lines:
                if line.startswith(b"data:"):
                    if line[5:].strip() == b"[DONE]":
                        return last
                    last = line[5:]
                    on_event(last)
        raise Failure("cut", "the stream ended without its end mark", down=True)

    def failure(self, status: int | None, text: str) -> Failure:
        """What an error status means, in the head of an answer or within it. Raises UserError
        where the key is what the server refuses."""
        text = self.cleaned(text)
        if status in DENIED:
            raise UserError(
                f"the server at {self.url} refuses the API key (HTTP {status} {text[:200]}); name "
                "the environment variable that holds it in server.api_key_env"
            )
        if status in BUSY:
            return Failure("busy", f"HTTP {status} {text}", costs=False)
        name = f"http_{status}" if isinstance(status, int) else "refused_by_server"
        return Failure(name, text, again=status not in REFUSED)

    def _fetch(
        self, path: str, body: Any = None, timeout: float = 60, method: str | None = None
    ) -> tuple[int, str]:
        """(status, text). Raises OSError when the server does not answer, UserError if it refuses
        the key."""

        async def ask():
            async with self._new_session(timeout) as session:
                async with session.request(
                    method or ("GET" if body is None else "POST"),
                    self.url + path,
                    json=body,
                    allow_redirects=False,
                ) as response:
                    return response.status, await response.text(errors="replace")

        try:
            status, text = asyncio.run(ask())
        except (aiohttp.ClientError, TimeoutError) as error:
            raise OSError(self.cleaned(str(error)) or "timeout") from None
        if status in DENIED:
            raise self.failure(status, text)
        return status, self.cleaned(text)

    def generates(self, timeout: float) -> bool:
        """Whether the server answers with a token: the only sign that counts. Open ports and green
        health pages come minutes before, and stay after the scheduler has died."""
        params = {"max_new_tokens": 1, "temperature": 0, "ignore_eos": True}
        body = {"input_ids": [1, 2, 3], "sampling_params": params}
        try:
            return len(json.loads(self._fetch("/generate", body, timeout)[1])["output_ids"]) == 1
        except (OSError, ValueError, KeyError, TypeError):
            return False

    def _described(self, *names: str) -> dict[str, Any]:
        """The JSON object under the first of several paths that is there; {} if none is. Raises
        OSError or ValueError."""
        for name in names:
            status, text = self._fetch(f"/{name}")
            if status == 200:
                found = json.loads(text)
                if not isinstance(found, dict):
                    raise ValueError(f"/{name} is no JSON object")
                return found
            if status not in (404, 405):
                raise OSError(f"HTTP {status} from /{name}: {text[:100]}")
        return {}

    def info(self) -> dict[str, Any]:
        """The server's description of its settings, in one level whatever the version. Raises
        UserError if it gives none."""
        try:
            found = self._described("server_info", "get_server_info")
        except (OSError, ValueError) as error:
            raise UserError(
                f"the server at {self.url} does not answer /server_info: {error}; see its log"
            ) from None
        if not found:
            raise UserError(
                f"{self.url} answers neither /server_info nor /get_server_info; is this a SGLang "
                "server?"
            )
        arguments = found.get("server_args")
        return {**found, **(arguments if isinstance(arguments, dict) else {})}

    def fingerprint(self) -> dict[str, Any]:
        """What the running server says of itself, by the names that its versions share. Raises
        OSError or ValueError."""
        model = self._described("model_info", "get_model_info")
        server = self._described("server_info", "get_server_info")
        return {
            "model_path": model.get("model_path"),
            "weight_version": model.get("weight_version"),
            **{name: server.get(name) for name in REPORTED},
        }

    def flush(self) -> str:
        """Empties the prefix cache. Returns why it is not empty yet: a server that still works on
        something refuses."""
        try:
            status, text = self._fetch("/flush_cache", method="POST")
        except OSError as error:
            status, text = 0, str(error)
        return "" if status == 200 else f"{status}: {text[:100]}"

    def metrics(self) -> str:
        """The page of counters, in Prometheus' text format; "" without one."""
        with contextlib.suppress(OSError, UserError):
            status, text = self._fetch("/metrics", timeout=3)
            return text if status == 200 else ""
        return ""
