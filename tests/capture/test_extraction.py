"""Extraction of a data set: checks, reuse, damage, kill, disk. Alone: python -m pytest
tests/capture/test_extraction.py"""

import contextlib
import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import extraction_project
import pytest
import server_parts as serving
import tiny
import torch
from eagle3.capture import extraction as module
from eagle3.capture.extraction import Extraction
from eagle3.capture.transformers_capture import CapturingReplica, TransformersCapture
from eagle3.core.errors import UserError
from eagle3.hidden_states import shards
from eagle3.records import records as record_files
from eagle3.records.records import Record
from eagle3.target.model import Target
from extraction_project import BAD, make_records

LAYERS, H = [2, 4, 5], 32


@pytest.fixture(scope="module")
def target(tiny_model, tmp_path_factory) -> Target:
    torch.set_num_threads(1)
    return Target(extraction_project.describe_target(tmp_path_factory.mktemp("target"), tiny_model))


@pytest.fixture(scope="module")
def model(target):
    """The target's own model, with an embedding that makes every record with token BAD infinite."""
    loaded = target.load_model()
    with torch.no_grad():
        loaded.get_input_embeddings().weight[BAD] = float("inf")
    return loaded


class Counting(TransformersCapture):
    """Counts the rows it is asked for."""

    last_is = "after_final_norm"

    def __init__(self, model, layers=LAYERS):
        self.batch_tokens, self.rows = 128, []
        self.replicas = [CapturingReplica(model, layers, H)]

    def run(self, jobs, done):
        super().run(
            (self.rows.append((job.writer.key, job.record.id)) or job for job in jobs), done
        )

    @property
    def extracted(self) -> list[str]:
        return [identifier for key, identifier in self.rows if key not in ("together", "alone")]


def extract(
    target,
    model,
    file: Path,
    out: Path,
    dtype="float32",
    layers=LAYERS,
    earlier: Path | None = None,
    said=None,
    greedy=False,
    rate=0.0,
    capture=None,
) -> Counting:
    """Runs an extraction from beginning to end; returns the capture that it used, if it used
    one."""
    params = SimpleNamespace(dtype=dtype, shard_bytes=20000, max_quarantine_rate=rate)
    identity = {"target_digest": target.digest, "hidden_size": H, "layers": layers, "dtype": dtype}
    one = Extraction(
        file,
        Path(".work/extract/one"),
        H,
        identity,
        params,
        SimpleNamespace(reserve_bytes=0),
        (said if said is not None else []).append,
    )
    one.reuse({p.name: p for p in earlier.iterdir()} if earlier and earlier.exists() else {})
    one.check_disk()
    capture = capture or Counting(model, layers)
    one.capture(lambda: contextlib.nullcontext(capture), target.head, greedy)
    one.publish(out, {"records_digest": "d"})
    return capture


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def test_everything_is_there_once(in_tmp, target, model):
    """Manifest, sizes as planned, states of the reference, self-checks on record; nothing left in
    the work folder."""
    file, out = make_records(in_tmp / "r.parquet", 20), in_tmp / "out"
    planned = Extraction(
        file,
        Path(".work/plan"),
        H,
        {"target_digest": target.digest, "hidden_size": H, "layers": LAYERS, "dtype": "float32"},
        SimpleNamespace(dtype="float32", shard_bytes=20000),
        None,
        print,
    ).plan
    capture = extract(target, model, file, out)
    manifest = shards.read_manifest(out)
    assert [e["bytes"] for e in manifest["shards"]] == [p.size for p in planned]
    assert [(out / e["file"]).stat().st_size for e in manifest["shards"]] == [
        p.size for p in planned
    ]
    assert len(planned) > 2 and sorted(capture.extracted) == sorted(f"r{n}" for n in range(20))
    assert (
        manifest["checks"]["records"] == 3
        and manifest["checks"]["difference_alone_and_batched"] < 0.001
    )
    assert not (in_tmp / ".work/extract/one/shards").exists()
    row = shards.ShardSet([out], "train", {})[3]
    with torch.no_grad():
        states = model(row["input_ids"].long()[None], output_hidden_states=True).hidden_states
    torch.testing.assert_close(
        row["aux"], torch.cat([states[i][0] for i in LAYERS], -1), rtol=1e-5, atol=1e-5
    )
    torch.testing.assert_close(row["last"], states[-1][0], rtol=1e-5, atol=1e-5)


def test_nothing_is_extracted_again(in_tmp, target, model):
    """catalogue D10, D22: unchanged: no target is loaded; more records: the rest only; the checks
    stay on record."""
    out = in_tmp / "out"
    extract(target, model, make_records(in_tmp / "r.parquet", 12), out)
    before = contents(out)
    assert not extract(
        target, model, in_tmp / "r.parquet", out, earlier=out, capture=Counting(model)
    ).rows
    assert contents(out) == before and shards.read_manifest(out)["checks"]["records"] == 3
    again = extract(
        target, model, make_records(in_tmp / "r.parquet", 30), out, earlier=out
    ).extracted
    kept = {name for name in contents(out) if name in before and name.endswith("safetensors")}
    entries = {e["file"]: set(e["ids"]) for e in shards.read_manifest(out)["shards"]}
    assert (
        len(kept) >= len(before) - 2
    )  # all but the manifest and the last shard, if that has more records now
    assert set(again) == {f"r{n}" for n in range(30)} - set().union(
        *(entries[name] for name in kept)
    )


@pytest.mark.parametrize("change", [{"dtype": "bfloat16"}, {"layers": [1, 4, 5]}])
def test_what_was_made_otherwise_is_not_used(in_tmp, target, model, change):
    """catalogue D13: nothing of the earlier states gets under the new manifest."""
    file, out = make_records(in_tmp / "r.parquet", 8), in_tmp / "out"
    extract(target, model, file, out)
    assert len(extract(target, model, file, out, earlier=out, **change).extracted) == 8
    manifest = shards.read_manifest(out)
    assert all(manifest[key] == value for key, value in change.items())


def test_only_the_damaged_shard_is_extracted_again(in_tmp, target, model):
    """catalogue D11, D14: a truncated one and a flipped bit, each named; the others are the same
    files."""
    file, out, said = make_records(in_tmp / "r.parquet", 20), in_tmp / "out", []
    extract(target, model, file, out)
    before, entries = contents(out), shards.read_manifest(out)["shards"]
    states = {
        row["id"]: (row["aux"].clone(), row["last"].clone())
        for row in shards.ShardSet([out], "train", {})
    }
    os.truncate(out / entries[0]["file"], 1000)
    flipped = bytearray(before[entries[2]["file"]])
    flipped[5000] ^= 1
    (out / entries[2]["file"]).write_bytes(flipped)
    capture = extract(target, model, file, out, earlier=out, said=said)
    assert set(capture.extracted) == {*entries[0]["ids"], *entries[2]["ids"]}
    after, made_again = contents(out), {entries[0]["file"], entries[2]["file"], "manifest.json"}
    assert after.keys() == before.keys() and all(
        after[name] == before[name] for name in before.keys() - made_again
    )
    for row in shards.ShardSet(
        [out], "train", {}
    ):  # in other company the last bits of a record may differ
        torch.testing.assert_close(
            (row["aux"], row["last"]), states[row["id"]], rtol=1e-5, atol=1e-5
        )
    for entry in (entries[0], entries[2]):
        assert any(f"{entry['file']} of the earlier states is damaged" in line for line in said)


DRIVER = """
import contextlib, sys, time
sys.path[:0] = {paths!r}
import torch
torch.set_num_threads(1)
from pathlib import Path
from eagle3.target.model import Target
from tests.capture.test_extraction import Counting, extract
target = Target({target!r})
capture = Counting(target.load_model())
if {slow}:
    fill = capture.replicas[0].fill
    capture.replicas[0].fill = lambda batch, done: (time.sleep(0.15), fill(batch, done))
capture.batch_tokens = 1  # every record alone: in other company its last bits may differ
extract(target, None, Path("r.parquet"), Path("out"), capture=capture)
print(len(capture.extracted))
"""


def test_killed_at_any_moment_it_continues(in_tmp, target, model):
    """kill -9 while shards are open: the finished ones are kept, and the result is that of an
    undisturbed run."""
    make_records(in_tmp / "r.parquet", 40)
    work = in_tmp / ".work/extract/one/shards"

    def start(slow):
        code = DRIVER.format(paths=tiny.PATHS, target=str(target.folder), slow=slow)
        return subprocess.Popen(
            [sys.executable, "-c", code], stdout=subprocess.PIPE, cwd=in_tmp, text=True
        )

    process = start(True)
    while True:  # stopped first, so that what is seen of it is what it dies with
        assert process.poll() is None, "it ended before it was killed"
        process.send_signal(signal.SIGSTOP)
        if len(list(work.glob("*.json"))) >= 3 and list(work.glob("*.part")):
            break
        process.send_signal(signal.SIGCONT)
        time.sleep(0.02)
    process.kill()
    process.wait()
    kept = sum(len(json.loads(p.read_text())["ids"]) for p in work.glob("*.json"))
    assert not (in_tmp / "out").exists()
    done = start(False)
    assert int(done.communicate(timeout=120)[0]) == 40 - kept
    resumed = contents(in_tmp / "out")
    capture = Counting(target.load_model())
    capture.batch_tokens = 1  # every record alone: in other company its last bits may differ
    extract(target, model, in_tmp / "r.parquet", in_tmp / "undisturbed", capture=capture)
    undisturbed = contents(in_tmp / "undisturbed")
    del undisturbed["manifest.json"], resumed["manifest.json"]  # the self-check took other records
    assert undisturbed == resumed


def test_too_little_disk_is_said_before_the_first_write(in_tmp, target):
    """With the numbers, and what would fit."""
    file = make_records(in_tmp / "r.parquet", 8)
    one = Extraction(
        file,
        in_tmp / "w",
        H,
        {},
        SimpleNamespace(dtype="bfloat16", shard_bytes=20000),
        SimpleNamespace(reserve_bytes=2**60),
        print,
    )
    with pytest.raises(UserError) as error:
        one.check_disk()
    needed = sum(p.size for p in one.plan)
    assert f"need {needed:,} bytes" in str(error.value) and "GiB are free" in str(error.value)
    assert (
        "0 of" in str(error.value)
        and "float8_e4m3fn" in str(error.value)
        and "max_samples" in str(error.value)
    )
    assert not list((in_tmp / "w").rglob("*.part"))


def test_full_in_mid_run_loses_nothing_finished(in_tmp, target, model):
    """The second shard finds no room; the first stays, and with room again only the rest is
    extracted."""
    file, out = make_records(in_tmp / "r.parquet", 20), in_tmp / "out"
    writer, made = module.ShardWriter, []

    class Small(writer):
        """Leaves it to the kernel to refuse: the third file asks for more than any file system
        has."""

        def __init__(self, folder, key, group, *rest):
            made.append(key)
            if len(made) == 5:  # two of the self-check, then two shards
                os.posix_fallocate(os.open(folder / "x.part", os.O_CREAT | os.O_WRONLY), 0, 2**62)
            super().__init__(folder, key, group, *rest)

    module.ShardWriter = Small
    try:
        with pytest.raises(OSError):
            extract(target, model, file, out, capture=Slowed(model))
    finally:
        module.ShardWriter = writer
    finished = {p.stem for p in (in_tmp / ".work/extract/one/shards").glob("*.json")}
    assert finished and not out.exists()
    again = extract(target, model, file, out)
    assert finished.isdisjoint({key for key, _ in again.rows})


class Slowed(Counting):
    """One record at a time, so that earlier shards are finished before the next one is begun."""

    def run(self, jobs, done):
        for job in jobs:
            super().run(iter([job]), done)
            time.sleep(0.02)


def test_quarantine_has_a_limit(in_tmp, target, model):
    """catalogue D16, D17: one bad row of 20 passes at 5 %, two do not; the row is named."""
    out = in_tmp / "out"
    file = make_records(in_tmp / "r.parquet", 20, bad=(7,))
    extract(target, model, file, out, rate=0.05)
    manifest = shards.read_manifest(out)
    assert [row["id"] for row in manifest["quarantined"]] == ["r7"] and manifest["rows"] == 19
    assert "NaN or inf in first layer" in manifest["quarantined"][0]["reason"]
    assert "r7" not in {row["id"] for row in shards.ShardSet([out], "train", {})}
    with pytest.raises(
        UserError, match="2 of 20 records have no usable states.*max_quarantine_rate 0.05.*r3"
    ):
        extract(target, model, make_records(in_tmp / "r.parquet", 20, bad=(3, 7)), out, rate=0.05)


class Mixed(Counting):
    """Gives each request of a batch the states of its neighbour, as engines have done."""

    def run(self, jobs, done):
        taken = list(jobs)
        others = taken[1:] + taken[:1]
        swapped = [
            SimpleNamespace(writer=a.writer, row=a.row, record=b.record)
            for a, b in zip(taken, others)
        ]
        self.replicas[0].fill(swapped, lambda job: None)
        self.replicas[0].offload.drain()
        for job in taken:
            done(job)


class Missing(Counting):
    """Has no states for the first tokens, as with a prefix cache."""

    def run(self, jobs, done):
        for job in jobs:
            job.writer.cover(job.row, 4, len(job.record.input_ids) - 4)
            done(job)


def same_length(path: Path) -> Path:
    chooser = random.Random(0)
    made = [
        Record(f"r{n}", [chooser.randrange(3, 390) for _ in range(20)], [True] * 20, "train")
        for n in range(4)
    ]
    record_files.write(
        path,
        made,
        Counter(tokens=80, supervised=80),
        SimpleNamespace(min_supervised_share=0, max_supervised_share=1),
        greedy=False,
    )
    return path


def test_mixed_up_requests_are_noticed(in_tmp, target, model):
    """catalogue D01: before the first shard is kept."""
    with pytest.raises(UserError, match="captured alone and in a batch differ"):
        extract(
            target, model, same_length(in_tmp / "r.parquet"), in_tmp / "out", capture=Mixed(model)
        )
    assert not (in_tmp / "out").exists()


def test_a_shift_is_told_from_the_rounding_of_another_batch():
    """One channel towers over the others, nearly the same for every token: by cosine all tokens are
    alike. Numbers that differ by 6 %, as in a deep bf16 model, are the same states; those of the
    token beside them are not."""
    generator = torch.Generator().manual_seed(0)
    states = torch.randn(40, 64, generator=generator)
    states[:, 7] = 900 + states[:, 7]
    noisy = states + 0.06 * torch.randn(40, 64, generator=generator)
    shifted = torch.cat([states[1:], states[:1]])
    assert torch.cosine_similarity(states, shifted, dim=-1).min() > 0.999
    pair = {"aux": states, "last": states}
    assert 0.04 < module._agreement([(pair, {"aux": noisy, "last": noisy})]) < 0.08
    with pytest.raises(
        UserError, match="captured alone and in a batch differ.*largest difference: [12]"
    ):
        module._agreement([(pair, {"aux": shifted, "last": shifted})])


def test_missing_states_name_the_prefix_cache(in_tmp, target, model):
    """catalogue D02"""
    with pytest.raises(
        UserError,
        match="16 of 20 tokens have states, the first from token 4 on.*--disable-radix-cache",
    ):
        extract(
            target, model, same_length(in_tmp / "r.parquet"), in_tmp / "out", capture=Missing(model)
        )


def test_states_that_do_not_predict_the_answers_are_refused(in_tmp, target, model):
    """catalogue D07: states from before the norm, or of another target; here the tokens are not the
    model's at all."""
    with pytest.raises(UserError, match="of greedy tokens are what the captured states predict"):
        extract(target, model, make_records(in_tmp / "r.parquet", 6), in_tmp / "out", greedy=True)


@pytest.fixture
def project(in_tmp, target) -> Path:
    return extraction_project.make(in_tmp / "project", target.path)


def test_a_damaged_shard_in_the_cache_of_dvc_is_rebuilt_alone(project):
    """The command of the refusal, with a damaged object in DVC's cache, which DVC would restore
    again and again."""
    tiny.run(project, "dvc", "repro", "extract@one")
    out = project / "data/hidden_states/one"
    before = contents(out)
    os.chdir(project)
    entries = shards.read_manifest(out)["shards"]
    assert len(entries) > 1
    name = hashlib.md5(before[entries[0]["file"]]).hexdigest()
    for copy in (Path(".dvc/cache/files/md5", name[:2], name[2:]), out / entries[0]["file"]):
        os.chmod(copy, 0o644)
        os.truncate(copy, 3000)
    with pytest.raises(UserError, match="is damaged"):
        shards.ShardSet([out], "train", {})
    said = tiny.run(project, "dvc", "repro", "--force", "--single-item", "extract@one").stdout
    assert "its copy is removed from the DVC cache" in said
    assert f"{len(entries) - 1} of them there already" in said
    assert contents(out) == before
    shards.ShardSet([out], "train", {})
    assert "up to date" in tiny.run(project, "dvc", "repro", "extract@one").stdout


def test_a_command_that_drops_our_path_is_said_so(project, tmp_path):
    """A launcher that sets PYTHONPATH anew: the log alone would say that a module is missing."""
    python = tmp_path / "python-with-sglang"
    python.write_text("#!/bin/sh\necho 0.5.14\n")
    python.chmod(0o755)
    content = tiny.read_params(project)
    content["hidden_states"]["engine"] = "sglang"
    content["server"] = {
        "python": str(python),
        "port": serving.free_port(),
        "max_restarts": 0,
        "command": ["env", "-i", sys.executable, "-c", "import eagle3"],
    }
    tiny.write_params(project, content)
    done = tiny.run(project, "dvc", "repro", "extract@one", check=False)
    assert done.returncode and "its command drops the PYTHONPATH" in done.stdout
