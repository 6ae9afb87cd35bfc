"""The environment variables that torchrun gives a rank, and scripts that expect them."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


def rank_variables(world: int, rank: int, per_node: int) -> dict[str, str]:
    """Return the environment variables that torchrun gives a rank, by name.

    There are `world` ranks in total, and `per_node` on each node.
    """
    variables: dict[str, Any] = {
        "RANK": rank,
        "LOCAL_RANK": rank % per_node,
        "WORLD_SIZE": world,
        "LOCAL_WORLD_SIZE": per_node,
        "GROUP_RANK": rank // per_node,
        "GROUP_WORLD_SIZE": world // per_node,
        "ROLE_RANK": rank,
        "ROLE_WORLD_SIZE": world,
        "TORCHELASTIC_RESTART_COUNT": 0,
        "TORCHELASTIC_MAX_RESTARTS": 0,
        "TORCHELASTIC_RUN_ID": "simulated",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": 29400,
    }
    return {name: str(value) for name, value in variables.items()}


def names_rank_variable(text: str) -> bool:
    """Return whether an error's text names a variable that torchrun gives each rank."""
    names = set(rank_variables(1, 0, 1))
    return not names.isdisjoint(re.findall(r"\w+", text))


@contextmanager
def advising_torchrun(advice: str) -> Iterator[None]:
    """Add `advice` to an error in the block that comes from a missing variable of torchrun."""
    try:
        yield
    except Exception as error:
        if names_rank_variable(str(error)):
            error.add_note(f"If the script expects torchrun, use {advice}.")
        raise
