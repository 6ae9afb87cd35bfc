"""Variants of exercises of lesson 1, for exams."""

import random
from typing import Any

import torch

from gpulessons.lesson_01.checks import DEVICES, from_elsewhere
from labkit.checks.checking import (
    Check,
    Plain,
    Verdict,
    describe,
    during,
    not_yet,
    right,
    wrong_type,
)
from labkit.checks.variants import Variant

SPANS_TASK = """In each row of a table of sentences, one phrase is marked. Write
`phrase_mask(starts, ends, size)`. It takes two tensors of integers on *any* device, which is the
same for both, and returns a `torch.bool` tensor on that device. Row `i` has `size` values. Those
from position `starts[i]` up to, but not including, position `ends[i]` are `True`. A phrase may be
empty."""
SPANS_STUB = '''def phrase_mask(starts, ends, size):
    """Return a mask of shape (len(starts), size) that is True inside of each phrase."""
    ...'''


def draw_spans(generator: random.Random) -> Plain:
    """Draw a case for each device. One phrase is empty, and one reaches the end of its row."""
    cases = []
    for device in generator.sample(DEVICES, k=3):
        size = generator.randint(6, 9)
        spans = [(3, 3), (size - 2, size)]
        for _ in range(generator.randint(1, 4)):
            start = generator.randint(0, size - 1)
            spans.append((start, generator.randint(start, size)))
        generator.shuffle(spans)
        cases.append({"device": device, "size": size, "spans": [list(span) for span in spans]})
    return cases


def observe_spans(phrase_mask: Any, cases: Plain) -> Plain:
    """Call the answer on each device, while another GPU is current."""
    masks = []
    for case in cases:
        starts, ends = torch.tensor(case["spans"], device=case["device"]).unbind(1)
        with during(f"starts and ends on {case['device']}"):
            mask = from_elsewhere(case["device"], phrase_mask, starts, ends, case["size"])
        unchanged = torch.stack([starts, ends], 1).tolist() == case["spans"]
        masks.append({**describe(mask), "unchanged": unchanged})
    return masks


def judge_spans(masks: Plain, cases: Plain) -> Verdict:
    """Judge the device, the dtype, the shape and the values of the masks."""
    for mask, case in zip(masks, cases, strict=True):
        spans, size, device = case["spans"], case["size"], case["device"]
        if mask["type"] != "Tensor":
            return wrong_type(mask["type"], "a tensor")
        if mask["device"] != device:
            return not_yet(f"the starts were on {device}, and your mask is on {mask['device']}.")
        if mask["dtype"] != "torch.bool" or mask["shape"] != [len(spans), size]:
            return not_yet(
                f"expected a mask of dtype torch.bool and shape [{len(spans)}, {size}]. "
                f"Yours has dtype {mask['dtype']} and shape {mask['shape']}."
            )
        if mask["values"] != [
            start <= position < end for start, end in spans for position in range(size)
        ]:
            return not_yet(
                f"some values are wrong for the starts and ends {spans} and the size {size}."
            )
        if not mask["unchanged"]:
            return not_yet("your function changed the starts or the ends that it was given.")
    return right("One function serves every device.")


VARIANTS = [
    Variant(
        Check(
            "01.101",
            draw_spans,
            observe_spans,
            judge_spans,
            gpus=2,
            section="Which operations work across devices",
        ),
        SPANS_TASK,
        SPANS_STUB,
    )
]
