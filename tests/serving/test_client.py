"""The client, and what becomes of keys and passwords. Alone: python -m pytest
tests/serving/test_client.py"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import server_parts as serving
from eagle3.core import schema
from eagle3.core.errors import UserError
from eagle3.core.params import check, read_yaml
from eagle3.responses import status
from eagle3.responses.sglang_engine import SGLangEngine
from eagle3.serving import server
from eagle3.serving.client import Client

KEY = "sk-0123456789abcdefghij"
SECRET = "hf_0123456789abcdefghij"
PARAMS = Path(__file__).resolve().parents[2] / "params.yaml"


@pytest.fixture
def target(in_tmp):
    yield serving.make_target(in_tmp / "target")
    server.stop(log=lambda text: None)


def texts(folder: Path) -> dict[str, str]:
    return {
        str(path): path.read_text(errors="replace") for path in folder.rglob("*") if path.is_file()
    }


def test_a_key_opens_endpoints_and_stands_nowhere(target, in_tmp, monkeypatch, capfd):
    """In no file, log, message, and no command line, even where the server repeats it."""
    monkeypatch.setenv("OUR_KEY", KEY)
    requests = serving.requests(12)
    with serving.started(target, key=KEY, reject=3 + 7) as (url, _):
        settings = schema.Server(endpoints=[url], api_key_env="OUR_KEY")
        engine = SGLangEngine(
            target, schema.Sampling(max_new_tokens=16), settings, schema.Runtime()
        )
        results = {}
        with engine as made_by:
            engine.run(iter(requests), lambda r: results.__setitem__(r.request.row_id, r))
            processes = subprocess.run(["ps", "axww"], capture_output=True, text=True).stdout
        assert "running 0" in status.of_server(settings)[0]
    refused = results.pop("row7")
    assert "not for us: Bearer ***" in refused.detail
    assert all(r.output_ids == serving.right(r.request) for r in results.values() if not r.error)
    said = capfd.readouterr()
    for text in (*texts(in_tmp).values(), repr(made_by), repr(results), processes, *said):
        assert KEY not in text


@pytest.mark.parametrize("key", [None, "sk-of-another-server"])
def test_a_wrong_key_is_said_at_once_and_not_repeated(target, monkeypatch, key):
    if key:
        monkeypatch.setenv("OUR_KEY", key)
    with serving.started(target, key=KEY) as (url, _):
        settings = schema.Server(endpoints=[url], api_key_env="OUR_KEY" if key else None)
        with pytest.raises(UserError, match="refuses the API key.*server.api_key_env") as error:
            with server.lease(settings, target):
                pass
    assert not key or key not in str(error.value)
    with pytest.raises(UserError, match="server.api_key_env is NOT_THERE, but .* is not set"):
        with server.lease(schema.Server(endpoints=[url], api_key_env="NOT_THERE"), target):
            pass


@pytest.mark.parametrize(
    "section, named",
    [
        ({"flags": {"api-key": SECRET}}, "api-key"),
        ({"flags": {"admin_api_key": 12345678}}, "admin_api_key"),
        ({"flags": {"hicache-storage-backend-extra-config": f'{{"x": "{SECRET}"}}'}}, "flags"),
        ({"environment": {"HF_TOKEN": SECRET}}, "export HF_TOKEN"),
        ({"environment": {"HTTPS_PROXY": "http://me:" + SECRET + "@proxy"}}, "HTTPS_PROXY"),
        ({"environment": {"HF_TOKEN": [SECRET]}}, "HF_TOKEN"),
        ({"command": ["sglang", "--api-key", SECRET]}, "api-key"),
        ({"command": ["sglang", f"--api-key={SECRET}"]}, "api-key"),
        ({"endpoints": [f"http://me:{SECRET}@host:30000"]}, "server.api_key_env"),
    ],
)
def test_secrets_in_the_parameters_are_refused_by_name_alone(section, named):
    with pytest.raises(UserError) as error:
        check({**read_yaml(PARAMS), "server": section})
    assert named in str(error.value)
    assert SECRET not in str(error.value) and "12345678" not in str(error.value)


def test_what_only_sounds_like_a_secret_passes():
    schema.Server(
        flags={"tokenizer-path": "x", "random-seed": 7, "max-total-tokens": 8192},
        environment={"TOKENIZERS_PARALLELISM": "false", "NCCL_PROTO": "LL"},
        command=["env", "PYTHONPATH=/a", sys.executable, "-m", "sglang.launch_server"],
    )


def test_what_a_server_inherits_stands_in_no_file_and_its_folder_is_private(
    target, in_tmp, monkeypatch
):
    monkeypatch.setenv("HF_TOKEN", SECRET)
    os.makedirs(server.FOLDER, mode=0o755)
    with server.lease(serving.server_settings(), target, log=print):
        state = server.read_state()
        assert SECRET.encode() in Path(f"/proc/{state['server']}/environ").read_bytes()
        for folder in (server.FOLDER, server.SERVERS):
            assert folder.stat().st_mode & 0o777 == 0o700
    assert not [path for path, text in texts(in_tmp).items() if SECRET in text]


def test_it_follows_no_redirect_and_says_what_is_no_server(target):
    with serving.started(target) as (url, _):
        assert Client(url + "/nowhere").generates(5) is False
        with pytest.raises(UserError, match="is this a SGLang server"):
            Client(url + "/nowhere").info()
        assert Client(url).info()["version"] == "0.0.test"
