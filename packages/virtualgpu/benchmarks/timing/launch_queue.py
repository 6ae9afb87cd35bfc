"""Measure how many unfinished launches a real GPU takes before another one holds the host.

usage: launch_queue.py OUT.json

Each case queues work behind a kernel that sleeps for 0.7 s, until a call takes more than 20 ms.
`virtualgpu.clock.machine_clock.QUEUE_LENGTH` follows from the result: the sleep and the calls
before the one that waited fill the queue.
"""

import itertools
import json
import sys
import threading
import time

import torch

SLEEP = 1_500_000_000  # cycles
SHORT_SLEEP = 4_000_000
MOST = 6000
BLOCKED = 0.02  # seconds


class Work:
    """Work that the cases queue.

    Every kernel has run once before, because its first launch waits for the GPU.
    """

    def __init__(self):
        self.x = torch.zeros(1024, device="cuda")
        self.large = torch.zeros(1 << 18, device="cuda")
        self.other = torch.zeros(1 << 18, device="cuda")
        self.pinned = torch.zeros(1024).pin_memory()
        self.large_pinned = torch.zeros(1 << 18).pin_memory()
        self.pageable = torch.zeros(1024)
        self.many = [torch.zeros(64, device="cuda") for _ in range(200)]
        self.events = [torch.cuda.Event() for _ in range(MOST)]
        self.timed = [torch.cuda.Event(enable_timing=True) for _ in range(MOST)]
        self.streams = [torch.cuda.Stream() for _ in range(3)]
        self.happened = torch.cuda.Event()
        self.happened.record()
        for name, call in self.calls().items():
            if not name.startswith("graph"):
                call(0)
        torch.cuda.synchronize()
        self.graphs = {length: self.graph(length) for length in (1, 3)}
        for graph in self.graphs.values():
            graph.replay()
        torch.cuda.synchronize()

    def graph(self, length):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(length):
                self.x.add_(1)
        return graph

    def kernel(self, number=0):
        self.x.add_(1)

    def on_stream(self, stream):
        with torch.cuda.stream(self.streams[stream]):
            self.kernel()

    def kernel_and_event(self, number):
        self.kernel()
        self.events[number].record()

    def kernel_and_wait(self, number):
        self.kernel()
        torch.cuda.current_stream().wait_event(self.happened)

    def calls(self):
        """Return the cases, which are functions of the number of the call, from 0."""
        copy = torch.Tensor.copy_
        return {
            "kernel": self.kernel,
            "kernels of 200 tensors": lambda n: torch._foreach_add_(self.many, 1.0),
            "copy to the GPU, pinned, 4 KiB": lambda n: copy(self.x, self.pinned, True),
            "copy to the GPU, pinned, 1 MiB": lambda n: copy(self.large, self.large_pinned, True),
            "copy to the host, pinned, 4 KiB": lambda n: copy(self.pinned, self.x, True),
            "copy to the GPU, pageable, 4 KiB": lambda n: copy(self.x, self.pageable, True),
            "copy on the GPU, 1 MiB": lambda n: copy(self.large, self.other),
            "memset": lambda n: self.x.zero_(),
            "event": lambda n: self.events[n].record(),
            "timed event": lambda n: self.timed[n].record(),
            "wait": lambda n: torch.cuda.current_stream().wait_event(self.happened),
            "kernel and event": self.kernel_and_event,
            "kernel and wait": self.kernel_and_wait,
            "graph of 1 kernel": lambda n: self.graphs[1].replay(),
            "graph of 3 kernels": lambda n: self.graphs[3].replay(),
            "kernel, on two streams in turn": lambda n: self.on_stream(n % 2),
            "kernel, on three streams in turn": lambda n: self.on_stream(n % 3),
        }

    def calls_before_the_first_wait(self, call):
        """Return the number of calls before one made the host wait, or None if none did."""
        torch.cuda.synchronize()
        torch.cuda._sleep(SLEEP)
        slept = torch.cuda.Event()
        slept.record()
        for stream in self.streams:
            stream.wait_event(slept)
        before = time.perf_counter()
        for number in range(MOST):
            call(number)
            now = time.perf_counter()
            if now - before > BLOCKED:
                torch.cuda.synchronize()
                return number
            before = now
        torch.cuda.synchronize()
        return None

    def beside_a_blocked_thread(self):
        """Return the seconds of another stream's launch and of cudaMalloc while a thread waits."""

        def fill():
            for _ in range(3000):
                self.on_stream(0)

        with torch.cuda.stream(self.streams[0]):
            torch.cuda._sleep(SLEEP)
        thread = threading.Thread(target=fill)
        thread.start()
        time.sleep(0.1)
        times = [time.perf_counter()]
        self.on_stream(1)
        times.append(time.perf_counter())
        torch.empty(1 << 24, device="cuda")
        times.append(time.perf_counter())
        thread.join()
        torch.cuda.synchronize()
        return [round(b - a, 4) for a, b in itertools.pairwise(times)]


def returns_of_short_sleeps(count=1100):
    """Return the milliseconds of one sleep, and when the host went on after each of many."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    torch.cuda._sleep(SHORT_SLEEP)
    end.record()
    torch.cuda.synchronize()
    began = time.perf_counter()
    returns = []
    for _ in range(count):
        torch.cuda._sleep(SHORT_SLEEP)
        returns.append(round((time.perf_counter() - began) * 1e3, 3))
    torch.cuda.synchronize()
    return start.elapsed_time(end), returns


def first_launch_of_a_kernel():
    """Return the host's seconds for a kernel's first and second launch behind a sleep."""
    x, seconds = torch.rand(1024, device="cuda"), []
    for _ in range(2):
        torch.cuda.synchronize()
        torch.cuda._sleep(SLEEP)
        began = time.perf_counter()
        torch.erfinv(x)
        seconds.append(round(time.perf_counter() - began, 4))
    return seconds


def main():
    work = Work()
    before_wait = {}
    for name, call in work.calls().items():
        before_wait[name] = work.calls_before_the_first_wait(call)
        print(f"{name}: {before_wait[name]}", flush=True)
    sleep, returns = returns_of_short_sleeps()
    result = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "date": time.strftime("%Y-%m-%d"),
        "calls before the first wait, behind a sleep": before_wait,
        "seconds beside a blocked thread: launch, cudaMalloc": work.beside_a_blocked_thread(),
        "milliseconds of a short sleep": sleep,
        "milliseconds at which the host went on after short sleeps 1010 to 1050": returns[
            1010:1050
        ],
        "seconds of a kernel's first and second launch behind a sleep": first_launch_of_a_kernel(),
    }
    with open(sys.argv[1], "w") as file:
        json.dump(result, file, indent=1)
    print(json.dumps({key: value for key, value in result.items() if "host went on" not in key}))


if __name__ == "__main__":
    main()
