"""The puzzles of `notebooks/puzzles.ipynb`, in the notebook's order.

Rewrite wasteful functions until they meet a budget; the score is the same on every computer.
"""

from gpulessons.puzzles import memory, several_gpus, streams, time

PUZZLES = [
    # Memory
    memory.FREE_FIRST,
    memory.GROWING_CACHE,
    memory.NO_SPIKE,
    memory.NO_TEMPORARY,
    memory.MANY_CLASSES,
    memory.ONE_CHECKPOINT,
    # The host's launches and waits
    time.ONE_LAUNCH,
    time.HIDDEN_WAIT,
    time.ONE_BACKWARD,
    streams.ONE_GRAPH,
    # Streams
    streams.HIDDEN_COPIES,
    streams.EXACT_WAITS,
    streams.TWO_STREAMS,
    streams.NEXT_LAYER,
    # Several GPUs
    several_gpus.NO_GATHERED_OUTPUTS,
    several_gpus.COPIES_AT_ONCE,
    several_gpus.EVEN_LOAD,
    several_gpus.FEWER_BYTES,
    several_gpus.ONE_BUBBLE,
    several_gpus.SMALL_BUCKETS,
]
