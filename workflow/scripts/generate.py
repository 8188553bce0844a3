"""generate: has the target answer the prompts of a data set, or takes the answers that came with them."""

import _path  # noqa: F401, I001  (first: see there)
import argparse
from pathlib import Path

from eagle3 import generation, responses
from eagle3.files import read_jsonl
from eagle3.journal import Journal
from eagle3.progress import Progress
from eagle3.published import cached_file
from eagle3.render import Renderer
from eagle3.stage import Stage, main, running
from eagle3.target import Target, numerics


def build(arguments: argparse.Namespace) -> None:
    name = arguments.dataset
    with running(f"generate@{name}", arguments.params, [arguments.prompts, arguments.target]) as stage:
        target = Target(arguments.target)
        if stage.params.datasets[name].answers == "on_policy":
            limit = stage.params.on_policy.max_answer_tokens
            writer = generation.publish_given(arguments.prompts, arguments.out, Renderer(target), limit)
            generation.refuse_if_too_many_errors(name, writer, stage.params.on_policy.max_error_rate)
        else:
            writer = _generate(stage, name, target, arguments)
            generation.refuse_if_too_many_errors(name, writer, stage.params.generate.max_error_rate)
        share = writer.truncated / writer.answered
        stage.say(f"{writer.answered} prompts answered with {writer.tokens:,} tokens, {writer.failed} errors, "
                  f"{share:.0%} cut by max_new_tokens")


def _generate(stage: Stage, name: str, target: Target, arguments: argparse.Namespace) -> responses.Writer:
    params = stage.params
    sampling = params.generate.sampling
    settings = {**numerics(target.info), "engine": params.generate.engine}
    journal = Journal(stage.work, {**sampling.model_dump(), **settings})
    answering = generation.Answering(
        arguments.prompts, Renderer(target), journal, sampling.model_dump(), settings,
        target.info["context_length"], params.datasets[name].token_budget)
    if earlier := cached_file(stage.name, str(arguments.out), responses.ROWS):
        if adopted := answering.adopt(read_jsonl(earlier)):
            stage.say(f"{adopted} answers taken over from the published artifact")
    for line in ([f"repaired a torn line of {journal.torn} bytes"] if journal.torn else []) + journal.foreign_reasons():
        stage.say(line)
    wanted, done = answering.count()
    stage.say(f"{name}: {wanted} wanted, {done} done, {wanted - done} to go")
    engine = make_engine(stage, target)
    if wanted > done:
        with Progress(stage.name, wanted, "rows", done=done) as answering.bar:
            engine.run(answering.requests(), answering.on_result)
    else:
        for _ in answering.requests():  # only collects the prompts that cannot be asked
            pass
    made_by = {"numerics": settings, "sampling": sampling.model_dump(), **engine.fingerprint()}
    writer = answering.publish(arguments.out, made_by)
    journal.close()
    return writer


def make_engine(stage: Stage, target: Target):
    """The engine that params.yaml names; it costs nothing until its first request."""
    params = stage.params
    from eagle3.transformers_engine import TransformersEngine

    return TransformersEngine(target, params.generate.sampling, params.runtime.batch_size)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("dataset", help="name of a data set in params.yaml")
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--target", type=Path, default=Path("data/target"))
    parser.add_argument("--out", type=Path, required=True)
    main(parser, build)
