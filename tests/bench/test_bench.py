"""The stage bench as a whole, on both engines. Alone: python -m pytest tests/bench/test_bench.py"""

import csv
import json
import os
import subprocess
import sys
from html.parser import HTMLParser

import pytest
import tiny
import tiny_drafter
from eagle3.bench.report_schema import Report
from eagle3.core.files import write_json


@pytest.fixture(scope="module")
def folder(tmp_path_factory, tiny_target, learnt):
    """A project's folder in which everything before the bench is there."""
    made = tmp_path_factory.mktemp("bench")
    for name in ("workflow", "dvc.yaml"):
        (made / name).symlink_to(tiny.ROOT / name)
    data = made / "data"
    data.mkdir()
    (data / "target").symlink_to(tiny_target.folder)
    tiny_drafter.write_records(
        data / "records", "one", learnt.prompts[:4], learnt.answers[:4], "validation"
    )
    tiny_drafter.write_records(
        data / "records", "two", learnt.prompts[4:6], learnt.answers[4:6], "train"
    )
    for name in ("one", "two"):
        (data / "responses" / name).mkdir(parents=True)
        (data / "responses" / name / "raw_responses.jsonl").write_text("{}\n")
        write_json(
            data / "responses" / name / "fingerprint.json",
            {
                "engine": "sglang",
                "numerics": {"dtype": "float32"},
                "made_by": [{"engine": "sglang", "reported": {"version": "0.5.14"}}],
            },
        )
    states = {
        "target_digest": tiny_target.digest,
        "convention": "plus_one",
        "rows": 4,
        "tokens": 100,
        "layers": [2, 4, 5],
        "records_digest": "ab",
    }
    drafter = tiny_drafter.save(
        learnt.drafter,
        data / "drafter",
        vocab="cd",
        made_with={"git_commit": "ef"},
        hidden_states={"one": states, "two": states},
    )
    write_json(drafter / "metrics.json", {"accept_length": 3.1, "accept_length_untrained": 1.0})
    (drafter / "curves.csv").write_text(
        "update,loss,accept_length\n0,,1.0\n10,2.5,2.0\n20,1.5,3.1\n"
    )
    (made / "questions.jsonl").write_text(
        "".join(json.dumps({"turns": [tiny.text(i), "more"]}) + "\n" for i in range(3))
    )
    return made


def run(folder, check=True, **changes) -> subprocess.CompletedProcess:
    content = tiny.params(
        folder / "data" / "target",
        {"one": (folder / "x", "generate"), "two": (folder / "y", "generate")},
    )
    bench = {
        "steps": 3,
        "max_prompts": 4,
        "max_new_tokens": 10,
        "max_difference": 0.001,
        "min_accept_length": 1.05,
    }
    tiny.write_params(
        folder,
        {**content, "bench": bench | changes.get("bench", {}), "server": changes.get("server", {})},
    )
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "workflow/scripts/bench.py"],
        cwd=folder,
        capture_output=True,
        text=True,
        env=environment,
        timeout=500,
    )
    assert not check or done.returncode == 0, done.stderr[-4000:]
    if (folder / "data/bench/report.json").exists():
        Report.model_validate_json((folder / "data/bench/report.json").read_text())
    return done


class Page(HTMLParser):
    """Collects what the page would fetch, and its text."""

    def __init__(self, text: str):
        super().__init__()
        self.fetched, self.tags, self.text = [], [], ""
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.fetched += [v for k, v in attributes if k in ("src", "href", "data", "action")]

    def handle_data(self, data):
        self.text += data


def test_in_process(folder):
    """Served equals replayed, outputs are equal, questions are asked, the page is whole; the run
    ends well."""
    questions = {
        "chat": {
            "source": {"path": "questions.jsonl"},
            "columns": {"prompt": "turns"},
            "max_samples": 2,
        }
    }
    done = run(
        folder,
        bench={
            "questions": questions,
            "max_prompt_tokens": 128,
            "repeats": 2,
            "min_accept_length": 1.0,
        },
    )
    report = json.loads((folder / "data/bench/report.json").read_text())
    assert report["held_out"]["chat"] == {
        "source": "questions",
        "available": 2,
        "seen_in_training": 0,
        "used": 2,
    }
    assert report["held_out"]["one"]["used"] == 4 and set(report["datasets"]) == {"one", "chat"}
    length = report["all"]["accept_length"]
    assert length["served"] == length["replayed"] and report["all"]["outputs"]["equal"] == 6
    assert report["verdict"] in done.stderr
    assert report["lineage"]["one: answered by"] == "sglang 0.5.14, dtype float32"
    assert len(report["rows"]) == 2 * 2 * 6
    tokens = sum(r["ids"] for r in report["rows"] if r["variant"] != "baseline")
    assert tokens / sum(r["cycles"] for r in report["rows"]) == pytest.approx(length["served"])
    page = Page((folder / "data/bench/report.html").read_text())
    assert page.fetched == [] and "script" not in page.tags and "link" not in page.tags
    assert report["verdict"] in page.text and report["lineage"]["drafter"] in page.text
    metrics = json.loads((folder / "data/bench/metrics.json").read_text())
    assert metrics["accept_length"] == length
    rows = list(csv.DictReader((folder / "data/bench/acceptance.csv").open()))
    assert [r["position"] for r in rows] == ["1", "2", "3"]
    assert float(rows[0]["accepted"]) == report["all"]["acceptance"]["position_0"]


def test_on_a_server_through_the_supervisor(folder):
    """A stand-in for SGLang, started twice by the supervisor: without and with the drafter."""
    command = [sys.executable, str(tiny.ROOT / "tests/standin_sglang.py")]
    done = run(
        folder,
        bench={"engine": "sglang", "concurrency": [1, 2], "max_new_tokens": 8},
        server={"command": command, "port": 31871, "start_timeout": 240},
    )
    report = json.loads((folder / "data/bench/report.json").read_text())
    assert [c["concurrency"] for c in report["cells"]] == [1, 2]
    assert report["settings"]["3-1-4"]["speculative_algorithm"] == "EAGLE3"
    assert (
        report["settings"]["baseline"]["max_running_requests"]
        == report["settings"]["3-1-4"]["max_running_requests"]
        == 2
    )
    assert report["all"]["accept_length"]["served"] == report["all"]["accept_length"]["replayed"]
    assert report["verdict"] in done.stderr


def test_refusals_name_what_is_wrong_and_leave_the_report(folder):
    """catalogue E22, F08: the figures of a failed bench can be looked into."""
    done = run(folder, check=False, bench={"min_accept_length": 3.99})
    assert done.returncode == 1 and "under bench.min_accept_length 3.99" in done.stderr
    assert "check, in this order" in done.stderr
    verdict = json.loads((folder / "data/bench/report.json").read_text())["verdict"]
    assert verdict in (folder / "data/bench/report.html").read_text()
    done = run(
        folder,
        check=False,
        bench={"engine": "sglang"},
        server={"endpoints": ["http://127.0.0.1:9"]},
    )
    assert done.returncode == 1 and "server.endpoints" in done.stderr
