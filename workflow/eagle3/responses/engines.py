"""What an engine is: something that takes requests and hands back results, as many at once as it
likes."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol


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
    """An answer (`output_ids` with the stop token, if one came) or, with `error`, the reason why
    there is none."""

    request: Request
    output_ids: list[int] = field(default_factory=list)
    finish_reason: str = ""
    error: str = ""
    detail: str = ""
    tries: int = 1


class Engine(Protocol):
    """A context: `with engine as made_by: engine.run(…)`. Entering makes it ready to answer.

    `made_by` says what answers: engine, versions, numerics as the running engine reports them,
    settings; nothing that differs from run to run, since it becomes part of the artifact.
    `run` takes requests lazily, calls `on_result` once for each, and runs what that returns (the
    next turn) too."""

    def __enter__(self) -> dict[str, Any]: ...

    def __exit__(self, *_) -> None: ...

    def run(
        self, requests: Iterator[Request], on_result: Callable[[Result], Request | None]
    ) -> None: ...
