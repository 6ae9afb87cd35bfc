"""Measure how many pairs of malloc and free the virtual GPU's allocator serves per second.

usage: python benchmarks/allocator.py [--need PAIRS_PER_SECOND]

The load is the memory of a training loop. Parameters, gradients and optimizer state stay.
Activations are allocated in the forward pass and freed in the backward pass, and every operator
allocates and frees a temporary. With --need, the exit status is 1 below that rate.
"""

import argparse
import sys
from time import perf_counter

from virtualgpu.allocator import CachingAllocator, Settings

MiB = 1 << 20
LAYERS = 96
STEPS = 40
ROUNDS = 5  # the fastest run counts, because the others were disturbed
SETTINGS = ("", "expandable_segments:True", "max_split_size_mb:64", "roundup_power2_divisions:4")


def layer_sizes(layer: int) -> tuple[int, int, int]:
    """Return the bytes of a layer's weight, activation and temporary.

    Neighbouring layers differ.
    """
    width = 256 * (1 + layer % 7)
    return 4 * width * width, 4 * 512 * width + 12 * layer, 4096 + 1000 * layer


def train(memory: CachingAllocator, steps: int) -> int:
    """Run `steps` steps, and return the number of blocks that were freed."""
    # with momentum
    weights = [memory.malloc(layer_sizes(layer)[0]) for layer in range(LAYERS) for _ in range(2)]
    pairs = 0
    for _ in range(steps):
        activations, gradients = [], []
        for layer in range(LAYERS):
            _, activation, temporary = layer_sizes(layer)
            activations.append(memory.malloc(activation))
            memory.free(memory.malloc(temporary))
        for layer in reversed(range(LAYERS)):
            weight, activation, temporary = layer_sizes(layer)
            incoming = memory.malloc(activation)
            gradients.append(memory.malloc(weight))
            memory.free(memory.malloc(temporary))
            memory.free(activations.pop())
            memory.free(incoming)
        for gradient in gradients:
            memory.free(gradient)
        pairs += 5 * LAYERS
    for weight in weights:
        memory.free(weight)
    return pairs


def pairs_per_second(conf: str) -> float:
    best = 0.0
    for _ in range(ROUNDS):
        memory = CachingAllocator(0, 16 << 30, settings=Settings.parse(conf))
        started = perf_counter()
        pairs = train(memory, STEPS)
        best = max(best, pairs / (perf_counter() - started))
    return best


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--need", type=float, default=0.0, help="fail below this many pairs per second"
    )
    need = parser.parse_args().need
    slowest = float("inf")
    for conf in SETTINGS:
        rate = pairs_per_second(conf)
        slowest = min(slowest, rate)
        print(f"{conf or 'default settings':32s} {rate:9,.0f} pairs/s  {1e6 / rate:5.2f} µs a pair")
    return int(slowest < need)


if __name__ == "__main__":
    sys.exit(main())
