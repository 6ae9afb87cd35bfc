"""How certain a virtual time is. It depends on the GPU, or on the speed of the host."""

from typing import TYPE_CHECKING

from virtualgpu.profiles import BUSY

if TYPE_CHECKING:
    from gputrace.trace_data import TraceData

HOST_SPEED = "host"  # entry of a trace's origin: the time of the host's work, if it was given


def certainty(trace: "TraceData") -> str:
    """Return a sentence that says what the virtual times of a trace depend on.

    Return "" if the times were measured on a real GPU.
    """
    if not trace.is_virtual or trace.no_timeline or not trace.end:
        return ""
    worked = max(trace.busy(device) for device in trace.devices) / trace.end
    gpu = "The GPU"
    if len(trace.devices) > 1:
        gpu = "The busiest GPU"
    if worked >= BUSY:
        return f"{gpu} worked {worked:.0%} of this time, so the host matters little"
    said = f"{gpu} worked {worked:.0%} of this time. The rest depends on the host's speed. "
    given = trace.origin.get(HOST_SPEED)
    if given:
        return (
            f"{said}Its work is assumed to take {given} times as long as on the recorded H200s, "
            "as --host says"
        )
    return f"{said}It is assumed to be that of the recorded H200s; --host here measures yours"
