"""What an engine is: something that takes requests and hands back results, as many at once as it likes."""

from dataclasses import dataclass, field
from typing import Any, Callable, Iterator, Protocol


@dataclass(frozen=True)
class Request:
    """One answer wanted: continue `prompt_ids` by at most `max_new_tokens`."""

    row_id: str
    turn: int
    key: str
    prompt_ids: list[int]
    max_new_tokens: int
    seed: int


@dataclass(frozen=True)
class Result:
    """An answer (`output_ids` with the stop token, if one came) or, with `error`, the reason why there is none."""

    request: Request
    output_ids: list[int] = field(default_factory=list)
    finish_reason: str = ""
    error: str = ""
    detail: str = ""
    tries: int = 1


class Engine(Protocol):
    """`run` takes requests lazily, calls `on_result` once for each, and runs what that returns (the next turn) too."""

    def fingerprint(self) -> dict[str, Any]:
        """Numerics as the running engine reports them, versions and settings; written to fingerprint.json."""

    def run(self, requests: Iterator[Request], on_result: Callable[[Result], Request | None]) -> None: ...
