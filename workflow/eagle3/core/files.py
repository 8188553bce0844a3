"""Files: whole writes by rename, canonical JSON, strict JSON lines, fast digests."""

import contextlib
import json
import os
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import xxhash

from eagle3.core.errors import UserError

CHUNK = 1 << 22


def canonical_json(value: Any) -> str:
    """One text per meaning: keys sorted, no spaces, and 1.0 written as 1 (DVC does not tell them
    apart either)."""

    def plain(v):
        if isinstance(v, float) and v.is_integer() and abs(v) < 2**53:
            return int(v)
        if isinstance(v, dict):
            return {str(k): plain(x) for k, x in v.items()}
        if isinstance(v, (list, tuple)):
            return [plain(x) for x in v]
        return v

    return json.dumps(plain(value), sort_keys=True, separators=(",", ":"), ensure_ascii=False)


def digest_of(value: Any) -> str:
    """32 hex digits that identify a JSON value."""
    return xxhash.xxh3_128_hexdigest(canonical_json(value).encode())


def digest_file(path: str | Path) -> str:
    """32 hex digits (xxh3-128) of a file's bytes."""
    digest = xxhash.xxh3_128()
    with open(path, "rb") as file:
        while chunk := file.read(CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


@contextlib.contextmanager
def replacing(path: str | Path) -> Iterator[Path]:
    """Yields a temporary path beside nothing of value; on success its content takes the place of
    `path` at once.

    The temporary lies in `.work/tmp` of the same file system when `path` is inside the project, so
    that directories which are DVC dependencies never hold a half-written file. The final file is
    always a new one: writing through a link would alter DVC's cache."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    folder = Path(".work/tmp")
    folder.mkdir(parents=True, exist_ok=True)
    if folder.stat().st_dev != path.parent.stat().st_dev:
        folder = path.parent
    temporary = folder / f".{path.name}.{os.getpid()}.tmp"
    try:
        yield temporary
        _sync(temporary)
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        os.replace(temporary, path)
    except OSError as error:
        if error.errno == 28:
            free = shutil.disk_usage(path.parent).free
            raise UserError(
                f"no space left while writing {path} ({free / 2**20:,.0f} MiB free); nothing "
                "finished was "
                "lost: make room and run the same command again"
            ) from error
        raise
    finally:
        if temporary.is_dir() and not temporary.is_symlink():
            shutil.rmtree(temporary, ignore_errors=True)
        else:
            temporary.unlink(missing_ok=True)


def _sync(path: Path) -> None:
    if path.is_file():
        with open(path, "rb") as file:
            os.fsync(file.fileno())


def write_text(path: str | Path, text: str) -> None:
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_json(path: str | Path, value: Any) -> None:
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def write_jsonl(path: str | Path, rows: Iterable[dict]) -> int:
    """Writes one JSON object per line and returns their number."""
    count = 0
    with replacing(path) as temporary, open(temporary, "w", encoding="utf-8") as file:
        for row in rows:
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
            count += 1
    return count


def read_json(path: str | Path) -> Any:
    """Raises UserError, naming the file, if it is missing or is not JSON."""
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path} is missing") from None
    except ValueError as error:
        raise UserError(
            f"{path} is not valid JSON ({error}); delete it and run the build again"
        ) from None


def read_jsonl(path: str | Path) -> Iterator[dict]:
    """The rows of a file that this project wrote. Lines end at b'\\n' only: U+2028 inside a string
    is no line end.

    Raises UserError with line number and byte offset for a line that is not UTF-8 JSON.
    """
    offset = 0
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            try:
                yield json.loads(line.decode("utf-8"))
            except ValueError as error:
                raise UserError(f"{path}, line {number}, byte {offset}: {error}") from None
            offset += len(line)
