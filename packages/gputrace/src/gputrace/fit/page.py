"""What `fit` answers: a table of GPUs, what the peak consists of, and which changes were tried."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

from gputrace.fit.changes import ALL, CHANGES, SHARDINGS
from gputrace.fit.growth import FOREVER, growth_of, varies
from gputrace.fit.outcome import Outcome, Wish
from gputrace.fit.processes import Runner, Start, afresh
from gputrace.tables import Table
from gputrace.units import byte_text, time_text
from virtualgpu import machines, profiles

FEWEST = 3  # steps: from the end of the first, in which an optimizer makes its state, to that of the last
ROOM = 1 << 42  # bytes of a GPU on which any script's peak is seen
FITS, NOT, SO_FAR = "yes", "no", "so far"
LONGEST = 90  # characters of a line of code
BY_HAND = "It makes no optimizer of torch.optim: each backward was taken for a step"
TRIES = (
    "It sets torch.backends.cudnn.benchmark: in the first step cuDNN tries its algorithms, which may take several GiB if that much\n"
    "is free. This memory is not counted, because cuDNN also works with less"
)
NO_STEPS = "it ended without step() of an optimizer of torch.optim, so that what a step takes is unknown"
PARTS = {  # those whose names say too little
    "in flight": "gradients of activations, and what else a backward or a step frees again",
    "workspace": "workspaces of cuBLAS and cuDNN",
    "other": "other tensors, such as inputs",
    "reserved, not in use": "kept by PyTorch's allocator: its cache and fragments",
}
MADE_UP = """\
These lines read values that nothing computes. They get 0 or False (True of all() and in an
assert), and masks select everything. What depends on these values may differ:"""
SHOWN = 3  # such lines
OTHERS = "other processes of the script"
CONTEXT = "CUDA's context, outside PyTorch's allocator"
NOTES = """How to read it
needs: the most that is taken of the GPU's memory: CUDA's context and all that PyTorch's allocator reserves, as nvidia-smi shows it.
±: nine of ten training steps of networks that were recorded on an H200 and an H100 were off by less, half of them by 6% and 11%.
   Of other GPUs single operators and 33 networks were compared: they have the H200's bar at least.
a step takes: without loading data, and what else is the script's own Python. One of a few milliseconds may take 1 ms more.
the GPU waits for the host: the share of a step in which the GPU has nothing to do. If that is most of
   the step, the time depends on the host's speed. {host}
sharding: over as few GPUs of one machine as it fits, up to 8. One of them ran, and the others are taken to do the same when it does.
   Each takes the script's whole batch, n times as many samples a step, and has the model whole until its optimizer is made."""

ASSUMED_HOST = """It is assumed to be that of the recorded H200s.
   In training steps, the hosts of an H200 and of an H100 took 1.4 and 1.7 times as long (2026-11-27).
   --host here measures this computer, and --host 1.5 gives a speed."""
GIVEN_HOST = """Everything that the host does is taken to need
   {times:g} times as long as on the host of the recorded H200s, as --host says."""

Tell = Callable[[str], object]


class ScriptFailedError(Exception):
    """The script raised something other than an out-of-memory error."""


def answer(wish: Wish, models: Iterable[str], tell: Tell = lambda line: None, start: Start = afresh) -> Iterator[Table | str]:
    """The page, table by table as it is found, and then notes: a script may take a while on each GPU.

    `tell` gets a line whenever something was tried; `start` starts the processes.

    Raises ValueError for a model that has no profile, for fewer than 3 steps and for a host outside 0.01 to 100, before anything runs;
    ScriptFailedError where the script does.
    """
    names = list(dict.fromkeys(models))
    for name in names:
        profiles.load(name)
    if wish.steps < FEWEST:
        raise ValueError(f"{wish.steps} steps: give {FEWEST} or more, for the first is not like the others")
    machines.check_host(wish.host)
    told = f"{wish.script} runs for at least {wish.steps} steps on each GPU model. "
    tell(told + "Then each change is tried on the model that is closest to its limit.")
    runner = Runner(start, tell)
    tried = _each(runner, [replace(wish, like=name) for name in names[:1]], "", tell)  # alone: the first one may download its data
    tried |= _each(runner, [replace(wish, like=name) for name in names[1:]], "", tell)
    without = [replace(wish, like=name, memory=ROOM) for name in names if not tried[name].fits]
    needed = {name: tried[name] for name in names} | _each(runner, without, ", if it had the memory", tell)
    yield _table(tried, needed, wish.script, wish.gpus)
    tightest = max(names, key=lambda name: needed[name].used / tried[name].total)
    if remarks := _on_steps(tightest, needed[tightest]):
        yield remarks
    yield _parts(tightest, needed[tightest])
    steps = max(wish.steps, needed[tightest].steps)  # as many as without a change, if memory grows
    wish = replace(wish, like=tightest, memory=ROOM, steps=steps)
    yield _changes(runner, wish, needed[tightest], tried[tightest].total, tell)
    host = ASSUMED_HOST
    if wish.host != 1:
        host = GIVEN_HOST.format(times=wish.host)
    yield NOTES.format(host=host)


def _each(runner: Runner, wishes: list[Wish], told: str, tell: Tell) -> dict[str, Outcome]:
    """What came of each, by its GPU. Raises ScriptFailedError where the script fails."""
    outcomes = {}
    for wish, outcome in runner.run_all(wishes):
        if outcome.failed:
            raise ScriptFailedError(f"on the {wish.like} the script failed after {outcome.steps} steps: {outcome.failed}")
        tell(f"{wish.like}{told}: {_in_short(outcome)}")
        outcomes[wish.like] = outcome
    return outcomes


def _in_short(outcome: Outcome) -> str:
    if outcome.failed or not outcome.fits:
        return "the script failed" if outcome.failed else "memory runs out"
    stopped = f" until {outcome.asked} needs a value" * bool(outcome.asked)
    grows = growth_of(outcome.peaks, outcome.left)
    so_far = "" if grows is None else f" after {outcome.steps} steps, {byte_text(grows.bytes)} more per step"
    takes = "" if outcome.step is None else f", a step takes {time_text(outcome.step)}"
    return f"needs {byte_text(outcome.used)}{so_far}{takes}{stopped}"


def _table(tried: dict[str, Outcome], needed: dict[str, Outcome], script: str, gpus: int) -> Table:
    header = ("GPU", "memory", "needs", "fits", "a step takes", "the GPU waits for the host")
    rows = [
        (
            name,
            byte_text(tried[name].total),
            _need(most),
            _fits_text(most, tried[name]),
            _step_text(name, most) + ", if it had the memory" * (most.step is not None and not tried[name].fits),
            "" if most.idle is None else f"{most.idle:.0%} of it",
        )
        for name, most in needed.items()
    ]
    return Table(header, tuple(rows), f"{script}: {_how_it_ran(list(needed.values()), gpus)}")


def _how_it_ran(outcomes: list[Outcome], gpus: int) -> str:
    """Say how many steps ran, and what is not counted or made up."""
    steps = min(outcome.steps for outcome in outcomes)
    ran = f"{steps} step{'s' * (steps > 1)} on virtual GPUs, without values" if steps else NO_STEPS
    said = [ran + "."]
    if any(outcome.by_hand for outcome in outcomes):
        said[0] += f" {BY_HAND}."
    if gpus > 1:
        said.append(f'It has {gpus} GPUs of each model. "needs" and "fits" are about the fullest.')
    if processes := max(outcome.processes for outcome in outcomes):
        some = "a process" if processes == 1 else f"{processes} processes"
        said.append(f"It starts {some}. Memory is that of all its processes on a GPU.")
    if any(outcome.tries_algorithms for outcome in outcomes):
        said.append(f"{TRIES}.")
    if asked := next((outcome.asked for outcome in outcomes if outcome.asked), ""):
        said.append(f"Then {asked} needs a value that nothing computes. What follows is not counted.")
    if lines := list(dict.fromkeys(line for outcome in outcomes for line in outcome.made_up)):
        said.append(MADE_UP)
        said += [f"   {_shortened(line)}" for line in lines[:SHOWN]]
        if len(lines) > SHOWN:
            said.append(f"   and {len(lines) - SHOWN} more")
    return "\n".join(said)


def _on_steps(name: str, outcome: Outcome) -> str:
    """Say how the peak changes from step to step; "" if it stays the same."""
    said = []
    later = outcome.peaks[1:]
    measured = f"steps 2 to {len(outcome.peaks)} on the {name}"
    grows = growth_of(outcome.peaks, outcome.left)
    if varies(outcome.peaks):
        said.append(
            f"The peak varies from step to step: {byte_text(min(later))} to {byte_text(max(later))} in {measured}.\n"
            '"needs" is the highest of them. A step with a larger batch needs more.'
        )
    if grows is not None:
        how = f"Memory grows by {byte_text(grows.bytes)} per step ({measured})."
        if grows.ratio != 1:
            how = (
                f"Memory grows faster and faster: by {byte_text(grows.bytes)} in the last step, "
                f"{grows.ratio:.1f} times as much as in the step before ({measured})."
            )
        said.append(f'{how}\n{outcome.grows}.\n"fits" says when a GPU is full if the growth goes on.')
    return "\n".join(said)


def _need(outcome: Outcome) -> str:
    at_least = _broken_off(outcome) or growth_of(outcome.peaks, outcome.left) is not None
    return "at least " * at_least + byte_text(outcome.used)


def _fits_text(outcome: Outcome, tried: Outcome) -> str:
    """Say whether it fits. `outcome` is that of enough memory, `tried` that of the GPU's own."""
    if not tried.fits and growth_of(outcome.peaks, outcome.left) is not None:
        return f"{NOT}, full in step {tried.steps + 1}"
    return _fits(outcome, tried.fits, tried.total)


def _fits(outcome: Outcome, fits: bool, total: int) -> str:
    if not fits:
        return NOT
    if _broken_off(outcome):
        return SO_FAR
    grows = growth_of(outcome.peaks, outcome.left)
    if grows is None:
        return FITS
    more = grows.steps_until(total - outcome.used)
    if more == FOREVER:
        return f"{FITS}, for over a million steps"
    return f"for about {_rounded(outcome.steps + more):,} steps"


def _rounded(number: int) -> int:
    """Return the number with two significant digits."""
    return round(number, min(0, 2 - len(str(number))))


def _broken_off(outcome: Outcome) -> bool:
    """Whether the script ended so early that its peak may come later.

    Only from the second step on is the optimizer's state there in a backward pass.
    """
    return bool(outcome.asked) and outcome.steps <= 1


def _step_text(name: str, outcome: Outcome) -> str:
    if outcome.step is None:
        return "unknown" if outcome.first is None else f"the first at most {time_text(outcome.first)}"
    error = profiles.load(name).time_error
    return f"{time_text(outcome.step)}" + (", never compared" if error is None else f" ± {error:.0%}")


def _parts(name: str, outcome: Outcome) -> Table:
    context = outcome.used - outcome.reserved - outcome.others
    parts = outcome.parts | {CONTEXT: context, OTHERS: outcome.others}
    rows = tuple((byte_text(nbytes), PARTS.get(part, part)) for part, nbytes in sorted(parts.items(), key=lambda part: -part[1]) if nbytes)
    which = f", on cuda:{outcome.device}" if len(outcome.by_device) > 1 else ""
    where = f", made by {_shortened(outcome.line)}" * bool(outcome.line)
    needs, in_tensors = byte_text(outcome.used), byte_text(outcome.allocated)
    caption = f"At the peak on the {name}{which}{where}: {needs}, "
    return Table(("bytes", "for"), rows, f"{caption}of them in tensors and workspaces {in_tensors}")


def _changes(runner: Runner, wish: Wish, before: Outcome, total: int, tell: Tell) -> Table:
    """Each change tried alone, the one that costs the least time first among those that fit, and what takes more GPUs after them."""
    profile = profiles.load(wish.like)
    rows, tried = [], []
    for name, change in CHANGES.items():
        if name not in before.changes:
            rows.append((2, False, 0.0, (name, "", "", change.nothing)))
        elif (profile.major, profile.minor) < change.capability:
            lacks = f"the {wish.like} has no tensor cores for {change.computes} "
            lacks += f"(compute capability {profile.major}.{profile.minor})"
            rows.append((2, False, 0.0, (name, "", "", lacks)))
        else:
            tried.append(name)
    for name, after in _tried(runner, wish, tried, total):
        tell(f"{wish.like}, {name}: {_in_short(after)}")
        if after.failed or not after.changed:
            rows.append((2, False, 0.0, (name, "", "", after.failed or ALL[name].nothing)))
            continue
        fits = after.used <= total
        share = ALL[name].share
        slower = None if after.step is None or before.step is None else after.step / before.step / share
        told = "" if slower is None else f"{slower:.2f} times as long"
        rows.append((not fits, name in SHARDINGS, slower or 0.0, (name, _need(after), told, _fits(after, fits, total))))
    ordered = tuple(row for *_, row in sorted(rows, key=lambda row: row[:3]))
    return Table(
        ("change", "needs", "as many samples take", "fits"),
        ordered,
        f"Changes, each tried alone on the {wish.like}, where it is tightest ({byte_text(total)}); the fastest of those that fit first",
    )


def _tried(runner: Runner, wish: Wish, changes: list[str], total: int) -> Iterator[tuple[str, Outcome]]:
    """What came of each change; of sharding, over as few GPUs as it fits, or over the most of them."""
    for tried, after in runner.run_all([replace(wish, change=change) for change in changes]):
        yield str(tried.change), after
    for change in SHARDINGS:
        [(_, after)] = runner.run_all([replace(wish, change=change)])
        if after.failed or not after.changed or after.used <= total:
            break
    yield change, after


def _shortened(line: str) -> str:
    return line if len(line) <= LONGEST else f"{line[: LONGEST - 2]} …"
