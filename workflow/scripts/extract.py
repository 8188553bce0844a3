"""extract: captures the target's hidden states for the records of a data set."""

import _path  # noqa: F401, I001  (first: see there)
import argparse
import contextlib
from pathlib import Path

from eagle3.target import layers
from eagle3.records import records
from eagle3.core.errors import UserError
from eagle3.capture.extraction import Extraction
from eagle3.core.files import digest_file
from eagle3.core.dvc_cache import cached_files
from eagle3.core.stage import WORK, Stage, main, running
from eagle3.target.model import Target


def build(arguments: argparse.Namespace) -> None:
    name = arguments.dataset
    with running(
        f"extract@{name}", arguments.params, [arguments.records, arguments.target]
    ) as stage:
        target = Target(arguments.target)
        captured = layers.captured_layers(target.num_layers, stage.params.hidden_states.layers)
        fixed = identity(target, captured, stage)
        extraction = Extraction(
            arguments.records,
            stage.work,
            target.hidden_size,
            fixed,
            stage.params.hidden_states,
            stage.params.runtime,
            stage.log,
        )
        extraction.reuse(cached_files(stage.name, str(arguments.out)))
        extraction.check_disk()
        extraction.capture(
            lambda: capturing(target, captured, fixed["convention"], stage),
            target.head,
            records.metadata(arguments.records)["greedy"],
        )
        extraction.publish(
            arguments.out,
            {
                "records_digest": digest_file(arguments.records),
                "tokenizer_digest": target.info["tokenizer_digest"],
            },
        )


def identity(target: Target, captured: list[int], stage: Stage) -> dict:
    """What determines the states of given ids; first in the manifest, and part of every shard's
    key."""
    params = stage.params.hidden_states
    return {
        "target_digest": target.digest,
        "hidden_size": target.hidden_size,
        "architecture": target.info["architecture"],
        "layers": captured,
        "convention": layers.convention_of(target.info["architecture"], params.convention),
        "last_is": "after_final_norm",
        "dtype": params.dtype,
        "engine": params.engine,
    }


@contextlib.contextmanager
def capturing(target: Target, captured: list[int], convention: str, stage: Stage):
    """The engine that runs the target: in this process, or a server that the stage holds for as
    long."""
    runtime, settings = stage.params.runtime, stage.params.server
    if stage.params.hidden_states.engine == "transformers":
        from eagle3.capture.transformers_capture import TransformersCapture

        yield TransformersCapture(target, captured, runtime.batch_tokens)
        return
    from eagle3.capture.sglang_capture import SglangCapture, engine_version, server_environment
    from eagle3.capture.sglang_hooks import server_flags
    from eagle3.serving.server import lease

    environment = server_environment(settings.environment)
    flags = (
        {}
        if settings.endpoints
        else server_flags(
            engine_version(settings.python, settings.command, environment),
            captured,
            layers.config_ids(captured, convention),
            str(WORK.resolve()),
        )
    )
    try:
        with lease(settings, target, flags, environment, stage.log) as held:
            yield SglangCapture(
                [held.client(url, runtime.request_timeout) for url in held.urls],
                runtime.concurrency,
                runtime.max_attempts,
                recover=lambda: held.wait(settings.start_timeout),
            )
    except UserError as error:
        if "No module named 'eagle3'" not in str(error):
            raise
        raise UserError(
            "the server does not find eagle3, whose hooks write the states: its command drops "
            "the PYTHONPATH that it is "
            f"given; let it keep what is there (PYTHONPATH=more:$PYTHONPATH). {error}"
        ) from None


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("dataset", help="name of a data set in params.yaml")
    parser.add_argument("--records", type=Path, required=True)
    parser.add_argument("--target", type=Path, default=Path("data/target"))
    parser.add_argument("--out", type=Path, required=True)
    main(parser, build)
