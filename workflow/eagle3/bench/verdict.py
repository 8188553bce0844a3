"""What the figures of a bench mean: refusals that say what to check, and the verdict in a
sentence."""

from typing import Any

from eagle3.bench.figures import LEAST_PROMPTS
from eagle3.core.errors import UserError

CHECKLIST = (
    "check, in this order: the server speculates with EAGLE3; the captured layer ids (`make "
    "doctor`); d2t; "
    "lm_head; the final norm; RoPE; then train longer or on more data"
)


def check_sound(cell: dict[str, Any], minimum: float, max_difference: float, exact: bool) -> None:
    """Raises UserError when a cell's figures cannot be what a working drafter gives. `exact`:
    greedy outputs of both arms must be equal, as they are in process; servers compute other
    roundings for other batches."""
    figures = cell["all"]
    length, outputs = figures["accept_length"], figures["outputs"]
    where = f"{cell['variant']} at {cell['concurrency']} at once"
    if exact and outputs["equal"] != outputs["compared"]:
        raise UserError(
            f"only {outputs['equal']} of {outputs['compared']} greedy outputs equal plain "
            "decoding's; speculation "
            "must never change them"
        )
    per_cycle = length["per_cycle"]
    if per_cycle is None:
        raise UserError(
            f"{where}: no verify cycle was counted; the answers may all be one token long"
        )
    if not 1 <= per_cycle <= cell["steps"] + 1:
        raise UserError(
            f"{where}: {per_cycle:.3f} tokens per verify cycle are outside 1 to "
            f"{cell['steps'] + 1}; the counts "
            "of this server mean something else"
        )
    if per_cycle < minimum:
        raise UserError(
            f"{where}: accept length is {per_cycle:.3f}, under bench.min_accept_length "
            f"{minimum}; {CHECKLIST}"
        )
    if length["replayed"] is not None:
        difference = abs(length["replayed"] / length["served"] - 1)
        if difference > max_difference:
            raise UserError(
                f"{where}: served accept length {length['served']:.3f} and the "
                f"{length['replayed']:.3f} that the same "
                f"answers predict differ by {difference:.1%}, more than bench.max_difference "
                f"{max_difference:.0%}; training "
                "and serving do not see the same states: check the layers, RoPE, the norm of the "
                "last state and the dtype"
            )


def verdict(cell: dict[str, Any], one_of_several: bool = False) -> str:
    """One cell in words; its variant by name where there are several."""
    figures = cell["all"]
    length, speed = figures["accept_length"], figures["speed_up"]
    low, high = figures["speed_up_low"], figures["speed_up_high"]
    range_ = "" if low is None else f"{low:.2f} to {high:.2f}"
    if low is None:
        gain = (
            f"{speed:.2f} times as fast as the baseline (no interval: it takes at least "
            f"{LEAST_PROMPTS} prompts, raise bench.max_prompts)"
        )
    elif high < 1:
        gain = f"slower than the baseline: {speed:.2f} times its speed ({range_})"
    elif low > 1:
        gain = f"{speed:.2f} times as fast as the baseline ({range_})"
    else:
        gain = (
            f"as fast as the baseline within what was measured: {speed:.2f} times its speed "
            f"({range_})"
        )
    subject = f"variant {cell['variant']}" if one_of_several else "the drafter"
    text = (
        f"With {cell['concurrency']} request{'s' if cell['concurrency'] > 1 else ''} at once "
        f"{subject} is {gain}. "
        f"Accept length {length['served']:.2f}, {cell['steps'] + 1} at most"
    )
    if length["break_even"]:
        text += (
            f"; a verify cycle takes as long as {length['break_even']:.2f} tokens of plain "
            "decoding, so that many "
            "break even"
        )
    return text + "."


def best_cell(cells: list[dict[str, Any]]) -> dict[str, Any]:
    """The cell with the highest speed-up."""
    return max(cells, key=lambda cell: cell["all"]["speed_up"])


def explain_differences(cell: dict[str, Any]) -> str:
    """Why greedy outputs of the arms differ, as far as the rows tell."""
    outputs = cell["all"]["outputs"]
    differing = outputs["compared"] - outputs["equal"]
    if not differing:
        return f"All {outputs['compared']} greedy outputs of both arms are equal."
    itself = outputs["equal_to_itself"]["baseline"]
    text = (
        f"{differing} of {outputs['compared']} greedy outputs differ between the arms; the arms "
        "agree on "
        f"{outputs['common_prefix_share']:.0%} of an answer on average before they part."
    )
    if itself is not None:
        text += (
            f" The baseline repeats itself exactly for {itself} of {outputs['compared']} prompts."
        )
    if gaps := cell.get("difference_gaps"):
        text += (
            f" Where they part, the target's logits of the two tokens lie {gaps['median']:.3f} "
            "apart (median; 95 % "
            f"under {gaps['p95']:.3f})."
        )
    return text + (
        " Verification computes several positions in one batch, whose sums round in another "
        "order; a near tie "
        "then falls the other way, and everything after it is another text."
    )
