"""The puzzles of `notebooks/puzzles.ipynb`, in the notebook's order.

Rewrite wasteful functions until they meet a budget; the score is the same on every computer.
"""

from gpulessons.puzzles import memory, several_gpus, time

PUZZLES = [
    memory.FREE_FIRST,
    memory.NO_TEMPORARY,
    time.ONE_LAUNCH,
    time.HIDDEN_WAIT,
    memory.MANY_CLASSES,
    time.ONE_BACKWARD,
    memory.GROWING_CACHE,
    memory.NO_SPIKE,
    several_gpus.NO_GATHERED_OUTPUTS,
    several_gpus.COPIES_AT_ONCE,
    several_gpus.EVEN_LOAD,
    several_gpus.FEWER_BYTES,
    several_gpus.ONE_BUBBLE,
    several_gpus.SMALL_BUCKETS,
]
