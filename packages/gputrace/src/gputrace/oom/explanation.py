"""Explanation of an out-of-memory error: its numbers, its cause, and what would help."""

from collections import defaultdict
from html import escape
from typing import TYPE_CHECKING

from gputrace.oom.situation import Cause, FreeSpace, Situation, situation_of
from gputrace.tables import Table
from gputrace.units import byte_text, counted
from virtualgpu.allocator import LARGE_SEGMENT, MIN_LARGE_ALLOC, UNLIMITED, MiB, size_text
from virtualgpu.source_lines import SourceLine

if TYPE_CHECKING:
    from gputrace.trace_data import TraceData

_LISTED = 5  # rows of the table of the largest holders
_NAMED = 3  # lines that a remedy names
_SETTINGS = "PYTORCH_CUDA_ALLOC_CONF"


def explain(trace: "TraceData") -> "OutOfMemoryExplanation | None":
    """Explain the out-of-memory error that ended a recorded block, or the last one in it.

    Return None if memory did not run out.
    """
    situation = situation_of(trace)
    if situation is None:
        return None
    return OutOfMemoryExplanation(situation, trace.badge)


class OutOfMemoryExplanation:
    """Why a GPU could not serve a request. It prints as text and as HTML.

    Attributes:
        verdict: the cause: "too much in use", "fragmentation", "cached by another stream", "another
            process", "a memory limit", "larger than the GPU", or "not known" if lost events hide
            it.
        reason: the numbers of the cause, in a sentence or two.
        remedies: what would help, in a sentence or two each.
        numbers: a table of the numbers in the error's message, with what is behind each. If the
            program caught the error, the numbers come from the events.
        holders: a table of the largest holders of live memory, by category and source line.
        situation: the facts, as `gputrace.oom.situation.Situation`.
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
        tables = self.numbers._repr_html_()
        if self.holders.rows:
            tables += self.holders._repr_html_()
        title = f"<strong>{escape(self.title)}.</strong>"
        return f"<p>{title} {reason}</p>{tables}<p>What would help</p><ul>{helps}</ul>"


# The cause in words


def _request(s: Situation) -> str:
    """Return a text that says which line requested how many bytes."""
    if s.requested is None:
        return "The request was for more than 1 EB."
    if s.line is None:
        return f"A request asked for {byte_text(s.requested)}."
    text = f": {s.line.text}" if s.line.text else ""
    return f"{s.line.location} asked for {byte_text(s.requested)}{text}."


def _reason(s: Situation) -> str:
    """Return why the request could not be served, as text with the numbers of the cause."""
    live = byte_text(s.live)
    match s.verdict:
        case Cause.TOO_LARGE:
            whole = f"The whole GPU has {byte_text(s.total)}, the CUDA context's share included"
            return f"{whole}: no tidying makes room for this request."
        case Cause.TOO_MUCH_LIVE:
            more = ""
            if s.grows > 0:
                more = f", {byte_text(s.grows)} more each step"
            short = byte_text(s.short)
            return f"{live} are live{more}, and {short} of what the request needs is not there."
        case Cause.FRAGMENTATION:
            free = byte_text(sum(space.nbytes for space in s.within_reach))
            pieces = counted(sum(space.count for space in s.within_reach), "piece")
            return (
                f"{free} are free inside the allocator's segments of {_stream(s, s.stream)}, "
                f"but in {pieces} of at most {byte_text(_largest(s))}: "
                "blocks between them are live, and hold the segments in place."
            )
        case Cause.OTHER_STREAM:
            held = "; ".join(_space_text(s, space) for space in s.barred)
            return (
                f"It ran on {_stream(s, s.stream)}, and a stream's segments serve that stream "
                f"alone. Out of its reach: {held}."
            )
        case Cause.OTHER_PROCESS:
            about = "" if s.context_known else "about "
            return (
                f"Other processes hold {about}{byte_text(s.others)} of this GPU. Without them the "
                f"{live} that are live here and this request would fit."
            )
        case Cause.LIMIT:
            limit = "A limit"
            if s.limit is not None:
                limit += f" of {byte_text(s.limit)}"
            free = ""
            if s.free is not None:
                free = f", though {byte_text(s.free)} of the GPU are free"
            reserve = "on what this process may reserve refused it"
            return f"{limit} {reserve}{free}: {live} are live here."
    return (
        f"{s.lost} events were lost, so the blocks are not known, "
        "and what stood in the way cannot be told."
    )


def _largest(s: Situation) -> int:
    """Return the bytes of the largest free block that the request's stream can use."""
    return max((space.largest for space in s.within_reach), default=0)


def _space_text(s: Situation, space: FreeSpace) -> str:
    """Describe free blocks: their bytes, their number, and where they are."""
    count = counted(space.count, "piece")
    pieces = f"{byte_text(space.nbytes)} in {count} of at most {byte_text(space.largest)}"
    stream = _stream(s, space.stream)
    if space.waiting:
        return f"{pieces}, freed on {stream} but still in use by another"
    size = "small" if space.small else "large"
    return f"{pieces}, free in segments of {stream} for {size} requests"


def _stream(s: Situation, stream: int) -> str:
    """Return the name of a stream."""
    if not stream:
        return "the default stream"
    return s.streams[stream]


# What would help


def _remedies(s: Situation) -> list[str]:
    """Return sentences about what would help against this cause."""
    match s.verdict:
        case Cause.TOO_LARGE:
            most = byte_text(s.total - s.context)
            return [
                f"Ask for less at once: there are {most} at most. Split the tensor, over time or "
                "over several GPUs, or use a smaller data type."
            ]
        case Cause.TOO_MUCH_LIVE:
            empty = (
                "torch.cuda.empty_cache() would not help: the allocator gave back every wholly "
                "free segment before it gave up."
            )
            return [*_growth(s), *_free_lines(s), *_smaller_batch(s), empty]
        case Cause.FRAGMENTATION:
            return [*_growth(s), *_settings(s), *_pinning(s, {s.stream})]
        case Cause.OTHER_STREAM:
            there = {space.stream for space in s.barred}
            return [
                f"Allocate on one stream: make the tensors on {_stream(s, s.stream)} too, and "
                "tell the allocator with record_stream() which other stream uses them.",
                *_pinning(s, there),
            ]
        case Cause.OTHER_PROCESS:
            ends = []
            for number, nbytes in s.processes:
                ends.append(f"End process {number} ({byte_text(nbytes)}) if it is yours.")
            if not ends:
                ends = ["End the other processes that are yours: nvidia-smi lists them."]
            return [
                *ends,
                "Or take another GPU.",
                *_growth(s),
                *_smaller_batch(s),
            ]
        case Cause.LIMIT:
            return [
                "Raise the limit: torch.cuda.set_per_process_memory_fraction, "
                f"per_process_memory_fraction in {_SETTINGS}, or use(memory=...) sets it.",
                *_growth(s),
                *_free_lines(s),
                *_smaller_batch(s),
            ]
    return [f"Record with a larger max_events: {s.lost} events were lost."]


def _free_lines(s: Situation) -> list[str]:
    """Name the lines whose memory would be enough for the request, or else the largest ones."""
    named, gained = [], 0
    for holding in s.holdings[:_NAMED]:
        if gained >= s.short:
            break
        where = "what was there before the recording"
        if holding.line is not None:
            where = holding.line.location
        named.append(f"{where} ({byte_text(holding.nbytes)}, {holding.category})")
        gained += holding.nbytes
    if not named:
        return []
    needed = ""
    if s.grows <= 0:  # if a loop leaks, no number of bytes is enough
        needed = f": at least {byte_text(s.short)} less is needed"
    return [f"Free or shrink {', '.join(named)}{needed}."]


def _growth(s: Situation) -> list[str]:
    """Return advice to find a leak, or [] if steps leave no memory behind."""
    if s.grows <= 0:
        return []
    return [
        f"Memory grows by {byte_text(s.grows)} a step, so a smaller batch only puts the error "
        "off: find out what keeps the tensors of earlier steps."
    ]


def _smaller_batch(s: Situation) -> list[str]:
    """Return advice to make the batch smaller, if activations are live.

    The request shrinks with the batch, too, unless it is for a parameter. By how much the batch
    must shrink is not known, because the step needs more memory after this line.
    """
    activations = sum(holding.nbytes for holding in s.holdings if holding.category == "activations")
    if s.grows > 0 or not activations:
        return []
    if s.for_parameter:
        shrinks = activations
        what = f"activations, {byte_text(shrinks)},"
        stays = " This request, of a parameter's size, does not shrink."
    else:
        shrinks = activations + s.segment_size
        what = f"activations and this request, {byte_text(shrinks)},"
        stays = ""
    if shrinks <= s.short:
        return [f"A smaller batch alone would not do: only {what} shrink with it.{stays}"]
    return [f"Take a smaller batch: {what} shrink with it.{stays}"]


def _settings(s: Situation) -> list[str]:
    """Return advice on settings of the allocator that would avoid the fragmentation.

    Settings that are already in use are left out.
    """
    if s.settings.expandable_segments:
        return []
    advice = []
    largest = _largest(s)
    if largest >= LARGE_SEGMENT:
        advice.append(
            f"{_SETTINGS}=expandable_segments:True before the program starts: a stream's segments "
            f"then grow as one, and free stretches of {LARGE_SEGMENT // MiB} MiB in it go back to "
            "the device."
        )
    cut_up = False
    for segment in s.segments or ():
        if segment.size >= s.rounded and segment.stream == s.stream:
            cut_up = True
    # Blocks below 10 MiB share segments whatever the setting, and the holes between them stay.
    applies = s.rounded >= LARGE_SEGMENT and largest >= MIN_LARGE_ALLOC
    if s.settings.max_split_size == UNLIMITED and applies and cut_up:
        either = "Or " if advice else ""
        advice.append(
            f"{either}{_SETTINGS}=max_split_size_mb:{s.rounded // MiB}: a block of this size is "
            "then not cut up for smaller requests."
        )
    return advice


def _pinning(s: Situation, streams: set[int]) -> list[str]:
    """Name the lines whose live blocks keep the segments of these streams."""
    named = []
    for pin in [pin for pin in s.pins if pin.stream in streams][:_NAMED]:
        blocks = f"{counted(pin.count, 'block')}, {byte_text(pin.nbytes)}"
        named.append(f"{_place(pin.line)} ({blocks}, beside {byte_text(pin.free)} free)")
    if not named:
        return []
    return [
        "Free what keeps these segments in place, or allocate it before all else: "
        f"{', '.join(named)}. The allocator gives a segment back when nothing in it is live."
    ]


# The numbers


def _numbers(s: Situation, badge: str) -> Table:
    """Return a table of the numbers in the error's message, with the blocks behind each."""
    message = s.message
    rows: list[tuple[str, str, str]] = []

    def add(name: str, nbytes: int | None, meaning: str) -> None:
        """Add a row with a number and its meaning to the table, unless the number is None."""
        if nbytes is not None:
            rows.append((name, size_text(nbytes), meaning))

    add("tried to allocate", None if s.requested is None else s.segment_size, _segment_text(s))
    add(
        "total capacity",
        s.total or None,
        f"all of cuda:{s.device}, the CUDA context's share included",
    )
    add("free", s.free, "on the device, held by nobody")
    context = f"its segments, and {byte_text(s.context)} for the CUDA context and libraries"
    add("this process", message.own, context)
    for number, nbytes in message.processes:
        meaning = "another program"
        if (number, nbytes) not in s.processes:
            meaning = "most likely this one: a container has numbers of its own"
        add(f"process {number}", nbytes, meaning)
    outside = live = unallocated = None
    if s.held_known:
        outside, live, unallocated = s.outside, s.live, s.reserved - s.live
    if message.own is None and not s.context_known:
        add("outside", outside, "CUDA contexts, and whatever other processes hold")
    if s.limited:
        add("allowed", s.limit, "the limit on what this process may reserve")
    add("allocated by PyTorch", live, _live_text(s))
    add("in private pools", message.private, "of that, held for CUDA graphs")
    add("reserved but unallocated", unallocated, _unallocated_text(s))
    source = "The error's numbers"
    if s.caught:
        source = "The error was caught in the block, so these are the allocator's own figures"
    return Table(("number", "size", "what is behind it"), tuple(rows), f"{source}; {badge}")


def _segment_text(s: Situation) -> str:
    """Return a text that explains the size of the segment that the request needed."""
    stream = _stream(s, s.stream)
    if s.requested is None or s.requested == s.segment_size:
        return f"the request, on {stream}"
    size = byte_text(s.requested)
    return f"{size} on {stream}; the device gives memory in segments of this size"


def _live_text(s: Situation) -> str:
    """Return a text that says how many blocks are live, and what they are for."""
    if s.segments is None:
        return f"live blocks; {s.lost} events were lost, so whose is not known"
    sizes: dict[str, int] = defaultdict(int)
    for holding in s.holdings:
        sizes[holding.category] += holding.nbytes
    blocks = counted(sum(holding.count for holding in s.holdings), "live block")
    kinds = []
    for name, nbytes in sorted(sizes.items(), key=lambda item: (-item[1], item[0])):
        kinds.append(f"{byte_text(nbytes)} {name}")
    if not kinds:
        return blocks
    return f"{blocks}: {', '.join(kinds)}"


def _unallocated_text(s: Situation) -> str:
    """Return a text that says where the free blocks are."""
    if s.segments is None:
        return f"free blocks inside segments; {s.lost} events were lost, so where is not known"
    spaces = "; ".join(_space_text(s, space) for space in s.spaces)
    return spaces or "no free blocks inside segments"


def _holders(s: Situation) -> Table:
    """Return a table of the largest holders of live memory."""
    rows = []
    for holding in s.holdings[:_LISTED]:
        size, count = byte_text(holding.nbytes), counted(holding.count, "block")
        row = (size, holding.category, count, _place(holding.line), _text(holding.line))
        rows.append(row)
    header = ("size", "category", "blocks", "line", "source")
    return Table(header, tuple(rows), "The largest of what is live")


def _place(line: SourceLine | None) -> str:
    """Return the location of a line in words."""
    if line is None:
        return "before the recording"
    return line.location


def _text(line: SourceLine | None) -> str:
    """Return the source of a line, or ""."""
    if line is None:
        return ""
    return line.text
