"""A plan as tables for people."""

from collections.abc import Callable
from typing import Any

from eagle3.commands.plan import size


def page(plan: dict[str, Any]) -> str:
    """The plan in plain text: data sets, totals against disk and memory, longest path, what other
    settings would change."""
    total, known = plan["total"], plan["hidden_states"]["width_known"]
    states = size if known else (lambda count: "?")
    parts = [
        table(
            [
                "data set",
                "rows",
                "prompt tokens",
                "answer tokens",
                "known from",
                "responses",
                "hidden states",
                "generate",
                "extract",
            ],
            [
                *(dataset_row(d, states) for d in plan["datasets"]),
                [
                    "all",
                    f"{total['rows']:,}",
                    f"{total['prompt_tokens']:,}",
                    f"{total['answer_tokens']:,}",
                    "",
                    size(sum(d["bytes_responses"] for d in plan["datasets"])),
                    states(sum(d["bytes_states"] for d in plan["datasets"])),
                    *(
                        time(sum(d["hours"][stage] for d in plan["datasets"]))
                        for stage in ("generate", "extract")
                    ),
                ],
            ],
        )
    ]
    parts.append(
        "\n".join(
            f"{name:<9} {line}"
            for name, lines in (
                ("time", time_lines(plan)),
                ("disk", disk_lines(plan)),
                ("memory", [memory_line(plan["memory"])]),
            )
            for name, line in zip([name, *[""] * len(lines)], lines)
        )
    )
    if known:
        parts.append(what_if(plan))
    if any(d["basis"] == "unknown" for d in plan["datasets"]):
        parts.append(
            "unknown: no cap, no budget and no local file to count; `dvc repro prepare@NAME` "
            "counts the rows."
        )
    return "\n\n".join(parts) + "\n"


def what_if(plan: dict[str, Any]) -> str:
    return table(
        [
            "what if",
            "tokens",
            "hidden states",
            "on this disk",
            "shards",
            "lost by a kill",
            "training",
        ],
        [
            [
                w["change"],
                f"{w['tokens']:,}",
                size(w["bytes_states"]),
                "fits" if w["fits"] else "TOO MUCH",
                f"{w['shards']:,}",
                "at most " + time(w["seconds_lost"] / 3600),
                time(w["hours_train"]),
            ]
            for w in plan["what_if"]
        ],
    )


def time_lines(plan: dict[str, Any]) -> list[str]:
    total, rates, path = plan["total"], plan["rates"], plan["longest_path"]
    return [
        f"{time(total['hours_on_one_machine'])} on one machine, {time(total['hours_train'])} of "
        "them training, starts of stages not "
        "counted",
        f"{time(path['hours'])} with a machine for every data set, the longest path: "
        + ", then ".join(f"{stage} {time(hours)}" for stage, hours in path["stages"].items()),
        f"at {rates['generate']:,g} tokens/s generated, {rates['extract']:,g} extracted, "
        f"{rates['train']:,g} trained; "
        'other speeds: ARGS="--generate-rate 2000 --extract-rate … --train-rate …"',
    ]


def disk_lines(plan: dict[str, Any]) -> list[str]:
    states, total, disk = plan["hidden_states"], plan["total"], plan["disk"]
    if not states["width_known"]:
        return [
            "unknown until the target is here (`dvc repro target`) and says how wide its states "
            "are",
            'or give the hidden_size of its config.json: ARGS="--hidden-size 4096"',
        ]
    wide, fits = states["bytes_per_token_of_states"], disk["tokens_that_fit"]
    verdict = "enough" if disk["enough"] else "NOT ENOUGH, the build would stop before it writes"
    copies = (
        " (twice, since DVC copies: `dvc config cache.type symlink`)" if total["copies"] > 1 else ""
    )
    return [
        f"{size(total['bytes_to_write'])} to write{copies} and {size(disk['reserved'])} "
        "reserved, of "
        f"{size(disk['free'])} free: {verdict}",
        f"a token's states are {states['numbers_per_token']:,} numbers (4 x "
        f"{states['hidden_size']:,}): "
        f"{wide['bfloat16']:,} bytes in bfloat16, {wide['float8_e4m3fn']:,} in float8_e4m3fn; "
        "with ids, mask and scales "
        f"{states['bytes_per_token']:,} in {states['dtype']}",
        f"{size(disk['free'])} hold {fits['bfloat16'] / 1e6:,.1f} million tokens in bfloat16, "
        f"{fits['float8_e4m3fn'] / 1e6:,.1f} million in float8_e4m3fn",
    ]


def dataset_row(d: dict[str, Any], states: Callable[[int], str]) -> list[str]:
    generate = "given" if d["answers"] == "given" else time(d["hours"]["generate"])
    return [
        d["name"],
        f"{d['rows']:,}",
        f"{d['prompt_tokens']:,}",
        f"{d['answer_tokens']:,}",
        d["basis"],
        size(d["bytes_responses"]),
        states(d["bytes_states"]),
        "done" if "generate" in d["done"] else generate,
        "done" if "extract" in d["done"] else time(d["hours"]["extract"]),
    ]


def memory_line(memory: dict[str, Any]) -> str:
    gpu = f"{size(memory['gpu'])} on GPUs" if memory["gpu"] else "no GPU"
    there = f"{size(memory['available'])} free here, {gpu}"
    if memory["needed_by_train"] is None:
        return f"unknown until the target's config.json is here; {there}"
    enough = memory["needed_by_train"] <= max(memory["available"], memory["gpu"])
    verdict = "enough" if enough else "NOT ENOUGH, lower vocab.size or train over several GPUs"
    return (
        f"{size(memory['needed_by_train'])} for training's weights, gradients, moments, "
        "embedding and head (activations "
        f"come on top), of {there}: {verdict}"
    )


def time(hours: float) -> str:
    """0.02 -> '1.2 min': never a clock, which could be read as hours or as minutes."""
    if hours == 0:
        return "0"
    for limit, unit, factor in ((1 / 60, "s", 3600), (1, "min", 60), (48, "h", 1)):
        if hours < limit:
            return f"{hours * factor:.1f} {unit}"
    return f"{hours / 24:.1f} d"


def table(header: list[str], rows: list[list[str]]) -> str:
    """Columns in line; the first to the left, the others to the right."""
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]
    lines = [
        "  ".join(
            cell.ljust(w) if i == 0 else cell.rjust(w)
            for i, (cell, w) in enumerate(zip(row, widths))
        ).rstrip()
        for row in [header, *rows]
    ]
    return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:]])
