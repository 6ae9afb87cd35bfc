"""Answer of `fit`: a table of GPUs, what the peak consists of, and the changes that were tried."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from statistics import median

from gputrace.fit.changes import ALL, CHANGES, SHARDINGS
from gputrace.fit.growth import FOREVER, growth_of, varies
from gputrace.fit.outcome import Outcome, Wish
from gputrace.fit.processes import Runner, Start, afresh
from gputrace.loading import loaded_ahead
from gputrace.tables import Table
from gputrace.units import byte_text, time_text
from virtualgpu import machines, profiles

FEWEST = 3  # steps. The first one is special, because the optimizer makes its state in it.
ROOM = 1 << 42  # bytes of a GPU on which every script fits
FITS, NOT, SO_FAR = "yes", "no", "so far"
LONGEST = 90  # characters of a line of code
BY_HAND = "It makes no optimizer of torch.optim, so each backward pass counts as a step"
TRIES = (
    "It sets torch.backends.cudnn.benchmark: in the first step cuDNN tries its algorithms, which "
    "may take several GiB if that much\n"
    "is free. This memory is not counted, because cuDNN also works with less"
)
NO_STEPS = (
    "it ended without step() of an optimizer of torch.optim, so that what a step takes is unknown"
)
PARTS = {  # longer names of parts whose names say too little
    "in flight": "gradients of activations, and other tensors that a backward pass or a step frees",
    "workspace": "workspaces of cuBLAS and cuDNN",
    "other": "other tensors, such as inputs",
    "reserved, not in use": "kept by PyTorch's allocator: its cache and fragments",
}
MADE_UP = """\
These lines read values that nothing computes. They get 0 or False (True of all() and in an
assert), and masks select everything. What depends on these values may differ:"""
SHOWN = 3  # made-up values whose lines are shown
OTHERS = "other processes of the script"
CONTEXT = "CUDA's context, outside PyTorch's allocator"
NOTES = """How to read it
needs: the most of the GPU's memory that is in use: CUDA's context and all that PyTorch's
   allocator reserves, as nvidia-smi shows it.
±: nine of ten training steps of networks that were recorded on an H200 and an H100 were off by
   less. The error of steps that keep the GPU busy is smaller than that of steps in which it waits
   for the host for a tenth of the time or more. For other GPUs, single operators and 33 networks
   were compared. Their errors are at least those of the H200 and the H100.
a step takes: without loading the batches of a DataLoader, and without the script's other Python
   code. A step of a few milliseconds may take 1 ms more.
the GPU waits for the host: the share of a step in which the GPU has nothing to do. The larger it
   is, the more the time depends on the host's speed. {host}
sharding: over as few GPUs of one machine as it fits, up to 8. One of them ran, and the others are
   assumed to do the same at the same time. Each takes the script's whole batch, so there are n
   times as many samples per step. Each has the whole model until its optimizer is made."""

ASSUMED_HOST = """It is assumed to be that of the recorded H200s.
   In training steps, the hosts of an H200 and of an H100 took 1.4 and 1.7 times as long
   (2026-11-27). --host here measures this computer, and --host 1.5 gives a speed."""
GIVEN_HOST = """Everything that the host does is assumed to take
   {times:g} times as long as on the host of the recorded H200s, as --host says."""

Tell = Callable[[str], object]


class ScriptFailedError(Exception):
    """Error for a script that raised something other than an out-of-memory error."""


def answer(
    wish: Wish, models: Iterable[str], tell: Tell = lambda line: None, start: Start = afresh
) -> Iterator[Table | str]:
    """Yield the tables and notes of the answer, each as soon as it is known.

    A script may take a while on each GPU.

    Args:
        models: the names of the GPU models.
        tell: gets a line of text after each attempt.
        start: starts the processes.

    Raises:
        ValueError: there is no profile of a model, or the steps or the host are out of range. This
            is raised before anything runs.
        ScriptFailedError: the script failed.
    """
    names = list(dict.fromkeys(models))
    for name in names:
        profiles.load(name)
    if wish.steps < FEWEST:
        reason = "because the first one is not like the others"
        raise ValueError(f"--steps {wish.steps}: expected {FEWEST} or more, {reason}")
    machines.check_host(wish.host)
    told = f"{wish.script} runs for at least {wish.steps} steps on each GPU model. "
    tell(told + "Then each change is tried on the model that is fullest.")
    runner = Runner(start, tell)
    # The first model runs alone, because its attempt may download data.
    tried = _each(runner, [replace(wish, like=name) for name in names[:1]], "", tell)
    tried |= _each(runner, [replace(wish, like=name) for name in names[1:]], "", tell)
    without = [replace(wish, like=name, memory=ROOM) for name in names if not tried[name].fits]
    needed = {name: tried[name] for name in names}
    needed |= _each(runner, without, ", if it had the memory", tell)
    yield _table(tried, needed, wish)
    tightest = max(names, key=lambda name: needed[name].used / tried[name].total)
    # The first model's attempt ran alone, so nothing else of `fit` slowed down its loading.
    for remarks in (_on_loading(tried[names[0]]), _on_steps(tightest, needed[tightest])):
        if remarks:
            yield remarks
    yield _parts(tightest, needed[tightest])
    steps = max(wish.steps, needed[tightest].steps)  # more than asked for, if memory grows
    wish = replace(wish, like=tightest, memory=ROOM, steps=steps)
    yield _changes(runner, wish, needed[tightest], tried[tightest].total, tell)
    host = ASSUMED_HOST
    if wish.host != 1:
        host = GIVEN_HOST.format(times=wish.host)
    yield NOTES.format(host=host)


def _each(runner: Runner, wishes: list[Wish], told: str, tell: Tell) -> dict[str, Outcome]:
    """Make all attempts, and return the outcomes by GPU model.

    After each attempt, `tell` gets a line with the model, the text `told` and the outcome. Raise
    ScriptFailedError if the script failed.
    """
    outcomes = {}
    for wish, outcome in runner.run_all(wishes):
        if outcome.failed:
            failed = f"on the {wish.like} the script failed after {outcome.steps} steps"
            raise ScriptFailedError(f"{failed}: {outcome.failed}")
        tell(f"{wish.like}{told}: {_in_short(outcome)}")
        outcomes[wish.like] = outcome
    return outcomes


def _in_short(outcome: Outcome) -> str:
    """Describe an outcome on one line."""
    if outcome.failed:
        return "the script failed"
    if not outcome.fits:
        return "memory runs out"
    text = f"needs {byte_text(outcome.used)}"
    grows = growth_of(outcome.peaks, outcome.left)
    if grows is not None:
        text += f" after {outcome.steps} steps, {byte_text(grows.bytes)} more per step"
    if outcome.step is not None:
        text += f", a step takes {time_text(outcome.step)}"
    if outcome.asked:
        text += f" until {outcome.asked} needs a value"
    return text


def _table(tried: dict[str, Outcome], needed: dict[str, Outcome], wish: Wish) -> Table:
    """Return the table of GPUs, with a row for each model.

    `tried` are the outcomes with each GPU's own memory, and `needed` those with enough memory.
    `wish` has the options of the command.
    """
    header = ("GPU", "memory", "needs", "fits", "a step takes", "the GPU waits for the host")
    rows = []
    for name, most in needed.items():
        step = _step_text(name, most, wish.host)
        if most.step is not None and not tried[name].fits:
            step += ", if it had the memory"
        idle = ""
        if most.idle is not None:
            idle = f"{most.idle:.0%} of it"
            if most.idle > 1 - profiles.BUSY:
                idle += ", its speed assumed" if wish.host == 1 else ", its speed given"
        memory, fits = byte_text(tried[name].total), _fits_text(most, tried[name])
        rows.append((name, memory, _need(most), fits, step, idle))
    ran = _how_it_ran(list(needed.values()), wish.gpus)
    return Table(header, tuple(rows), f"{wish.script}: {ran}")


def _how_it_ran(outcomes: list[Outcome], gpus: int) -> str:
    """Return a text that says how many steps ran, what is not counted, and what is made up.

    `outcomes` has an outcome for each GPU model, and `gpus` is the number of GPUs.
    """
    steps = min(outcome.steps for outcome in outcomes)
    ran = NO_STEPS
    if steps:
        plural = "s" if steps > 1 else ""
        ran = f"{steps} step{plural} on virtual GPUs, without values"
    said = [ran + "."]
    if any(outcome.by_hand for outcome in outcomes):
        said[0] += f" {BY_HAND}."
    if gpus > 1:
        said.append(f'It has {gpus} GPUs of each model. "needs" and "fits" are about the fullest.')
    processes = max(outcome.processes for outcome in outcomes)
    if processes:
        some = "a process" if processes == 1 else f"{processes} processes"
        said.append(f"It starts {some}. Memory is that of all its processes on a GPU.")
    if any(outcome.tries_algorithms for outcome in outcomes):
        said.append(f"{TRIES}.")
    asked = next((outcome.asked for outcome in outcomes if outcome.asked), "")
    if asked:
        said.append(
            f"Then {asked} needs a value that nothing computes. What follows is not counted."
        )
    lines = list(dict.fromkeys(line for outcome in outcomes for line in outcome.made_up))
    if lines:
        said.append(MADE_UP)
        said += [f"   {_shortened(line)}" for line in lines[:SHOWN]]
        if len(lines) > SHOWN:
            said.append(f"   and {len(lines) - SHOWN} more")
    return "\n".join(said)


def _on_loading(outcome: Outcome) -> str:
    """Return a sentence on how long a batch takes to load, or "" without a DataLoader."""
    if not outcome.loading:
        return ""
    count = len(outcome.loading)
    batches = "one batch" if count == 1 else f"median of {count} batches"
    typical = time_text(median(outcome.loading))
    said = f"Loading a batch took {typical} on this computer, measured ({batches}). "
    said += '"a step takes" leaves it out.'
    if outcome.workers:
        said += f"\n{loaded_ahead(outcome.workers)}"
    return said


def _on_steps(name: str, outcome: Outcome) -> str:
    """Return a sentence on how the peak changes from step to step, or "" if it stays the same.

    `name` is the GPU's model.
    """
    said = []
    later = outcome.peaks[1:]
    measured = f"steps 2 to {len(outcome.peaks)} on the {name}"
    grows = growth_of(outcome.peaks, outcome.left)
    if varies(outcome.peaks):
        lowest, highest = byte_text(min(later)), byte_text(max(later))
        said.append(
            f"The peak varies from step to step: {lowest} to {highest} in {measured}.\n"
            '"needs" is the highest of them. A step with a larger batch needs more.'
        )
    if grows is not None:
        how = f"Memory grows by {byte_text(grows.bytes)} per step ({measured})."
        if grows.ratio != 1:
            how = (
                f"Memory grows faster and faster: by {byte_text(grows.bytes)} in the last step, "
                f"{grows.ratio:.1f} times as much as in the step before ({measured})."
            )
        said.append(
            f'{how}\n{outcome.grows}.\n"fits" says when a GPU is full if the growth goes on.'
        )
    return "\n".join(said)


def _need(outcome: Outcome) -> str:
    """Write the memory that a script needs.

    The text begins with "at least" if the script ended early, or if its memory grows.
    """
    text = byte_text(outcome.used)
    if _broken_off(outcome) or growth_of(outcome.peaks, outcome.left) is not None:
        return f"at least {text}"
    return text


def _fits_text(outcome: Outcome, tried: Outcome) -> str:
    """Return a text that says whether a script fits on a GPU.

    `outcome` is the one with enough memory, and `tried` the one with the GPU's own memory.
    """
    if not tried.fits and growth_of(outcome.peaks, outcome.left) is not None:
        return f"{NOT}, full in step {tried.steps + 1}"
    return _fits(outcome, tried.fits, tried.total)


def _fits(outcome: Outcome, fits: bool, total: int) -> str:
    """Return a text that says whether a script fits on a GPU with `total` bytes.

    `fits` says whether the steps that ran did fit. If memory grows, the text says for how many
    steps the script fits.
    """
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
    """Return a number with two significant digits."""
    return round(number, min(0, 2 - len(str(number))))


def _broken_off(outcome: Outcome) -> bool:
    """Return whether the script ended so early that its peak may come later.

    A backward pass and the optimizer's state are in memory together only from the second step on.
    """
    return bool(outcome.asked) and outcome.steps <= 1


def _step_text(name: str, outcome: Outcome, host: float) -> str:
    """Write the time of a step with its error, for the GPU model `name`.

    `host` is the given speed of the host, 1 if none is given.
    """
    if outcome.step is not None:
        idle = 1.0 if outcome.idle is None else outcome.idle
        error = profiles.load(name).time_error(idle, host_is_given=host != 1)
        if error is None:
            return f"{time_text(outcome.step)}, never compared"
        return f"{time_text(outcome.step)} ± {error:.0%}"
    if outcome.first is not None:
        return f"the first at most {time_text(outcome.first)}"
    return "unknown"


def _parts(name: str, outcome: Outcome) -> Table:
    """Return a table of what the peak consists of on the GPU model `name`."""
    context = outcome.used - outcome.reserved - outcome.others
    parts = outcome.parts | {CONTEXT: context, OTHERS: outcome.others}
    rows = []
    for part, nbytes in sorted(parts.items(), key=lambda part: -part[1]):
        if nbytes:
            rows.append((byte_text(nbytes), PARTS.get(part, part)))
    caption = f"At the peak on the {name}"
    if len(outcome.by_device) > 1:
        caption += f", on cuda:{outcome.device}"
    if outcome.line:
        caption += f", made by {_shortened(outcome.line)}"
    needs, in_tensors = byte_text(outcome.used), byte_text(outcome.allocated)
    caption += f": {needs}, of them in tensors and workspaces {in_tensors}"
    return Table(("bytes", "for"), tuple(rows), caption)


def _changes(runner: Runner, wish: Wish, before: Outcome, total: int, tell: Tell) -> Table:
    """Try each change alone, and return a table of the results.

    Changes that fit come first, the fastest of them at the top. Those that take more GPUs follow.
    `before` is the outcome without a change, and `total` the memory of the GPU.
    """
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
        slower, told = 0.0, ""
        if after.step is not None and before.step is not None:
            slower = after.step / before.step / share
            told = f"{slower:.2f} times as long"
        row = (name, _need(after), told, _fits(after, fits, total))
        rows.append((not fits, name in SHARDINGS, slower, row))
    ordered = tuple(row for *_, row in sorted(rows, key=lambda row: row[:3]))
    where = f"each tried alone on the {wish.like}, where it is tightest ({byte_text(total)})"
    return Table(
        ("change", "needs", "as many samples take", "fits"),
        ordered,
        f"Changes, {where}; the fastest of those that fit first",
    )


def _tried(
    runner: Runner, wish: Wish, changes: list[str], total: int
) -> Iterator[tuple[str, Outcome]]:
    """Yield (change, outcome) for each of the changes, and then for sharding.

    Sharding is tried over the fewest GPUs on which the script fits into `total` bytes each, or else
    over the largest number of GPUs.
    """
    for tried, after in runner.run_all([replace(wish, change=change) for change in changes]):
        yield str(tried.change), after
    for change in SHARDINGS:
        [(_, after)] = runner.run_all([replace(wish, change=change)])
        if after.failed or not after.changed or after.used <= total:
            break
    yield change, after


def _shortened(line: str) -> str:
    """Cut a long line of code, so that it fits into a cell of the table."""
    if len(line) <= LONGEST:
        return line
    return f"{line[: LONGEST - 2]} …"
