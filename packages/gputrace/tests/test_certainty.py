"""What the page says about how certain a virtual time is."""

import pytest
import torch

import virtualgpu
from gputrace import record
from gputrace.certainty import certainty
from gputrace.spans import HOST, KERNEL, LAUNCH, Execution, Spans, Waits

VIRTUAL = "virtual GPU, modelled on paper"


def working(share: float, **more) -> dict:
    """Return the arguments of a trace of a second in which a GPU works for this share."""
    launch = (1.0 - share, 0.0, HOST, 0, LAUNCH, "k", 0, -1)
    kernel = (1.0 - share, share, 0, 0, KERNEL, "k", 0, 0)
    ran = Execution(Spans.of([launch, kernel]), Waits.of([]), [])
    return {"execution": ran, "badge": VIRTUAL, **more}


def test_a_busy_gpu_s_time_hardly_depends_on_the_host(trace_of):
    assert certainty(trace_of([], **working(0.95))) == (
        "The GPU worked 95% of this time, so the host matters little"
    )


def test_where_the_gpu_waits_the_host_s_speed_is_assumed_or_given(trace_of):
    said = certainty(trace_of([], **working(0.25)))
    assert said.startswith("The GPU worked 25% of this time. The rest depends on the host's speed.")
    assert "assumed to be that of the recorded H200s" in said
    given = trace_of([], **working(0.25, origin={"host": "1.5"}))
    assert "1.5 times as long as on the recorded H200s" in certainty(given)


def test_a_measured_time_needs_no_sentence(trace_of):
    assert certainty(trace_of([], **working(0.25, badge="measured on NVIDIA H200"))) == ""


@pytest.mark.parametrize(("host", "kept"), [(1.0, None), (2.5, "2.5")])
def test_a_recording_keeps_a_given_speed_of_the_host(host, kept):
    with virtualgpu.use(host=host), record() as trace:
        torch.ones(3, device="cuda")
    assert trace.origin.get("host") == kept
