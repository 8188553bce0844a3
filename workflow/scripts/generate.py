"""generate: has the target answer the prompts of a data set, or takes the answers that came with
them."""

import _path  # noqa: F401, I001  (first: see there)
import argparse
import itertools
from pathlib import Path

from eagle3.responses import answering as generation
from eagle3.responses import responses
from eagle3.core.files import read_json, read_jsonl
from eagle3.responses.journal import Journal
from eagle3.core.dvc_cache import cached_file
from eagle3.prompts.chat_template import Renderer
from eagle3.core.stage import Stage, main, running
from eagle3.responses.status import Status
from eagle3.target.model import Target, numerics

BROKEN_SHARE = 0.05  # more answers that look broken are worth a word


def build(arguments: argparse.Namespace) -> None:
    name = arguments.dataset
    with running(
        f"generate@{name}", arguments.params, [arguments.prompts, arguments.target]
    ) as stage:
        target = Target(arguments.target)
        if stage.params.datasets[name].answers == "given":
            limit = stage.params.given.max_answer_tokens
            writer = generation.publish_given(
                arguments.prompts, arguments.out, Renderer(target), limit
            )
            generation.check_errors(name, writer, stage.params.given.max_error_rate)
        else:
            writer = _generate(stage, name, target, arguments)
            generation.check_errors(name, writer, stage.params.generate.max_error_rate)
        share = writer.truncated / writer.answered
        if writer.broken > BROKEN_SHARE * writer.answered:
            cause = (
                "the server's memory, its kernels or the sampling may be wrong"
                if stage.params.generate.engine == "sglang"
                else "small models do so under greedy sampling; else the sampling may be wrong"
            )
            stage.log(
                f"look at the answers in {arguments.out}: {writer.broken} of {writer.answered} "
                "end in a loop or hold unreadable "
                f"characters; {cause}"
            )
        stage.log(
            f"{writer.answered} prompts answered with {writer.tokens:,} tokens, {writer.failed} "
            "errors, "
            f"{share:.0%} cut by max_new_tokens"
        )


def _generate(
    stage: Stage, name: str, target: Target, arguments: argparse.Namespace
) -> responses.Writer:
    engine_name, sampling = (
        stage.params.generate.engine,
        stage.params.generate.sampling.model_dump(),
    )
    settings = {**numerics(target.info), "engine": engine_name}
    with Journal(stage.work, {**sampling, **settings}) as journal:
        answering = generation.Answering(
            arguments.prompts,
            Renderer(target),
            journal,
            sampling,
            target.info["context_length"],
            stage.params.datasets[name].token_budget,
        )
        _take_over_published(stage, answering, arguments.out)
        if journal.torn:
            stage.log(f"repaired a torn last line of {journal.torn} bytes")
        for reason in journal.foreign_reasons():
            stage.log(reason)
        wanted, done, tokens = answering.count()
        stage.log(f"{wanted} wanted, {done} done, {wanted - done} to go")
        requests = answering.requests()
        first = next(requests, None)  # also notes the prompts that cannot be asked
        if first:
            engine = make_engine(stage, target)
            with (
                engine as made_by,
                Status(stage.work / "status.json", name, wanted, done, tokens) as answering.status,
            ):
                journal.note_maker(made_by)
                engine.run(itertools.chain([first], requests), answering.on_result)
        return answering.publish(
            arguments.out,
            {
                "engine": engine_name,
                "numerics": settings,
                "sampling": sampling,
                "made_by": journal.made_by(),
            },
        )


def _take_over_published(stage: Stage, answering: generation.Answering, out: Path) -> None:
    """Rows that an earlier version of the artifact holds, made here or elsewhere, need not be made
    again."""
    rows = cached_file(stage.name, str(out), responses.ROWS)
    made_by = cached_file(stage.name, str(out), responses.FINGERPRINT)
    if rows and made_by and (adopted := answering.adopt(read_jsonl(rows))):
        stage.log(f"{adopted} answers taken over from the published artifact")
        for maker in read_json(made_by).get("made_by", []):
            answering.journal.note_maker(maker)


def make_engine(stage: Stage, target: Target):
    """The engine that params.yaml names; only the one that is used is imported."""
    params = stage.params
    if params.generate.engine == "sglang":
        from eagle3.responses.sglang_engine import SGLangEngine

        return SGLangEngine(
            target, params.generate.sampling, params.server, params.runtime, stage.log
        )
    from eagle3.responses.transformers_engine import TransformersEngine

    return TransformersEngine(target, params.generate.sampling, params.runtime.batch_size)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("dataset", help="name of a data set in params.yaml")
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--target", type=Path, default=Path("data/target"))
    parser.add_argument("--out", type=Path, required=True)
    main(parser, build)
