"""Places for requests that all processes of a build share, so that two data sets at once ask a
server for no more than one does: `runtime.concurrency` is the server's limit, whoever sends."""

import asyncio
import contextlib
import fcntl
import os
from collections.abc import AsyncIterator
from pathlib import Path

PAUSE = 0.02  # seconds until a process that found every place taken looks again


class Slots:
    """`count` places; the file at `path` is where processes see each other's. A place is a lock on
    one byte of it, which the kernel frees when its holder dies. One object per process and file:
    closing a second one would free all."""

    def __init__(self, path: Path, count: int):
        path.parent.mkdir(parents=True, exist_ok=True)
        self.file = open(path, "a+b")
        self.free = list(range(count))  # as far as this process is concerned
        self.looking = asyncio.Lock()  # one task looks for all that wait

    @contextlib.asynccontextmanager
    async def one(self) -> AsyncIterator[None]:
        """Holds a place; waits for one."""
        async with self.looking:
            while (place := self._take()) is None:
                await asyncio.sleep(PAUSE)
        try:
            yield
        finally:
            fcntl.lockf(self.file, fcntl.LOCK_UN, 1, place, os.SEEK_SET)
            self.free.append(place)

    def _take(self) -> int | None:
        for at in reversed(range(len(self.free))):  # the place given back last is free, as a rule
            with contextlib.suppress(BlockingIOError, PermissionError):
                fcntl.lockf(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, self.free[at], os.SEEK_SET)
                return self.free.pop(at)
        return None

    def close(self) -> None:
        self.file.close()
