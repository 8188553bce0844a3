"""report.json and the small files beside it, for `dvc metrics` and `dvc plots`. docs/report.md
describes the form."""

from dataclasses import asdict
from typing import Any

from eagle3.bench import verdict as judging
from eagle3.bench.statistics import Measured, Variant
from eagle3.drafter.acceptance import accept_length

SCHEMA = 2


def content(
    measured: Measured, cells: list[dict[str, Any]], variants: list[Variant], **more: Any
) -> dict[str, Any]:
    """The report. The figures of `all` and `datasets` are those of the first variant at the
    smallest concurrency."""
    first, several = cells[0], len({cell["variant"] for cell in cells}) > 1
    return {
        "schema": SCHEMA,
        **more,
        "steps": first["steps"],
        "verdict": " ".join(judging.verdict(cell, several) for cell in verdict_cells(cells)),
        "differences": judging.explain_differences(first),
        "all": first["all"],
        "datasets": first["datasets"],
        "cells": cells,
        "settings": {name or "baseline": found for name, found in measured.settings.items()},
        "rows": [
            row_of(name, concurrency, row)
            for (name, concurrency), arm in measured.arms.items()
            for row in arm.rows
        ],
    }


def show_training_figure(cells: list[dict[str, Any]], trained: dict[str, Any]) -> None:
    """Puts the accept length that training reported beside the served one, where nothing was
    simulated. Its prompts and its way of counting are others, so no bound applies."""
    conditional = list(trained.get("conditional", {}).values())
    for cell in cells:
        if cell["topk"] == 1 and len(conditional) >= cell["steps"]:
            cell["all"]["accept_length"]["simulated"] = accept_length(conditional[: cell["steps"]])


def verdict_cells(cells: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The first cell and, if it is another one, the fastest."""
    best = judging.best_cell(cells)
    return [cells[0]] if best is cells[0] else [cells[0], best]


def row_of(name: str | None, concurrency: int, row) -> dict[str, Any]:
    """A raw row without its token ids, whose number is enough to pool again."""
    kept = asdict(row)
    return {
        "variant": name or "baseline",
        "concurrency": concurrency,
        **kept,
        "ids": len(kept["ids"]),
    }


def metrics(report: dict[str, Any]) -> dict[str, Any]:
    """What `dvc metrics diff` compares."""
    figures = report["all"]
    return {
        "accept_length": figures["accept_length"],
        "speed_up": figures["speed_up"],
        "tokens_per_second": figures["tokens_per_second"],
        "datasets": {
            name: {"served": f["accept_length"]["served"]} for name, f in report["datasets"].items()
        },
    }


def acceptance_csv(report: dict[str, Any]) -> str:
    """Draft position, share of cycles that accept it, and share of drafts that are right, given all
    before."""
    lines, figures = ["position,accepted,conditional"], report["all"]
    for k in range(report["steps"]):
        accepted = (figures["acceptance"] or {}).get(f"position_{k}", "")
        conditional = (figures["conditional"] or {}).get(f"step_{k}", "")
        lines.append(f"{k + 1},{accepted},{conditional}")
    return "\n".join(lines) + "\n"


def cells_csv(report: dict[str, Any]) -> str:
    """A line per cell, for plots over batch size."""
    lines = ["variant,concurrency,speed_up,low,high,accept_length,baseline,speculative"]
    for cell in report["cells"]:
        figures = cell["all"]
        rates = figures["tokens_per_second"]
        lines.append(
            ",".join(
                "" if value is None else str(value)
                for value in (
                    cell["variant"],
                    cell["concurrency"],
                    figures["speed_up"],
                    figures["speed_up_low"],
                    figures["speed_up_high"],
                    figures["accept_length"]["served"],
                    rates["baseline"],
                    rates["speculative"],
                )
            )
        )
    return "\n".join(lines) + "\n"
