"""A random Kimi-K2.5 of a few hundred kilobytes, and a small file for each data set of its recipe.

The model is transformers' own class: MLA attention, a dense first layer and experts after it, the
language model's configuration under `text_config` and a vision tower beside it, YaRN, untied
embeddings. The template has the shape of the real one: role tokens with a middle token, declared
tools, calls with ids, thinking tags, thoughts dropped from history. The files have the columns and
the quirks of the public sets; every row is made up."""

import csv
import json
from pathlib import Path

import tiny

TEMPLATE = """
{%- macro head(m) -%}
<|im_{{ 'user' if m.role == 'user' else 'assistant' if m.role == 'assistant' else 'system' }}|>
{{- m.get('name') or m.role }}<|im_middle|>
{%- endmacro -%}
{%- macro calls(m) -%}
{%- if m.get('tool_calls') -%}<|tool_calls_section_begin|>
{%- for c in m.tool_calls -%}<|tool_call_begin|>{{ c.id }}<|tool_call_argument_begin|>
{%- set a = c.function.arguments -%}
{{ a if a is string else a | tojson }}<|tool_call_end|>{%- endfor -%}
<|tool_calls_section_end|>{%- endif -%}
{%- endmacro -%}
{%- set last = namespace(answer=-1) -%}
{%- for m in messages -%}
{%- if m.role == 'assistant' and not m.get('tool_calls') -%}
{%- set last.answer = loop.index0 -%}{%- endif -%}
{%- endfor -%}
{%- if tools -%}<|im_system|>tool_declare<|im_middle|>{{ tools | tojson }}<|im_end|>{%- endif -%}
{%- for m in messages -%}
{{ head(m) }}
{%- if m.role == 'assistant' -%}
<think>{{ m.get('reasoning_content', '') if loop.index0 >= last.answer else '' }}</think>
{{- m.content }}{{ calls(m) }}
{%- elif m.role == 'tool' -%}
## Return of {{ m.get('tool_call_id', '') }}
{{ m.content }}
{%- else -%}{{ m.content }}{%- endif -%}<|im_end|>
{%- endfor -%}
{%- if add_generation_prompt -%}
<|im_assistant|>assistant<|im_middle|>
{{- '<think>' if thinking | default(true) else '<think></think>' }}
{%- endif -%}
"""
SPECIAL = [
    "[BOS]",
    "[EOS]",
    "<|im_end|>",
    "<|im_user|>",
    "<|im_assistant|>",
    "<|im_system|>",
    "<|im_middle|>",
    "[PAD]",
]
MARKS = [
    "<think>",
    "</think>",
    "<|tool_calls_section_begin|>",
    "<|tool_calls_section_end|>",
    "<|tool_call_begin|>",
    "<|tool_call_argument_begin|>",
    "<|tool_call_end|>",
]  # added, but not special: they survive decoding


def make_tokenizer(folder: Path, vocab_size: int = 480) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=SPECIAL,
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    backend.train_from_iterator([tiny.text(i, 30) for i in range(60)], trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="[BOS]",
        eos_token="<|im_end|>",
        pad_token="[PAD]",
        model_max_length=4096,
        additional_special_tokens=SPECIAL[3:7],
        chat_template=TEMPLATE.strip(),
    )
    tokenizer.add_tokens([AddedToken(mark, special=False, normalized=False) for mark in MARKS])
    tokenizer.save_pretrained(folder)


def make_model(folder: Path, layers: int = 8, seed: int = 0) -> Path:
    import torch
    from transformers import DeepseekV3Config, Kimi_K25Config, Kimi_K25ForConditionalGeneration

    folder.mkdir(parents=True, exist_ok=True)
    make_tokenizer(folder)
    torch.manual_seed(seed)
    text = DeepseekV3Config(
        vocab_size=512,
        hidden_size=32,
        intermediate_size=64,
        moe_intermediate_size=16,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=4,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_shared_experts=1,
        n_group=1,
        topk_group=1,
        first_k_dense_replace=1,
        routed_scaling_factor=2.827,
        kv_lora_rank=16,
        q_lora_rank=24,
        qk_nope_head_dim=8,
        qk_rope_head_dim=4,
        v_head_dim=8,
        max_position_embeddings=4096,
        initializer_range=0.2,
        bos_token_id=0,
        eos_token_id=2,
        pad_token_id=7,
        tie_word_embeddings=False,
        rms_norm_eps=1e-5,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 50000.0,
            "factor": 4.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 1024,
        },
    )
    vision = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "pos_emb_height": 4,
        "pos_emb_width": 4,
    }
    config = Kimi_K25Config(
        text_config=text,
        vision_config=vision,
        projection_hidden_size=16,
        tie_word_embeddings=False,
        image_token_id=500,
        video_token_id=501,
        vision_start_token_id=502,
        vision_end_token_id=503,
        bos_token_id=0,
        eos_token_id=2,
        pad_token_id=7,
    )
    Kimi_K25ForConditionalGeneration(config).float().save_pretrained(folder)
    return folder


# Every set asks its own questions (its name is in them): what is held out of one must not be
# trained on in another.
def words(seed: int, count: int = 8) -> str:
    return tiny.text(seed, count)


TOOL = {
    "name": "bird_count",
    "description": "Counts birds",
    "parameters": {
        "type": "object",
        "properties": {"place": {"type": "string"}},
        "required": ["place"],
    },
}


def toucan(i: int) -> dict:
    """Agent-Ark/Toucan-1.5M, subset Kimi-K2: messages and tools as JSON text, calls in the older
    spelling."""
    messages = [
        {"role": "system", "content": "You may call tools."},
        {"role": "user", "content": f"toucan {i} {words(i)}"},
        {
            "role": "assistant",
            "content": "",
            "function_call": {"name": "bird_count", "arguments": '{"place": "river"}'},
        },
        {"role": "function", "content": '{"count": 7}', "name": "bird_count"},
        {"role": "assistant", "content": words(i + 50, 12)},
    ]
    return {
        "uuid": f"u{i}",
        "subset_name": "single-turn-original",
        "messages": json.dumps(messages),
        "question": words(i),
        "available_tools": json.dumps([{"type": "function", "function": TOOL}]),
        "target_tools": "bird_count",
        "question_quality_assessment": "{}",
        "response_quality_assessment": "{}",
        "metadata": "{}",
    }


def k25_2000x(i: int) -> dict:
    """KimiK2.5-2000x: conversations whose answers begin with their thought."""
    return {
        "messages": [
            {"role": "user", "content": f"k25_2000x {i} {words(i)}"},
            {
                "role": "assistant",
                "content": f"<think>{words(i + 9, 5)}</think>{words(i + 70, 10)}",
            },
        ],
        "model": "kimi-k2.5",
    }


def glaive(i: int) -> dict:
    """glaiveai/glaive-function-calling-v2: a whole conversation in one text."""
    chat = (
        f'USER: glaive {i} {words(i)}\n\n\nASSISTANT: <functioncall> {{"name": "bird_count", '
        '"arguments": '
        f'\'{{"place": "{words(i, 1)}"}}\'}} <|endoftext|>\n\n\nFUNCTION RESPONSE: {{"count": '
        f"{i}}}\n\n\n"
        f"ASSISTANT: {words(i + 5)} <|endoftext|>\n\n\n"
    )
    return {
        "system": "SYSTEM: You are a helpful assistant with access to the following functions. "
        "Use them if required -\n" + json.dumps(TOOL, indent=4) + "\n",
        "chat": chat,
    }


def opencode(i: int) -> dict:
    """nvidia/OpenCodeInstruct."""
    return {
        "id": f"{i:032x}",
        "input": f"opencode {i} write code: {words(i)}",
        "output": f"```python\n{words(i)}\n```",
        "domain": "generic",
        "generation_algorithm": "self-instruct",
        "llm_judgement": "{}",
        "unit_tests": "[]",
        "tests_execution_status": "[]",
        "average_test_score": "1.0",
    }


def magicoder(i: int) -> dict:
    """ise-uiuc/Magicoder-Evol-Instruct-110K."""
    return {"instruction": f"magicoder {i} {words(i)}", "response": words(i + 1)}


def openmath(i: int) -> dict:
    """nvidia/OpenMathInstruct-2."""
    return {
        "problem": f"openmath {i} + {i} = ? {words(i, 3)}",
        "generated_solution": f"\\boxed{{{2 * i}}}",
        "expected_answer": str(2 * i),
        "problem_source": "augmented_math",
    }


def wildchat(i: int) -> dict:
    """allenai/WildChat-1M: the column is called conversation, its messages carry much beside role
    and content."""

    def message(role, text):
        return {
            "content": text,
            "country": None,
            "hashed_ip": None,
            "header": None,
            "language": "English",
            "redacted": False,
            "role": role,
            "state": None,
            "timestamp": None,
            "toxic": False,
            "turn_identifier": i,
        }

    return {
        "conversation_hash": f"{i:032x}",
        "model": "gpt-4",
        "timestamp": "2024-01-01",
        "turn": 1,
        "language": "English",
        "conversation": [
            message("user", f"wildchat {i} {words(i)}"),
            message("assistant", words(i + 3)),
        ],
        "openai_moderation": [],
        "detoxify_moderation": [],
        "toxic": False,
        "redacted": False,
    }


def ultrachat(i: int) -> dict:
    """HuggingFaceH4/ultrachat_200k: several turns."""
    first = f"ultrachat {i} {words(i)}"
    return {
        "prompt": first,
        "prompt_id": f"{i:064x}",
        "messages": [
            {"role": "user", "content": first},
            {"role": "assistant", "content": words(i + 2)},
            {"role": "user", "content": words(i + 400)},
            {"role": "assistant", "content": words(i + 4)},
        ],
    }


def tulu(i: int) -> dict:
    """allenai/tulu-3-sft-personas-instruction-following."""
    prompt = f"tulu {i} {words(i)} in at most seven words"
    return {
        "id": f"personas_IF_{i}",
        "prompt": prompt,
        "constraints": ["length constraints:number of words"],
        "messages": [
            {"role": "user", "content": prompt},
            {"role": "assistant", "content": words(i, 6)},
        ],
    }


def swe_smith(i: int) -> dict:
    """SWE-bench/SWE-smith-trajectories, split tool: an agent's run as JSON text, contents as typed
    parts."""
    call = {
        "id": f"call_{i}",
        "type": "function",
        "function": {"name": "bash", "arguments": '{"command": "ls"}'},
    }
    messages = [
        {
            "role": "system",
            "content": "You are an agent with a shell.",
            "agent": "main",
            "message_type": "system_prompt",
        },
        {
            "role": "user",
            "content": [{"type": "text", "text": f"swe_smith {i} fix {words(i)}"}],
            "agent": "main",
        },
        {
            "role": "assistant",
            "content": words(i, 4),
            "thought": words(i, 4),
            "action": "ls",
            "tool_calls": [call],
        },
        {
            "role": "tool",
            "content": [{"type": "text", "text": "OBSERVATION: a.py"}],
            "tool_call_ids": [f"call_{i}"],
        },
        {
            "role": "assistant",
            "content": words(i + 8, 4),
            "thought": words(i + 8, 4),
            "action": "submit",
        },
    ]
    return {
        "messages": json.dumps(messages),
        "instance_id": f"repo__{i}",
        "resolved": True,
        "model": "some-model",
        "traj_id": f"t{i}",
        "patch": "",
    }


# Data set of the recipe -> (row maker, kind of file, odd rows with the reason for which each is
# rejected; "" if it is kept).
SETS = {
    "A1_kimi_k2_trajectories": (
        toucan,
        "parquet",
        [
            ({**toucan(900), "messages": "[]"}, "empty"),
            ({**toucan(901), "messages": "not JSON"}, "not_a_list"),
            (
                {**toucan(902), "messages": json.dumps([{"role": "user", "content": "q"}])},
                "no_answer",
            ),
            ({**toucan(903), "available_tools": "[]"}, ""),
        ],
    ),
    "A2_kimi_k25_2000x": (
        k25_2000x,
        "jsonl",
        [
            (
                {
                    "messages": [
                        {"role": "user", "content": "q"},
                        {"role": "assistant", "content": ""},
                    ]
                },
                "empty_message",
            ),
            (
                {
                    "messages": [
                        {"role": "human", "content": "odd role name"},
                        {"role": "gpt", "content": "fine"},
                    ]
                },
                "",
            ),
            ("not a row", "not_an_object"),
        ],
    ),
    "B1_glaive": (
        glaive,
        "json",
        [
            (
                {
                    "system": "SYSTEM: You are a helpful assistant, with no access to external "
                    "functions.\n",
                    "chat": "USER: 904 no tools\n\n\nASSISTANT: fine <|endoftext|>\n\n\n",
                },
                "",
            ),
            (
                {
                    "system": 'SYSTEM: f -\n{"name": "broken"',
                    "chat": "USER: q\n\n\nASSISTANT: a <|endoftext|>",
                },
                "bad_tools",
            ),
            (
                {
                    "system": "",
                    "chat": 'USER: q\n\n\nASSISTANT: <functioncall> {"name": oops} <|endoftext|>',
                },
                "bad_tool_call",
            ),
            ({"system": "", "chat": ""}, "empty"),
        ],
    ),
    "B2_opencodeinstruct": (
        opencode,
        "parquet",
        [({**opencode(905), "input": ""}, "no_user_turn")],
    ),
    "B3_magicoder": (
        magicoder,
        "jsonl",
        [
            ({"instruction": "", "response": "an answer to nothing"}, "no_user_turn"),
            (
                {"instruction": "906 says <|im_end|> aloud", "response": "r"},
                "special_token_in_text",
            ),
        ],
    ),
    "B4_openmathinstruct2": (
        openmath,
        "parquet",
        [({**openmath(907), "generated_solution": ""}, "")],
    ),
    "B5_wildchat": (
        wildchat,
        "parquet",
        [
            ({**wildchat(908), "conversation": []}, "empty"),
            (
                {
                    **wildchat(909),
                    "conversation": [
                        {"role": "user", "content": ""},
                        {"role": "assistant", "content": "a"},
                    ],
                },
                "empty_message",
            ),
        ],
    ),
    "B6_ultrachat": (
        ultrachat,
        "jsonl",
        [
            (
                {
                    "prompt": "p",
                    "prompt_id": "x",
                    "messages": [
                        {"role": "user", "content": "911 a"},
                        {"role": "user", "content": "b"},
                    ],
                },
                "roles_do_not_alternate",
            )
        ],
    ),
    "B7_tulu3_if": (tulu, "parquet", [({**tulu(912), "messages": [], "prompt": ""}, "empty")]),
    "B8_swe_smith": (
        swe_smith,
        "parquet",
        [
            (
                {
                    **swe_smith(913),
                    "messages": json.dumps(
                        [{"role": "user", "content": [{"type": "image", "image": "x.png"}]}]
                    ),
                },
                "multimodal",
            )
        ],
    ),
}


def make_file(folder: Path, name: str, rows: int) -> Path:
    """The small file of a data set: `rows` good rows with the odd ones among them."""
    make, kind, odd = SETS[name]
    content = [make(i) for i in range(rows)]
    content[1:1] = [row for row, _ in odd]
    return write(folder / f"{name}.{kind}", content)


def write(path: Path, rows: list) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        import pyarrow as pa
        import pyarrow.parquet as parquet

        parquet.write_table(pa.Table.from_pylist(rows), path)
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows))
    elif path.suffix == ".csv":
        with open(path, "w", newline="") as file:
            table = csv.DictWriter(file, list(rows[0]))
            table.writeheader()
            table.writerows(rows)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def tiny_recipe(model: Path, files: dict[str, Path], rows: int) -> dict:
    """The Kimi recipe with the tiny model in place of the target, local files in place of the hub,
    and everything that costs time made small. What a data set is (kind of answers, shape, columns,
    turns) stays as the recipe says."""
    from eagle3.core.params import read_yaml

    recipe = read_yaml(tiny.ROOT / "recipes/kimi-k2.5.yaml")
    recipe["target"].update(
        source={"path": str(model)}, dtype="float32", quantization=None, context_length=1024
    )
    recipe["prompts"].update(max_prompt_tokens=700, max_reject_rate=0.6)
    for name, dataset in recipe["datasets"].items():
        dataset.update(
            source={"path": str(files[name])},
            max_samples=rows,
            max_turns=min(dataset.get("max_turns", 2), 2),
        )
    recipe["generate"] = {
        "engine": "transformers",
        "sampling": {**recipe["generate"]["sampling"], "max_new_tokens": 12},
    }
    recipe["records"].update(max_tokens=900, validation_fraction=0.3)
    recipe["vocab"] = {"size": 400, "min_coverage": 0.5}
    recipe["hidden_states"].update(engine="transformers", layers=[2, 4, 5], shard_bytes=65536)
    recipe["train"].update(
        architecture={"head_dim": 8, "num_attention_heads": 4, "num_key_value_heads": 4},
        epochs=1,
        batch_tokens=2048,
        dtype="float32",
        lr=1e-3,
    )
    recipe["bench"] = {
        "engine": "transformers",
        "steps": 3,
        "max_prompts": 3,
        "max_new_tokens": 8,
        "min_accept_length": 1.0,
        "max_difference": 0.5,
    }
    recipe["runtime"] = {"batch_size": 8, "batch_tokens": 2048, "reserve_bytes": 0}
    return recipe


def make_project(folder: Path, rows: int = 6) -> Path:
    """This project with the tiny Kimi recipe as its params.yaml; returns its folder."""
    tiny.make_project(folder, {"unused": (1, "generate")})
    inputs = folder.parent / f"{folder.name}-kimi"
    files = {name: make_file(inputs, name, rows + 2) for name in SETS}
    tiny.write_params(folder, tiny_recipe(make_model(inputs / "model"), files, rows))
    return folder
