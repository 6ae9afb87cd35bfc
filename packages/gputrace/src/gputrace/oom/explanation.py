"""An out-of-memory error explained: the blocks behind each number of its message, the cause, and what would help."""

from collections import defaultdict
from html import escape
from typing import TYPE_CHECKING

from gputrace.oom.situation import Cause, FreeSpace, Situation, situation_of
from gputrace.tables import Table
from gputrace.units import byte_text
from virtualgpu.allocator import LARGE_SEGMENT, MIN_LARGE_ALLOC, UNLIMITED, MiB, size_text
from virtualgpu.source_lines import SourceLine

if TYPE_CHECKING:
    from gputrace.trace_data import TraceData

_LISTED = 5  # of the largest holders
_NAMED = 3  # lines named in an advice
_SETTINGS = "PYTORCH_CUDA_ALLOC_CONF"


def explain(trace: "TraceData") -> "OutOfMemoryExplanation | None":
    """The explanation of the out-of-memory error that ended the trace's block, or else of the last one in it; None without any."""
    situation = situation_of(trace)
    return None if situation is None else OutOfMemoryExplanation(situation, trace.badge)


class OutOfMemoryExplanation:
    """Why a GPU could not serve a request. Prints as text and as HTML.

    Attributes:
        verdict: the cause: "too much in use", "fragmentation", "cached by another stream", "another process", "a memory limit", "larger
            than the GPU", or "not known" where lost events hide it.
        reason: the numbers of the cause, in a sentence or two.
        remedies: what would help, one sentence or two each.
        numbers: a table of the message's numbers and what is behind each; from the events alone if the error was caught in the block.
        holders: a table of the largest holders of live memory, by category and line of source.
        situation: the facts, `gputrace.oom.situation.Situation`.
    """

    def __init__(self, situation: Situation, badge: str) -> None:
        self.situation = situation
        self.verdict = situation.verdict
        self.title = f"Out of memory on cuda:{situation.device}: {self.verdict}"
        self.reason = f"{_request(situation)} {_reason(situation)}"
        self.remedies = _remedies(situation)
        self.numbers = _numbers(situation, badge)
        self.holders = _holders(situation)

    def __repr__(self) -> str:
        parts = [f"{self.title}.\n{self.reason}", repr(self.numbers)]
        if self.holders.rows:
            parts.append(repr(self.holders))
        parts.append("\n".join(["What would help", *(f"- {remedy}" for remedy in self.remedies)]))
        return "\n\n".join(parts)

    def _repr_html_(self) -> str:
        helps = "".join(f"<li>{escape(remedy)}</li>" for remedy in self.remedies)
        code, reason = escape(_text(self.situation.line)), escape(self.reason)
        if code:
            reason = reason.replace(code, f"<code>{code}</code>", 1)
        holders = self.holders._repr_html_() if self.holders.rows else ""
        return (
            f"<p><strong>{escape(self.title)}.</strong> {reason}</p>{self.numbers._repr_html_()}{holders}"
            f"<p>What would help</p><ul>{helps}</ul>"
        )


# The cause in words


def _request(s: Situation) -> str:
    if s.requested is None:
        return "The request was for more than 1 EB."
    text = f": {s.line.text}" if s.line is not None and s.line.text else ""
    return f"{'A request' if s.line is None else s.line.location} asked for {byte_text(s.requested)}{text}."


def _reason(s: Situation) -> str:
    match s.verdict:
        case Cause.TOO_LARGE:
            return f"The whole GPU has {byte_text(s.total)}, the CUDA context's share included: no tidying makes room for this request."
        case Cause.TOO_MUCH_LIVE:
            more = f", {byte_text(s.grows)} more each step" if s.grows > 0 else ""
            return f"{byte_text(s.live)} are live{more}, and {byte_text(s.short)} of what the request needs is not there."
        case Cause.FRAGMENTATION:
            free, pieces = byte_text(sum(space.nbytes for space in s.within_reach)), sum(space.count for space in s.within_reach)
            return (
                f"{free} are free inside the allocator's segments of {_stream(s, s.stream)}, but in {_count(pieces, 'piece')} "
                f"of at most {byte_text(_largest(s))}: blocks between them are live, and hold the segments in place."
            )
        case Cause.OTHER_STREAM:
            held = "; ".join(_space_text(s, space) for space in s.barred)
            return f"It ran on {_stream(s, s.stream)}, and a stream's segments serve that stream alone. Out of its reach: {held}."
        case Cause.OTHER_PROCESS:
            return (
                f"Other processes hold {'about ' if not s.context_known else ''}{byte_text(s.others)} of this GPU. Without them the "
                f"{byte_text(s.live)} that are live here and this request would fit."
            )
        case Cause.LIMIT:
            limit = "A limit" if s.limit is None else f"A limit of {byte_text(s.limit)}"
            free = "" if s.free is None else f", though {byte_text(s.free)} of the GPU are free"
            return f"{limit} on what this process may reserve refused it{free}: {byte_text(s.live)} are live here."
    return f"{s.lost} events were lost, so the blocks are not known, and what stood in the way cannot be told."


def _largest(s: Situation) -> int:
    """The largest free piece that the request's stream could use."""
    return max((space.largest for space in s.within_reach), default=0)


def _space_text(s: Situation, space: FreeSpace) -> str:
    pieces = f"{byte_text(space.nbytes)} in {_count(space.count, 'piece')} of at most {byte_text(space.largest)}"
    if space.waiting:
        return f"{pieces}, freed on {_stream(s, space.stream)} but still in use by another"
    return f"{pieces}, free in segments of {_stream(s, space.stream)} for {'small' if space.small else 'large'} requests"


def _stream(s: Situation, stream: int) -> str:
    return s.streams[stream] if stream else "the default stream"


def _count(number: int, name: str) -> str:
    return f"{number} {name}{'' if number == 1 else 's'}"


# What would help


def _remedies(s: Situation) -> list[str]:
    match s.verdict:
        case Cause.TOO_LARGE:
            return [
                f"Ask for less at once: there are {byte_text(s.total - s.context)} at most. Split the tensor, over time or over several "
                "GPUs, or use a smaller data type."
            ]
        case Cause.TOO_MUCH_LIVE:
            empty = "torch.cuda.empty_cache() would not help: the allocator gave back every wholly free segment before it gave up."
            return [*_growth(s), *_free_lines(s), *_smaller_batch(s), empty]
        case Cause.FRAGMENTATION:
            return [*_growth(s), *_settings(s), *_pinning(s, {s.stream})]
        case Cause.OTHER_STREAM:
            there = {space.stream for space in s.barred}
            return [
                f"Allocate on one stream: make the tensors on {_stream(s, s.stream)} too, and tell the allocator with record_stream() "
                "which other stream uses them.",
                *_pinning(s, there),
            ]
        case Cause.OTHER_PROCESS:
            ends = [f"End process {number} ({byte_text(nbytes)}) if it is yours." for number, nbytes in s.processes]
            return [
                *(ends or ["End the other processes that are yours: nvidia-smi lists them."]),
                "Or take another GPU.",
                *_growth(s),
                *_smaller_batch(s),
            ]
        case Cause.LIMIT:
            return [
                "Raise the limit: torch.cuda.set_per_process_memory_fraction, per_process_memory_fraction in "
                f"{_SETTINGS}, or use(memory=...) sets it.",
                *_growth(s),
                *_free_lines(s),
                *_smaller_batch(s),
            ]
    return [f"Record with a larger max_events: {s.lost} events were lost."]


def _free_lines(s: Situation) -> list[str]:
    """Which lines' memory to give up, as far as it takes to make room."""
    named, gained = [], 0
    for holding in s.holdings[:_NAMED]:
        if gained >= s.short:
            break
        where = "what was there before the recording" if holding.line is None else holding.line.location
        named.append(f"{where} ({byte_text(holding.nbytes)}, {holding.category})")
        gained += holding.nbytes
    needed = "" if s.grows > 0 else f": at least {byte_text(s.short)} less is needed"  # of a loop that leaks, no number is enough
    return [f"Free or shrink {', '.join(named)}{needed}."] if named else []


def _growth(s: Situation) -> list[str]:
    if s.grows <= 0:
        return []
    return [
        f"Memory grows by {byte_text(s.grows)} a step, so a smaller batch only puts the error off: find out what keeps the tensors of "
        "earlier steps."
    ]


def _smaller_batch(s: Situation) -> list[str]:
    """What shrinks with the batch: activations, and this request too unless it is for a parameter. By how much the batch must shrink is not
    told: what the step still needs after this line is not known."""
    activations = sum(holding.nbytes for holding in s.holdings if holding.category == "activations")
    if s.grows > 0 or not activations:
        return []
    shrinks = activations + (0 if s.for_parameter else s.segment_size)
    what = f"activations, {byte_text(shrinks)}," if s.for_parameter else f"activations and this request, {byte_text(shrinks)},"
    stays = " This request, of a parameter's size, does not shrink." if s.for_parameter else ""
    if shrinks <= s.short:
        return [f"A smaller batch alone would not do: only {what} shrink with it.{stays}"]
    return [f"Take a smaller batch: {what} shrink with it.{stays}"]


def _settings(s: Situation) -> list[str]:
    """Settings of the allocator against fragmentation that are not in force yet, where the free pieces are large enough for them."""
    if s.settings.expandable_segments:
        return []
    advice = []
    largest = _largest(s)
    if largest >= LARGE_SEGMENT:
        advice.append(
            f"{_SETTINGS}=expandable_segments:True before the program starts: a stream's segments then grow as one, and free stretches of "
            f"{LARGE_SEGMENT // MiB} MiB in it go back to the device."
        )
    cut_up = any(segment.size >= s.rounded and segment.stream == s.stream for segment in s.segments or ())
    # Blocks below 10 MiB share segments whatever the setting, and the holes between them stay.
    if s.settings.max_split_size == UNLIMITED and s.rounded >= LARGE_SEGMENT and cut_up and largest >= MIN_LARGE_ALLOC:
        either = "Or " if advice else ""
        advice.append(
            f"{either}{_SETTINGS}=max_split_size_mb:{s.rounded // MiB}: a block of this size is then not cut up for smaller requests."
        )
    return advice


def _pinning(s: Situation, streams: set[int]) -> list[str]:
    """The lines whose live blocks keep the segments of these streams in place."""
    pins = [pin for pin in s.pins if pin.stream in streams][:_NAMED]
    if not pins:
        return []
    named = ", ".join(
        f"{_place(pin.line)} ({_count(pin.count, 'block')}, {byte_text(pin.nbytes)}, beside {byte_text(pin.free)} free)" for pin in pins
    )
    return [
        f"Free what keeps these segments in place, or allocate it before all else: {named}. The allocator gives a segment back when "
        "nothing in it is live."
    ]


# The numbers


def _numbers(s: Situation, badge: str) -> Table:
    """Each number of the message, and the blocks behind it."""
    message = s.message
    rows: list[tuple[str, str, str]] = []

    def add(name: str, nbytes: int | None, meaning: str) -> None:
        if nbytes is not None:
            rows.append((name, size_text(nbytes), meaning))

    add("tried to allocate", s.segment_size if s.requested is not None else None, _segment_text(s))
    add("total capacity", s.total or None, f"all of cuda:{s.device}, the CUDA context's share included")
    add("free", s.free, "on the device, held by nobody")
    if message.own is not None:
        add("this process", message.own, f"its segments, and {byte_text(s.context)} for the CUDA context and libraries")
    for number, nbytes in message.processes:
        yours = (number, nbytes) not in s.processes
        add(f"process {number}", nbytes, "most likely this one: a container has numbers of its own" if yours else "another program")
    if message.own is None and not s.context_known:
        add("outside", s.outside if s.held_known else None, "CUDA contexts, and whatever other processes hold")
    if s.limited:
        add("allowed", s.limit, "the limit on what this process may reserve")
    add("allocated by PyTorch", s.live if s.held_known else None, _live_text(s))
    add("in private pools", message.private, "of that, held for CUDA graphs")
    add("reserved but unallocated", s.reserved - s.live if s.held_known else None, _unallocated_text(s))
    source = "The error was caught in the block, so these are the allocator's own figures" if s.caught else "The error's numbers"
    return Table(("number", "size", "what is behind it"), tuple(rows), f"{source}; {badge}")


def _segment_text(s: Situation) -> str:
    if s.requested is None or s.requested == s.segment_size:
        return f"the request, on {_stream(s, s.stream)}"
    return f"{byte_text(s.requested)} on {_stream(s, s.stream)}; the device gives memory in segments of this size"


def _live_text(s: Situation) -> str:
    if s.segments is None:
        return f"live blocks; {s.lost} events were lost, so whose is not known"
    sizes: dict[str, int] = defaultdict(int)
    for holding in s.holdings:
        sizes[holding.category] += holding.nbytes
    kinds = ", ".join(f"{byte_text(nbytes)} {name}" for name, nbytes in sorted(sizes.items(), key=lambda item: (-item[1], item[0])))
    return f"{_count(sum(holding.count for holding in s.holdings), 'live block')}{': ' if kinds else ''}{kinds}"


def _unallocated_text(s: Situation) -> str:
    if s.segments is None:
        return f"free blocks inside segments; {s.lost} events were lost, so where is not known"
    return "; ".join(_space_text(s, space) for space in s.spaces) or "no free blocks inside segments"


def _holders(s: Situation) -> Table:
    rows = tuple(
        (byte_text(holding.nbytes), holding.category, _count(holding.count, "block"), _place(holding.line), _text(holding.line))
        for holding in s.holdings[:_LISTED]
    )
    return Table(("size", "category", "blocks", "line", "source"), rows, "The largest of what is live")


def _place(line: SourceLine | None) -> str:
    return "before the recording" if line is None else line.location


def _text(line: SourceLine | None) -> str:
    return "" if line is None else line.text
