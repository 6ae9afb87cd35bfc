"""The order in which the stages of a pipeline take up their work, GPipe and 1F1B: by rule, and in torch.distributed.pipelining."""

from collections.abc import Iterator, Sequence

from labkit.lab_parts import programs
from labkit.lab_parts.experiment import Row, Run, checked_count

FORWARD, BACKWARD = "forward", "backward"
ONE_BATCH, GPIPE, ONE_F_ONE_B = "one batch", "GPipe", "1F1B"
SCHEDULES = (ONE_BATCH, GPIPE, ONE_F_ONE_B)
Action = tuple[str, int]  # forward or backward, and of which micro-batch, counted from 0


def order(schedule: str, stage: int, stages: int, micro_batches: int) -> list[Action]:
    """What a stage does, one after the other.

    GPipe (Huang et al., 2019): all forwards, then all backwards. 1F1B (Narayanan et al., 2019: PipeDream; the variant that waits for
    the last backward is Megatron-LM's): as many forwards as there are stages behind this one, then in turn one forward and one
    backward. "one batch" is GPipe without a split: there is one micro-batch, whatever was asked for.
    """
    if schedule not in SCHEDULES:
        raise ValueError(f"schedule={schedule!r}: choose one of {', '.join(map(repr, SCHEDULES))}")
    every = range(1 if schedule == ONE_BATCH else micro_batches)
    ahead = min(stages - 1 - stage, len(every)) if schedule == ONE_F_ONE_B else len(every)
    actions: list[Action] = [(FORWARD, index) for index in every[:ahead]]
    for index in every[ahead:]:
        actions += [(FORWARD, index), (BACKWARD, index - ahead)]
    return actions + [(BACKWARD, index) for index in every[len(every) - ahead :]]


def bubble(stages: int, micro_batches: int) -> float:
    """The share of the time that each stage waits, if all take equally long and copies take no time: (p - 1) / (m + p - 1)."""
    return (stages - 1) / (micro_batches + stages - 1)


def launches(orders: Sequence[Sequence[Action]]) -> list[tuple[int, str, int]]:
    """All actions of all stages as (stage, work, micro-batch), in an order in which each stands behind those it needs.

    In each round every stage takes one, if what that needs was there before the round. Raises ValueError if they wait for each other.
    """
    waiting = [list(actions) for actions in orders]
    last = len(waiting) - 1
    done: set[tuple[int, str, int]] = set()
    launched: list[tuple[int, str, int]] = []
    while any(waiting):
        ready = [(stage, *actions[0]) for stage, actions in enumerate(waiting) if actions and _needs(stage, *actions[0], last) <= done]
        if not ready:
            stuck = ", ".join(f"{stage} before {actions[0][0]} {actions[0][1]}" for stage, actions in enumerate(waiting) if actions)
            raise ValueError(f"the stages wait for each other: {stuck}")
        for action in ready:
            waiting[action[0]].pop(0)
        done |= set(ready)
        launched += ready
    return launched


def _needs(stage: int, work: str, micro_batch: int, last: int) -> set[tuple[int, str, int]]:
    if work == FORWARD:
        return {(stage - 1, FORWARD, micro_batch)} if stage else set()
    behind = set() if stage == last else {(stage + 1, BACKWARD, micro_batch)}
    return behind | {(stage, FORWARD, micro_batch)}


# torch.distributed.pipelining


TORCH_SCHEDULES = ("GPipe", "1F1B")
WIDTH, ROWS = 16, 32
COLUMNS = {"schedule": "", "rank": "", "order": "", "loss": "", "gradients": ""}


def pipelining(ranks: int = 2, micro_batches: int = 4) -> Run:
    """What each rank did in one step of a pipeline of `ranks` stages, under each of the `TORCH_SCHEDULES` of torch.distributed.pipelining.

    The model has two linear layers of 16 neurons a stage, with the weights that `torch.manual_seed(0)` gives; the batch of 32 rows rises
    evenly from -1 to 1, and the targets are its sines. `order` is such as "FFBB": F for the forward of a micro-batch, B for a backward.
    `loss` is that of the last stage (None elsewhere), `gradients` the norm of each parameter's.

    Raises ValueError for ranks outside 2 to 8, and for micro-batches that are fewer or do not divide the batch; and as `labkit.torchrun`
    does.
    """
    if not 2 <= checked_count("ranks", ranks) <= 8:
        raise ValueError(f"ranks={ranks}: choose 2 to 8")
    allowed = [count for count in (2, 4, 8, 16, 32) if count >= ranks]
    if checked_count("micro_batches", micro_batches) not in allowed:
        raise ValueError(f"micro_batches={micro_batches}: choose {', '.join(map(str, allowed))}")
    parameters = {"schedules": list(TORCH_SCHEDULES), "ranks": ranks, "micro_batches": micro_batches}
    total = len(TORCH_SCHEDULES) * ranks
    return Run("pipelining", parameters, COLUMNS, programs.badge(ranks), total, _points(ranks, micro_batches))


def _points(ranks: int, micro_batches: int) -> Iterator[Row]:
    told = programs.results("stages", ranks, micro_batches, WIDTH, ROWS)
    for schedule in TORCH_SCHEDULES:
        for rows in told:
            found = next(row for row in rows if row["schedule"] == schedule)
            yield {column: found[column] for column in COLUMNS}
