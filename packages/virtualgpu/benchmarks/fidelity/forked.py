"""Jobs, each in a forked process of its own: as fresh as a new interpreter where the GPU was not touched before, and sooner there."""

import multiprocessing
import os
import time
from multiprocessing.connection import Connection, wait
from typing import Any, Callable, Iterable, Iterator

_fork = multiprocessing.get_context("fork")


def _answer(function: Callable[[Any], Any], job: Any, gpu: int | None, end: Connection) -> None:
    if gpu is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = str(gpu)
    try:
        end.send(function(job))
    except BaseException as error:  # noqa: BLE001 (the parent is told of anything that went wrong)
        end.send({"error": f"{type(error).__name__}: {error}"[-1500:]})


def forked(function: Callable[[Any], Any], jobs: Iterable[Any], at_once: int, gpus: int = 0, seconds: float = 120) -> Iterator[Any]:
    """The results of function(job), in the order of the jobs; {"error": why} where there is none. With `gpus` each sees one, in turn."""
    waiting = list(enumerate(jobs))[::-1]
    count, results, running, following = len(waiting), {}, {}, 0
    try:
        while following < count:
            while waiting and len(running) < at_once:
                number, job = waiting.pop()
                mine, other = _fork.Pipe(duplex=False)
                process = _fork.Process(target=_answer, args=(function, job, number % gpus if gpus else None, other))
                process.start()
                other.close()
                running[mine] = number, process, time.monotonic() + seconds
            ready = wait(list(running), timeout=1)
            late = [end for end, (_, _, deadline) in running.items() if end not in ready and time.monotonic() > deadline]
            for end in [*ready, *late]:
                number, process, _ = running.pop(end)
                try:
                    results[number] = {"error": f"no answer in {seconds} s"} if end in late else end.recv()
                except EOFError:
                    results[number] = {"error": "the process ended early"}
                end.close()
                process.kill()
                process.join()
            while following in results:
                yield results.pop(following)
                following += 1
    finally:
        for _, process, _ in running.values():
            process.kill()
            process.join()
