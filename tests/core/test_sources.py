"""Where rows come from. Alone: python -m pytest tests/core/test_sources.py"""

import gzip
import hashlib
import io
import json
import os
import random
import subprocess
import sys
import tarfile
import threading
import zipfile
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import tiny
from eagle3.core import schema, sources
from eagle3.core.errors import UserError

ROWS = [{"prompt": "one\u2028line", "n": 1}, {"prompt": "two", "n": 2}]


def read(path):
    return list(sources.rows(schema.Source(path=str(path))))


@pytest.mark.parametrize(
    "name, content",
    [
        ("a.jsonl", "".join(json.dumps(r, ensure_ascii=False) + "\n" for r in ROWS)),
        ("a.json", json.dumps(ROWS)),
        ("b.json", "".join(json.dumps(r) + "\n" for r in ROWS)),  # JSON lines by another name
        ("a.ndjson", "\n".join(json.dumps(r) for r in ROWS)),
        ("a.jsonl.gz", gzip.compress("".join(json.dumps(r) + "\n" for r in ROWS).encode())),
        ("c.json", "\n\n" + json.dumps(ROWS, indent=2)),
        ("bom.jsonl", "\ufeff" + "".join(json.dumps(r) + "\n" for r in ROWS)),
        ("bom.json.gz", gzip.compress(("\ufeff" + json.dumps(ROWS)).encode())),
    ],
)
def test_json_in_all_its_forms(tmp_path, name, content):
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    assert read(path) == list(enumerate(ROWS))


def test_csv_and_tsv(tmp_path):
    (tmp_path / "a.csv").write_text('prompt,n\n"one,\nmore",1\n')
    (tmp_path / "a.tsv").write_text("prompt\tn\none\t1\n")
    assert read(tmp_path / "a.csv") == [(0, {"prompt": "one,\nmore", "n": "1"})]
    assert read(tmp_path / "a.tsv") == [(0, {"prompt": "one", "n": "1"})]
    long = "word " * 50_000
    (tmp_path / "b.csv").write_text(f"\ufeffprompt,n\n{long},1\n")
    assert read(tmp_path / "b.csv") == [(0, {"prompt": long, "n": "1"})]


def test_a_bad_line_is_a_bad_row_with_its_place(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(
        b'{"prompt": "x"}\n{"prompt": "y\n\xff\xfe\n{"prompt": "z"}\n'
    )
    rows = read(tmp_path / "a.jsonl")
    assert [type(row).__name__ for _, row in rows] == ["dict", "ValueError", "ValueError", "dict"]
    assert str(rows[1][1]).startswith("line 2, byte 16: ")


@pytest.mark.parametrize(
    "name, content, message",
    [
        ("a.json", b"[1, 2", "a.json cannot be read as .json: "),
        ("a.txt", b"x", "unknown kind of file; known are .jsonl, "),
        ("folder", None, "is a folder; name one file"),
        ("a.jsonl.gz", b'{"prompt": "x"}', "cannot be read as .jsonl.gz: "),
        (
            "cut.jsonl.gz",
            gzip.compress(random.Random(0).randbytes(5000))[:-99],
            "cut.jsonl.gz cannot be read as ",
        ),
        ("a.parquet", b"PAR1", "a.parquet cannot be read as .parquet: "),
        ("a.csv", "a,b\n1,2\n".encode("utf-16"), "as .csv: "),
    ],
)
def test_what_cannot_be_read_is_refused(tmp_path, name, content, message):
    path = tmp_path / name
    path.mkdir() if content is None else path.write_bytes(content)
    with pytest.raises(UserError, match=message):
        read(path)


def test_a_file_of_another_digest_is_refused(tmp_path):
    (tmp_path / "a.jsonl").write_text("{}\n")
    with pytest.raises(UserError, match="has sha256 .*, not 0000"):
        sources.local_path(schema.Source(path=str(tmp_path / "a.jsonl"), sha256="0" * 64))
    with pytest.raises(UserError, match="does not exist"):
        sources.local_path(schema.Source(path="nowhere.jsonl"))


def wheel(folder, content: bytes):
    with zipfile.ZipFile(folder / "pack-1.0-py3-none-any.whl", "w") as archive:
        archive.writestr("pack/data/rows.jsonl", content)


def sdist(folder, content: bytes):
    with tarfile.open(folder / "pack-1.0.tar.gz", "w:gz") as archive:
        member = tarfile.TarInfo("pack-1.0/data/rows.jsonl")
        member.size = len(content)
        archive.addfile(member, io.BytesIO(content))


@pytest.mark.parametrize(
    "make, file, option",
    [
        (wheel, "pack/data/rows.jsonl", "--only-binary=:all:"),
        (sdist, "data/rows.jsonl", "--no-binary=:all:"),
    ],
)
def test_a_file_that_a_package_ships(in_tmp, monkeypatch, make, file, option):
    """Downloaded once, checked, not installed; pip itself is replaced, since it needs a network."""
    content, calls = b'{"prompt": "x"}\n', []

    def pip(command, **_):
        calls.append(command)
        if option in command:
            make(in_tmp / command[command.index("-d") + 1], content)
        return subprocess.CompletedProcess(command, 0, "", "no such archive")

    monkeypatch.setattr(sources.subprocess, "run", pip)
    digest = hashlib.sha256(content).hexdigest()

    def fetch(digest=digest, file=file):
        for folder in ("wheel", "sdist"):
            (in_tmp / f".work/sources/packages/pack==1.0/{folder}").mkdir(
                parents=True, exist_ok=True
            )
        return sources.package_file("pack==1.0", file, digest)

    assert fetch().read_bytes() == content
    made = len(calls)
    fetch()
    assert len(calls) == made
    with pytest.raises(UserError, match=f"has sha256 {digest}, not {'1' * 64}"):
        fetch("1" * 64)
    with pytest.raises(UserError, match="cannot get other.jsonl of pack==1.0"):
        fetch("1" * 64, "other.jsonl")


class Hub(BaseHTTPRequestHandler):
    """What a hub answers to for one file of one commit."""

    def do_GET(self):
        body = json.dumps({"model_type": "llama", "hidden_size": 8}).encode()
        known = self.path == f"/org/name/resolve/{'a' * 40}/config.json"
        self.send_response(200 if known else 404)
        self.send_header("ETag", '"tag"')
        self.send_header("X-Repo-Commit", "a" * 40)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    do_HEAD = do_GET

    def log_message(self, *_):
        pass


def test_the_configuration_of_a_target_comes_from_the_hub_alone(tmp_path):
    """A few kilobytes, before the weights; nothing where the hub is not there."""
    code = (
        "import sys, json; from eagle3.core.sources import hub_config; "
        "from eagle3.core.schema import Source; "
        "print(json.dumps([hub_config(Source(hub=hub, revision='a' * 40)) "
        "for hub in ('org/name', 'org/other')]))"
    )
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env={
            **os.environ,
            "PYTHONPATH": str(tiny.ROOT / "workflow"),
            "HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}",
            "HF_HOME": str(tmp_path),
        },
    )
    server.shutdown()
    assert json.loads(done.stdout) == [{"model_type": "llama", "hidden_size": 8}, {}]
