"""bench: serves held-out prompts with and without the drafter and reports what it gains."""

import _path  # noqa: F401, I001  (first: see there)
import argparse
import csv
import shutil
from pathlib import Path

from eagle3 import benching, export, layers, report
from eagle3.errors import Refusal
from eagle3.files import digest_file, read_json, replacing, write_json, write_text
from eagle3.stage import main, running
from eagle3.target import Target


def build(arguments: argparse.Namespace) -> None:
    with running("bench", arguments.params, [arguments.target, arguments.records, arguments.drafter]) as stage:
        params, target = stage.params.bench, Target(arguments.target)
        drafter = export.load_drafter(arguments.drafter, target.embedding().float())
        training = read_json(arguments.drafter / "training.json")
        states = next(iter(training["hidden_states"].values()))
        captured = layers.served_layers(
            drafter.config["eagle_config"]["eagle_aux_hidden_state_layer_ids"], states["convention"])
        if states["target_digest"] != target.digest:
            raise Refusal(f"the drafter was trained for target {states['target_digest'][:12]}, not {target.digest[:12]}; "
                          "run `snakemake --cores all drafter`")
        chosen = benching.held_out(arguments.records, params.max_prompts)
        benching.refuse_if_leaking(chosen, arguments.records)
        found = benching.measure(target, drafter, captured, chosen, params.steps, params.max_new_tokens)
        hits = benching.simulate(target, drafter, captured, found, params.steps)
        content = {
            "schema": 1, "steps": params.steps, "engine": params.engine,
            "all": benching.figures(found, hits, params.steps),
            "datasets": {name: benching.figures(*zip_of(found, hits, name), params.steps)
                         for name in sorted({row["dataset"] for row in found})},
            "training": read_json(arguments.drafter / "metrics.json"),
            "lineage": lineage(arguments.drafter, training, target),
            "rows": [{"dataset": r["dataset"], "id": r["id"], "tokens": len(r["speculative"].ids),
                      "accepted": r["speculative"].accepted} for r in found]}
        with open(arguments.drafter / "curves.csv", newline="") as file:
            curves = list(csv.DictReader(file))
        with replacing(arguments.out) as folder:
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
            write_json(folder / "report.json", content)
            write_json(folder / "metrics.json", {k: content["all"][k] for k in ("accept_length", "speed_up", "tokens_per_second")})
            write_text(folder / "acceptance.csv", acceptance_csv(content["all"]))
            write_text(folder / "report.html", report.page(content, curves))
        benching.refuse_unless_sound(content["all"], params.min_accept_length, params.max_difference, params.steps)
        stage.say(report.verdict(content))


def zip_of(found: list[dict], hits: list, name: str) -> tuple[list, list]:
    """The rows and hits of one data set."""
    pairs = [(row, hit) for row, hit in zip(found, hits) if row["dataset"] == name]
    return [row for row, _ in pairs], [hit for _, hit in pairs]


def lineage(folder: Path, training: dict, target: Target) -> dict[str, str]:
    """What the drafter was made from, by digest."""
    made = {"drafter": digest_file(folder / export.WEIGHTS), "target": target.digest, "draft vocabulary": training["vocab"]}
    made |= {f"records of {name}": states["records_digest"] for name, states in training["hidden_states"].items()}
    return {**made, "git commit": training["made_with"]["git_commit"]}


def acceptance_csv(everything: dict) -> str:
    rows = zip(everything["acceptance"].values(), everything["conditional"].values())
    return "position,accepted,conditional\n" + "".join(f"{k + 1},{a},{c}\n" for k, (a, c) in enumerate(rows))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", type=Path, default=Path("data/target"))
    parser.add_argument("--records", type=Path, default=Path("data/records"))
    parser.add_argument("--drafter", type=Path, default=Path("data/drafter"))
    parser.add_argument("--out", type=Path, default=Path("data/bench"))
    main(parser, build)
