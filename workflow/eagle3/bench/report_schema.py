"""The form of report.json, and docs/report.md made from it. `make docs` writes the page; tests hold
both."""

from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field

from eagle3.bench.figures import LEAST_PROMPTS

PAGE = Path("docs/report.md")
INTRODUCTION = """# The bench report

Generated from `workflow/eagle3/bench/report_schema.py` by `make docs`; do not edit. `data/bench/`
holds:

| file | contents |
|---|---|
| `report.json` | everything below |
| `report.html` | the same as one self-contained page: phone, print, light and dark |
| `metrics.json` | what `dvc metrics diff` compares |
| `acceptance.csv`, `cells.csv` | for `dvc plots diff`: acceptance by position, speed-up by batch |

The folder is written before the figures are judged, so a bench that fails leaves its report to be
looked into.

## Which accept length is which

- **served**: completion tokens over verify cycles, pooled over all answers (never a mean of
  per-answer ratios). The bonus token of each cycle counts, and so does the token of the prefill: it
  is SGLang's own `completion_tokens / spec_verify_ct`.
- **per_cycle**: without the token of the prefill, so that a drafter which is never right has
  exactly 1. `min_accept_length` is compared with it.
- **replayed**: the drafter walked over the very answers that were served, cycle by cycle, from
  states of the target captured anew, and counted as *served* is. It must agree with *served*, and
  `max_difference` bounds that: exactly in process, within what bf16 rounding does to near ties on a
  server. Disagreement means that training and serving see different states.
- **simulated**: one plus the sum of the products of conditional accuracies, averaged over **all**
  positions: the figure that training reports. Serving visits only the positions where a cycle ends
  (after a rejection, say, where drafting is harder or easier than on average), so this one may
  differ from the others by several per cent without anything being wrong. Where `bench.simulate` is
  off it is training's own figure on the validation split.
- **break_even**: seconds of a verify cycle over seconds of a plain token.

## Why greedy outputs may differ on a server

In process they must be equal, and a difference fails the bench. A server verifies several positions
in one batch; sums round in another order than one by one, near ties fall the other way, and the
rest of the answer is another text. The report counts such answers, shows how often the baseline
differs from itself between repeats, and by how little the target's logits of the two tokens differ
where the arms part.

"""
Rates = dict[str, float]


class Form(BaseModel):
    model_config = ConfigDict(extra="forbid")


class AcceptLength(Form):
    """Accept lengths of a selection of answers; null where it cannot be known."""

    served: float | None = Field(description="Completion tokens over verify cycles, pooled.")
    per_cycle: float | None = Field(description="Tokens of verify cycles over verify cycles.")
    replayed: float | None = Field(
        description="What the same answers predict, counted as served is."
    )
    simulated: float | None = Field(
        description="Average over all positions, from conditional accuracies."
    )
    break_even: float | None = Field(description="Verify cycle over decode step, in time.")


class Spread(Form):
    """Of single requests."""

    median: float = Field(description="Median.")
    p95: float = Field(description="95th percentile.")


class StepTimes(Form):
    """Seconds, prefill left out."""

    decode_step: float | None = Field(description="Seconds of a plain token.")
    verify_cycle: float | None = Field(description="Seconds of a verify cycle, drafting included.")


class Outputs(Form):
    """Greedy answers of both arms, prompt by prompt."""

    compared: int = Field(description="Prompts that both arms answered.")
    equal: int = Field(description="Prompts with the same answer, token for token.")
    common_prefix_share: float | None = Field(
        description="Share of an answer before the first difference, on average."
    )
    equal_to_itself: dict[str, int | None] = Field(
        description="By arm: prompts whose repeats are all equal; null without repeats."
    )


class Figures(Form):
    """Figures of all answers of a cell, or of one data set. Mappings by arm have the keys baseline
    and speculative."""

    prompts: int = Field(description="Prompts answered with speculation.")
    tokens: dict[str, int] = Field(description="Tokens answered, by arm.")
    cached_tokens: dict[str, int] = Field(
        description="Prompt tokens found in the prefix cache, by arm."
    )
    errors: dict[str, int] = Field(description="Failed requests, by arm.")
    verify_cycles: int = Field(description="Verify cycles.")
    tokens_per_second: Rates = Field(description="Throughput, by arm.")
    speed_up: float = Field(description="Throughput with speculation over that without.")
    speed_up_low: float | None = Field(
        description="Lower end of its 95 % interval, from resampling prompts and repeats; null "
        f"for fewer than {LEAST_PROMPTS} prompts."
    )
    speed_up_high: float | None = Field(description="Upper end.")
    accept_length: AcceptLength
    acceptance: Rates | None = Field(
        description="By position: share of verify cycles that accept the draft there."
    )
    conditional: Rates | None = Field(
        description="By step: share of drafts that are right, given all before."
    )
    seconds: StepTimes
    first_token: dict[str, Spread | None] = Field(
        description="Seconds to the first token, by arm: median and p95."
    )
    inter_token: dict[str, Spread | None] = Field(
        description="Seconds between later tokens, by arm: median and p95."
    )
    outputs: Outputs


class Cell(Form):
    """One way of drafting at one batch size."""

    variant: str = Field(description="Name of the way of drafting.")
    concurrency: int = Field(description="Requests at once.")
    steps: int = Field(description="Draft tokens in a row.")
    topk: int = Field(description="Branches at each step.")
    draft_tokens: int = Field(description="Tokens that a cycle verifies.")
    all: Figures = Field(description="Figures of all answers.")
    datasets: dict[str, Figures] = Field(description="Figures by data set.")
    difference_gaps: Spread | None = Field(
        description="Difference of the target's logits of the two tokens where the arms part: "
        "median and p95."
    )


class HeldOut(Form):
    """A set of prompts."""

    source: str = Field(description="validation or questions.")
    available: int = Field(description="Different prompts in the set.")
    seen_in_training: int = Field(description="Prompts left out because training has seen them.")
    used: int = Field(description="Prompts asked.")


class Row(Form):
    """One answer of one repeat, so that everything can be pooled again."""

    variant: str = Field(description="Way of drafting, or baseline.")
    concurrency: int = Field(description="Requests at once.")
    dataset: str = Field(description="Set of the prompt.")
    id: str = Field(description="Id of the prompt.")
    repeat: int = Field(description="Number of the repeat.")
    ids: int = Field(description="Tokens of the answer.")
    seconds: float = Field(description="From sending to the end.")
    first: float | None = Field(description="Seconds to the first token, where it is known.")
    cycles: int = Field(description="Verify cycles.")
    accepted: list[int] = Field(description="Cycles by the number of drafts that they accepted.")
    cached: int = Field(description="Prompt tokens found in the prefix cache.")
    error: str = Field(description="Why there is no answer; empty if there is one.")


class Trained(Form):
    """A drafter of a study over training data."""

    drafter: str = Field(description="Its name.")
    records: int | None = Field(description="Training records.")
    tokens: int | None = Field(description="Training tokens.")
    accept_length: AcceptLength


class Report(Form):
    """All figures of a bench; report.html is drawn from it."""

    version: int = Field(alias="schema", description="Version of this form.")
    engine: str = Field(description="transformers or sglang.")
    verdict: str = Field(description="The result in words.")
    differences: str = Field(description="How greedy outputs of the arms differ and why.")
    steps: int = Field(description="Draft tokens in a row, of the first cell.")
    all: Figures = Field(
        description="Figures of the first way of drafting at the smallest batch size."
    )
    datasets: dict[str, Figures] = Field(description="The same by data set.")
    cells: list[Cell] = Field(description="The whole matrix.")
    settings: dict[str, dict] = Field(
        description="Settings read back from the servers, by arm; empty in process."
    )
    held_out: dict[str, HeldOut] = Field(description="Where the prompts come from, by set.")
    training: dict = Field(description="The drafter's metrics.json.")
    curves: list[dict] = Field(description="The drafter's curves.csv.")
    lineage: dict[str, str] = Field(description="What the drafter was made from, by digest.")
    rows: list[Row] = Field(description="Raw rows.")
    study: list[Trained] = Field(
        [], description="Drafters of several data sizes, where they were served."
    )
    curve_cells: list[Cell] = Field([], description="The cells of that study.")


def page() -> str:
    """docs/report.md."""
    parts = [INTRODUCTION]
    for title, model in (
        ("report.json", Report),
        ("A row of `rows`", Row),
        ("A cell of `cells`", Cell),
        ("A set of `held_out`", HeldOut),
        ("`all`, and each of `datasets`", Figures),
    ):
        parts.append(f"## {title}\n\n{model.__doc__}\n\n{shown(model)}\n")
    return "\n".join(part.rstrip("\n") + "\n" for part in parts)


def shown(model: type[BaseModel]) -> str:
    """A table of keys; sections that need no title of their own are opened."""
    rows = ["| key | meaning |", "|---|---|"]
    for name, field in model.model_fields.items():
        key = field.alias or name
        if field.description:
            rows.append(f"| `{key}` | {field.description} |")
        else:
            rows += [
                f"| `{key}.{n}` | {f.description} |"
                for n, f in field.annotation.model_fields.items()
            ]
    return "\n".join(rows)


if __name__ == "__main__":
    PAGE.write_text(page())
