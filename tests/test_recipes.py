"""recipes/*.yaml, and their data sets' shapes. Alone: python -m pytest tests/test_recipes.py

`make test-recipe` runs the whole Kimi recipe on a tiny model of its architecture (minutes).
"""

import json
import re
from pathlib import Path

import kimi
import pytest
from eagle3.core import params, sources
from eagle3.core.errors import UserError
from eagle3.core.schema import Dataset, Prompts, Source, Target
from eagle3.hidden_states import shards
from eagle3.preflight import checks
from eagle3.prompts import prompts
from eagle3.prompts import rows as conversations
from eagle3.prompts.chat_template import Renderer
from eagle3.target.configuration import text_config
from eagle3.target.layers import IF_FIRST_IS_ONE, captured_layers, config_ids, convention_of

ROOT = Path(__file__).resolve().parents[1]
RECIPES = {path.stem: params.read_yaml(path) for path in sorted((ROOT / "recipes").glob("*.yaml"))}
BLANKS = {
    "glm-4.5-air": {"target.source": "revision of zai-org/GLM-4.5-Air"},
    "gpt-oss-120b": {"target.source": "revision of openai/gpt-oss-120b"},
    "kimi-k2.5": {
        "target.source": "path of this source",
        "datasets.A2_kimi_k25_2000x.source": "path of this source",
    },
    "llama-3.1-8b": {},
    "qwen3-30b-a3b": {"target.source": "revision of Qwen/Qwen3-30B-A3B"},
    "qwen3-8b": {},
}


def filled(content):
    """The recipe with something in every FILL-IN."""
    if isinstance(content, dict):
        blank = {"revision": "0" * 40}
        return {
            key: blank.get(key, "/somewhere") if value == "FILL-IN" else filled(value)
            for key, value in content.items()
        }
    return content


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_is_right_but_for_its_named_blanks(name):
    if BLANKS[name]:
        with pytest.raises(UserError) as caught:
            params.check(RECIPES[name])
        lines = str(caught.value).splitlines()
        assert len(lines) == len(BLANKS[name])
        for (key, what), line in zip(BLANKS[name].items(), lines):
            assert f"{key}: {what} is still FILL-IN" in line
    params.check(filled(RECIPES[name]))


@pytest.mark.parametrize("name", RECIPES)
def test_the_target_of_a_recipe_passes_what_stage_target_asks(name):
    """tests/configs has the config.json of each, as published."""
    config, said = json.loads((ROOT / f"tests/configs/{name}.json").read_text()), []
    recipe = params.check(filled(RECIPES[name]))
    checks.check_config(config, recipe, said.append)
    text = text_config(config)
    assert said and recipe.vocab.size < text["vocab_size"]


@pytest.mark.parametrize("name", RECIPES)
def test_dvc_reads_a_recipe_as_we_do(name):
    from dvc.utils.serialize import load_yaml

    assert load_yaml(ROOT / "recipes" / f"{name}.yaml") == RECIPES[name]


@pytest.mark.parametrize("name", RECIPES)
def test_every_data_set_states_its_licence(name):
    text = (ROOT / "recipes" / f"{name}.yaml").read_text()
    for dataset in RECIPES[name]["datasets"]:
        comment = re.search(rf"((?:^  # .*\n)+)  {dataset}:$", text, re.MULTILINE)
        assert comment and re.search(r"Apache-2\.0|MIT|CC-BY-4\.0|ODC-BY|no licence", comment[1]), (
            dataset
        )


def test_the_kimi_recipe_is_the_reference_case():
    recipe = params.check(filled(RECIPES["kimi-k2.5"]))
    kinds = [dataset.answers for dataset in recipe.datasets.values()]
    assert kinds.count("given") == 2 and kinds.count("generate") == 8
    generated = [d for d in recipe.datasets.values() if d.answers == "generate"]
    assert (
        all(d.token_budget == 10_000_000 for d in generated)
        and sum(d.max_samples for d in generated) == 83_000
    )
    layers = captured_layers(61, recipe.hidden_states.layers)
    assert config_ids(layers, convention_of("KimiK25ForConditionalGeneration")) == [1, 29, 57]
    assert (
        convention_of("Kimi_K25ForConditionalGeneration") == IF_FIRST_IS_ONE
    )  # as transformers spells it
    assert 3 * 7168 == 21504 and shards.bytes_per_token(7168, "bfloat16") - 5 == 57_344
    assert recipe.vocab.size == 32_000 and recipe.hidden_states.dtype == "float8_e4m3fn"
    assert (
        recipe.server.environment["NCCL_BUFFSIZE"] == 16_777_216
        and recipe.server.flags["tp-size"] == 8
    )


@pytest.fixture(scope="module")
def kimi_target(tmp_path_factory):
    from eagle3.target.model import Target as Folder
    from eagle3.target.model import describe

    folder = tmp_path_factory.mktemp("kimi")
    model = kimi.make_model(folder / "model")
    section = Target(
        source=Source(path=str(model)),
        dtype="float32",
        context_length=1024,
        chat_template_kwargs={"thinking": True},
    )
    (folder / "target").mkdir()
    (folder / "target/target.json").write_text(json.dumps(describe(model, section, outside=True)))
    return Folder(folder / "target")


@pytest.mark.parametrize("name", kimi.SETS)
def test_the_adapter_of_a_data_set_reads_its_schema_odd_rows_included(name, kimi_target, tmp_path):
    settings = {
        k: v
        for k, v in RECIPES["kimi-k2.5"]["datasets"][name].items()
        if k not in ("source", "token_budget")
    }
    path = kimi.make_file(tmp_path, name, 4)
    dataset = Dataset(source=Source(path=str(path)), **settings)
    kept, rejects, stats = prompts.select(
        sources.rows(dataset.source), dataset, Prompts(max_prompt_tokens=900), Renderer(kimi_target)
    )
    _, _, odd = kimi.SETS[name]
    expected = {1 + place: reason for place, (_, reason) in enumerate(odd)}
    found = {reject["row"]: reject["reason"] for reject in rejects}
    assert found == {row: reason for row, reason in expected.items() if reason}
    assert sorted(p.source_row for p in kept) == [
        row for row in range(4 + len(odd)) if not expected.get(row)
    ]
    assert stats["rows"] == 4 + len(odd) and stats["duplicates"] == 0


def read(name, i=1):
    row = json.loads(json.dumps(kimi.SETS[name][0](i)))
    settings = RECIPES["kimi-k2.5"]["datasets"][name]
    return conversations.read(row, settings.get("format", "auto"), settings.get("columns", {}))


def test_toucan_calls_and_tools_arrive():
    found = read("A1_kimi_k2_trajectories")
    assert [m["role"] for m in found.messages] == [
        "system",
        "user",
        "assistant",
        "tool",
        "assistant",
    ]
    assert found.messages[2]["tool_calls"] == [
        {
            "id": "functions.bird_count:0",
            "type": "function",
            "function": {"name": "bird_count", "arguments": '{"place": "river"}'},
        }
    ]
    assert found.messages[3]["tool_call_id"] == "functions.bird_count:0"
    assert found.tools[0]["function"]["name"] == "bird_count"


def test_glaive_text_becomes_messages_calls_and_functions():
    found = read("B1_glaive")
    assert [m["role"] for m in found.messages] == [
        "system",
        "user",
        "assistant",
        "tool",
        "assistant",
    ]
    assert found.messages[0]["content"].endswith("following functions. Use them if required")
    call = found.messages[2]["tool_calls"][0]["function"]
    assert call["name"] == "bird_count" and json.loads(call["arguments"]).keys() == {"place"}
    assert found.tools == [{"type": "function", "function": kimi.TOOL}]
    assert "endoftext" not in json.dumps(found.messages)


def test_swe_smith_text_parts_and_ids_arrive():
    found = read("B8_swe_smith")
    assert found.messages[1]["content"].startswith("swe_smith 1 fix ")
    assert found.messages[3]["tool_call_id"] == "call_1"


def test_the_template_is_rendered_as_kimi_does(kimi_target):
    renderer = Renderer(kimi_target)
    found = read("A1_kimi_k2_trajectories")
    text = renderer.tokenizer.decode(renderer.prompt_ids(found.messages[:4], found.tools))
    assert text.startswith("<|im_system|>tool_declare<|im_middle|>[{")
    assert text.endswith("<|im_assistant|>assistant<|im_middle|><think>")
    assert (
        "<think></think><|tool_calls_section_begin|><|tool_call_begin|>functions.bird_count:0"
        in text
    )
    assert "## Return of functions.bird_count:0\n{" in text


def test_a_served_thought_goes_back_into_history_as_a_thought(kimi_target):
    """The prompt ended with <think>, so the served text has only the closing tag."""
    renderer = Renderer(kimi_target)
    turns = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "thought</think>answer"},
    ]
    assert renderer.tokenizer.decode(renderer.full_ids(turns)).endswith(
        "<think>thought</think>answer<|im_end|>"
    )
    turns += [{"role": "user", "content": "b"}, {"role": "assistant", "content": "more"}]
    assert "<think></think>answer<|im_end|>" in renderer.tokenizer.decode(renderer.full_ids(turns))
    given = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "<think>thought</think>answer"},
    ]
    assert renderer.full_ids(given) == renderer.full_ids(turns[:2])
