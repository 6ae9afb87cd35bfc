"""The order of work in the stages of a pipeline, under GPipe and 1F1B."""

from collections.abc import Sequence

FORWARD, BACKWARD = "forward", "backward"
ONE_BATCH, GPIPE, ONE_F_ONE_B = "one batch", "GPipe", "1F1B"
SCHEDULES = (ONE_BATCH, GPIPE, ONE_F_ONE_B)
Action = tuple[str, int]  # forward or backward, and of which micro-batch, counted from 0


def order(schedule: str, stage: int, stages: int, micro_batches: int) -> list[Action]:
    """Return a stage's actions in order, under a schedule.

    GPipe (Huang et al., 2019) runs all forward passes, then all backward passes. 1F1B (Narayanan et
    al., 2019: PipeDream) runs as many forward passes as there are stages behind this one. Then it
    alternates. This is the variant of Megatron-LM, in which a step ends when all backward passes
    are done. "one batch" is GPipe with a single micro-batch.
    """
    if schedule not in SCHEDULES:
        raise ValueError(f"schedule={schedule!r}: choose one of {', '.join(map(repr, SCHEDULES))}")
    every = range(1 if schedule == ONE_BATCH else micro_batches)
    if schedule == ONE_F_ONE_B:
        ahead = min(stages - 1 - stage, len(every))
    else:
        ahead = len(every)
    actions: list[Action] = [(FORWARD, index) for index in every[:ahead]]
    for index in every[ahead:]:
        actions += [(FORWARD, index), (BACKWARD, index - ahead)]
    return actions + [(BACKWARD, index) for index in every[len(every) - ahead :]]


def bubble(stages: int, micro_batches: int) -> float:
    """Return the share of the time in which each of several equal stages waits, without copies."""
    return (stages - 1) / (micro_batches + stages - 1)


def launches(orders: Sequence[Sequence[Action]]) -> list[tuple[int, str, int]]:
    """Return all actions as (stage, work, micro-batch), in an order in which they can be launched.

    In each round, every stage does its next action if its inputs existed before the round. Raises
    ValueError if stages wait for each other.
    """
    waiting = [list(actions) for actions in orders]
    last = len(waiting) - 1
    done: set[tuple[int, str, int]] = set()
    launched: list[tuple[int, str, int]] = []
    while any(waiting):
        ready = [
            (stage, *actions[0])
            for stage, actions in enumerate(waiting)
            if actions and _needs(stage, *actions[0], last) <= done
        ]
        if not ready:
            stuck = ", ".join(
                f"{stage} before {actions[0][0]} {actions[0][1]}"
                for stage, actions in enumerate(waiting)
                if actions
            )
            raise ValueError(f"the stages wait for each other: {stuck}")
        for action in ready:
            waiting[action[0]].pop(0)
        done |= set(ready)
        launched += ready
    return launched


def _needs(stage: int, work: str, micro_batch: int, last: int) -> set[tuple[int, str, int]]:
    if work == FORWARD:
        if stage:
            return {(stage - 1, FORWARD, micro_batch)}
        return set()
    if stage == last:
        behind = set()
    else:
        behind = {(stage + 1, BACKWARD, micro_batch)}
    return behind | {(stage, FORWARD, micro_batch)}


def orders(schedule: str, stages: int, micro_batches: int) -> list[list[str]]:
    """Return the actions of each stage, such as ["F1", "B1"]. Micro-batches count from 1.

    Raises ValueError for a schedule that does not exist.
    """
    every = [order(schedule, stage, stages, micro_batches) for stage in range(stages)]
    return [[f"{work[0].upper()}{index + 1}" for work, index in actions] for actions in every]


def in_turn(lists: Sequence[Sequence[str]]) -> list[tuple[int, str, int]]:
    """Return the work of all stages in an order in which each action comes after its inputs.

    There is one list for each stage, such as ["F1", "B1"]. The result has the stage, "F" or "B",
    and the micro-batch, which counts from 0. Raises ValueError for another text, and if stages wait
    for each other.
    """
    names = {"F": FORWARD, "B": BACKWARD}
    actions = []
    for texts in lists:
        for text in texts:
            if text[:1] not in names or not text[1:].isdecimal() or text[1:] == "0":
                raise ValueError(f"{text!r} is no action. Write F1 or B1, for example.")
        actions.append([(names[text[0]], int(text[1:]) - 1) for text in texts])
    return [(stage, work[0].upper(), index) for stage, work, index in launches(actions)]
