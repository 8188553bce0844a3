"""bench: serves held-out prompts with and without the drafter and reports what it gains."""

import _path  # noqa: F401, I001  (first: see there)
import argparse
import contextlib
import csv
import shutil
from pathlib import Path

from eagle3.bench import in_process as benching
from eagle3.drafter import export
from eagle3.bench import questions as held_out
from eagle3.bench import verdict as judging
from eagle3.bench import statistics as measuring
from eagle3.bench import page
from eagle3.bench import report
from eagle3.bench import sglang as sglang_bench
from eagle3.core import sources
from eagle3.core.errors import UserError
from eagle3.core.files import digest_file, read_json, replacing, write_json, write_text
from eagle3.responses.responses import made_by
from eagle3.bench.statistics import Measured, Variant
from eagle3.prompts.chat_template import Renderer
from eagle3.bench.replay import Simulator
from eagle3.core.stage import Stage, main, running
from eagle3.target.model import Target


def build(arguments: argparse.Namespace) -> None:
    inputs = [arguments.target, arguments.records, arguments.responses, arguments.drafter]
    with running("bench", arguments.params, inputs) as stage:
        params, target = stage.params.bench, Target(arguments.target)
        training = read_json(arguments.drafter / "training.json")
        states = next(iter(training["hidden_states"].values()))
        check_target(states["target_digest"], target)
        seen = held_out.trained_prompts(arguments.records)
        questions = read_questions(params, target, seen)
        prompts, counts = held_out.collect(arguments.records, params.max_prompts, seen, questions)
        drafter = export.load_drafter(arguments.drafter, target.embedding().float())
        export.check_as_trained(arguments.drafter, drafter.config)
        captured = states["layers"]
        variants = variants_of(params, arguments.drafter)
        if params.engine == "sglang":
            measured = serve(stage, target, prompts, variants)
        else:
            measured = benching.measure(
                target,
                drafter,
                captured,
                prompts,
                variants[0],
                params.max_new_tokens,
                params.repeats,
            )
        hits = Simulator(target, drafter, captured).hits if params.simulate else None
        cells = measuring.cells(measured, variants, prompts, hits and (lambda variant: hits))
        if not params.simulate:
            report.show_training_figure(cells, read_json(arguments.drafter / "metrics.json"))
        content = report.content(
            measured,
            cells,
            variants,
            engine=params.engine,
            held_out=counts,
            training=read_json(arguments.drafter / "metrics.json"),
            curves=read_curves(arguments.drafter),
            lineage=lineage(arguments.drafter, training, target, arguments.responses),
        )
        write(arguments.out, content)
        for cell in cells:
            judging.check_sound(
                cell,
                params.min_accept_length,
                params.max_difference,
                exact=params.engine == "transformers",
            )
        stage.log(content["verdict"])


def check_target(digest: str, target: Target) -> None:
    if digest != target.digest:
        raise UserError(
            f"the drafter was trained for target {digest[:12]}, not {target.digest[:12]}; "
            "run `snakemake --cores all drafter`"
        )


def variants_of(params, drafter: Path) -> list[Variant]:
    """The shapes of bench.speculation; the chain of bench.steps where none is given, or in
    process."""
    shapes = [(params.steps, 1, params.steps + 1)]
    if params.engine == "sglang" and params.speculation:
        shapes = [(s.steps, s.topk, s.draft_tokens) for s in params.speculation]
    return [Variant("-".join(map(str, shape)), drafter, *shape) for shape in shapes]


def read_questions(params, target: Target, seen: set[str]) -> dict[str, list[dict]]:
    """Prompts of every question set of bench.questions."""
    renderer = Renderer(target) if params.questions else None
    return {
        name: held_out.questions(
            name, sources.rows(wanted.source), wanted, renderer, params.max_prompt_tokens, seen
        )
        for name, wanted in params.questions.items()
    }


def serve(stage: Stage, target: Target, prompts: list[dict], variants: list[Variant]) -> Measured:
    """Both arms on servers of the supervisor. Raises UserError if other people's servers are all
    there is: their flags cannot be changed, and both arms need the same ones."""
    from eagle3.serving.server import lease

    params, settings = stage.params.bench, stage.params.server
    if settings.endpoints:
        raise UserError(
            "bench.engine sglang starts servers of its own, with and without the drafter, but "
            "server.endpoints "
            f"is {list(settings.endpoints)}; remove it for the bench"
        )

    @contextlib.contextmanager
    def serving(flags: dict):
        with lease(settings, target, flags, log=stage.log) as server:
            yield server.urls[0]

    plan = sglang_bench.Plan(
        variants,
        list(params.concurrency),
        params.max_new_tokens,
        params.repeats,
        params.rounds,
        stage.params.runtime.request_timeout,
    )
    # What server.flags sets for both arms goes before the bench's own choice.
    given = {name.replace("_", "-"): value for name, value in settings.flags.items()}
    return sglang_bench.measure(serving, prompts, plan, given)


def read_curves(drafter: Path) -> list[dict[str, str]]:
    with open(drafter / "curves.csv", newline="") as file:
        return list(csv.DictReader(file))


def lineage(folder: Path, training: dict, target: Target, responses: Path) -> dict[str, str]:
    """What the drafter was made from, by digest, back to the servers that answered and the rows
    that were asked."""
    made = {
        "drafter": digest_file(folder / export.WEIGHTS),
        "draft vocabulary": training["vocab"],
        "target": target.digest,
    }
    for name, states in training["hidden_states"].items():
        made[f"{name}: hidden states"] = (
            f"{states['rows']} records, {states['tokens']} tokens, layers {states['layers']}"
        )
        made[f"{name}: records"] = states["records_digest"]
        made[f"{name}: responses"] = digest_file(responses / name / "raw_responses.jsonl")
        made[f"{name}: answered by"] = made_by(read_json(responses / name / "fingerprint.json"))
    return {**made, "git commit": training["made_with"]["git_commit"]}


def write(out: Path, content: dict) -> None:
    """The whole folder. It is written before the figures are judged, so that a refusal can be
    looked into."""
    with replacing(out) as folder:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        write_json(folder / "report.json", content)
        write_json(folder / "metrics.json", report.metrics(content))
        write_text(folder / "acceptance.csv", report.acceptance_csv(content))
        write_text(folder / "cells.csv", report.cells_csv(content))
        write_text(folder / "report.html", page.render(content))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", type=Path, default=Path("data/target"))
    parser.add_argument("--records", type=Path, default=Path("data/records"))
    parser.add_argument("--responses", type=Path, default=Path("data/responses"))
    parser.add_argument("--drafter", type=Path, default=Path("data/drafter"))
    parser.add_argument("--out", type=Path, default=Path("data/bench"))
    main(parser, build)
