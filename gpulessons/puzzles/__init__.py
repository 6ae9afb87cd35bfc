"""The puzzles of `notebooks/puzzles.ipynb`, in the notebook's order.

Rewrite wasteful functions until they meet a budget; the score is the same on every computer.
"""

from gpulessons.puzzles import memory, streams, time

PUZZLES = [
    memory.FREE_FIRST,
    time.ONE_LAUNCH,
    memory.GROWING_CACHE,
    memory.NO_SPIKE,
    time.HIDDEN_WAIT,
    time.ONE_BACKWARD,
    memory.NO_TEMPORARY,
    memory.MANY_CLASSES,
    streams.HIDDEN_COPIES,
    memory.ONE_CHECKPOINT,
    streams.EXACT_WAITS,
    streams.ONE_GRAPH,
    streams.TWO_STREAMS,
    streams.NEXT_LAYER,
]
