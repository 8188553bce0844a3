"""A plan as a table for people."""

from typing import Any

from eagle3.plan import size
from eagle3.progress import duration


def page(plan: dict[str, Any]) -> str:
    """The plan in plain text: data sets, totals against disk and memory, longest path, what other settings would change."""
    states, total, disk = plan["hidden_states"], plan["total"], plan["disk"]
    parts = [table(
        ["data set", "rows", "prompt tokens", "answer tokens", "known from", "responses", "hidden states", "generate",
         "extract"],
        [*map(dataset_row, plan["datasets"]),
         ["all", f"{total['rows']:,}", f"{total['prompt_tokens']:,}", f"{total['answer_tokens']:,}", "",
          *(size(sum(d[key] for d in plan["datasets"])) for key in ("bytes_responses", "bytes_states")),
          *(hours(sum(d["hours"][stage] for d in plan["datasets"])) for stage in ("generate", "extract"))]])]
    rates = plan["rates"]
    parts.append(f"At {rates['generate']:g} tokens/s generated, {rates['extract']:g} extracted, {rates['train']:g} trained "
                 "(--generate-rate, --extract-rate, --train-rate).")
    parts.append(f"Training: {hours(total['hours_train'])}. All on one machine: {hours(total['hours_on_one_machine'])}. "
                 f"Longest path, with a machine for every data set: {hours(plan['longest_path']['hours'])} ("
                 + ", then ".join(f"{stage} {hours(time)}" for stage, time in plan["longest_path"]["stages"].items()) + ").")
    wide = states["bytes_per_token_of_states"]
    parts.append(f"Hidden states: {states['numbers_per_token']:,} numbers per token (4 x {states['hidden_size']}): "
                 f"{wide['bfloat16']:,} bytes in bfloat16, {wide['float8_e4m3fn']:,} in float8_e4m3fn; with ids and mask "
                 f"{states['bytes_per_token']:,} in {states['dtype']}.")
    fits = disk["tokens_that_fit"]
    verdict = "enough" if disk["enough"] else "NOT ENOUGH: the build would stop before it writes"
    copies = "" if total["copies"] == 1 else " (DVC copies into its cache; `dvc config cache.type reflink,symlink` links)"
    parts.append(f"Disk: {size(total['bytes_to_write'])} to write{copies}, {size(disk['free'])} free, "
                 f"{size(disk['reserved'])} reserved: {verdict}. {size(disk['free'])} hold "
                 f"{fits['bfloat16'] / 1e6:,.1f} million tokens in bfloat16, {fits['float8_e4m3fn'] / 1e6:,.1f} in "
                 "float8_e4m3fn.")
    parts.append(memory_line(plan["memory"]))
    parts.append(table(["what if", "tokens", "hidden states", "shards", "lost by a kill, at most", "training"],
                       [[w["change"], f"{w['tokens']:,}", size(w["bytes_states"]), f"{w['shards']:,}",
                         duration(w["seconds_lost"]), hours(w["hours_train"])] for w in plan["what_if"]]))
    if any(d["basis"] == "unknown" for d in plan["datasets"]):
        parts.append("unknown: no cap, no budget and no local file to count; `dvc repro prepare@NAME` counts the rows.")
    return "\n\n".join(parts) + "\n"


def dataset_row(d: dict[str, Any]) -> list[str]:
    generate = "given" if d["answers"] == "on_policy" else hours(d["hours"]["generate"])
    return [d["name"], f"{d['rows']:,}", f"{d['prompt_tokens']:,}", f"{d['answer_tokens']:,}", d["basis"],
            size(d["bytes_responses"]), size(d["bytes_states"]), "done" if "generate" in d["done"] else generate,
            "done" if "extract" in d["done"] else hours(d["hours"]["extract"])]


def memory_line(memory: dict[str, Any]) -> str:
    gpu = f", {size(memory['gpu'])} on GPUs" if memory["gpu"] else ", no GPU"
    if memory["needed_by_train"] is None:
        return f"Memory: unknown until the target's config.json is here; {size(memory['available'])} free{gpu}."
    room = max(memory["available"], memory["gpu"])
    verdict = "" if memory["needed_by_train"] <= room else " NOT ENOUGH: lower vocab.size, or train over several GPUs"
    return (f"Memory: training keeps {size(memory['needed_by_train'])} of weights, gradients, moments, embedding and head, "
            f"activations on top; {size(memory['available'])} free{gpu}.{verdict}")


def hours(value: float) -> str:
    return duration(value * 3600) if value else "0"


def table(header: list[str], rows: list[list[str]]) -> str:
    """Columns in line; the first to the left, the others to the right."""
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]
    lines = ["  ".join(cell.ljust(w) if i == 0 else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths))).rstrip()
             for row in [header, *rows]]
    return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:]])
