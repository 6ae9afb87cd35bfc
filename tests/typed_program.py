"""A program that uses each public name. `make lint` checks its types as strictly as a user may ask.

Nobody runs it. A line with a wrong type has a comment that says so. The check complains about the
comment if it finds the line right.
"""

import torch

import labkit
from gpulessons.lesson_01 import labs


def gpus_in_use() -> int:
    labkit.use(None)
    labkit.use(gpus="two")  # type: ignore[call-overload]
    with labkit.use(gpus=2, like="H200", memory="16GiB", values=False, quiet=True) as machine:
        print(labkit.gpus(), machine.badge, machine.virtual)
        return machine.count if labkit.current() is machine else 0


def recorded(path: str) -> int:
    begun = labkit.host_time()
    with labkit.record(timeline=True) as trace:
        torch.ones(8, device="cuda").sum().item()
    print(
        f"{labkit.host_time() - begun:.3g} s",
        trace.badge,
        trace.peaks[trace.device],
        trace.busy(0) + trace.overlap(0),
    )
    trace.plot_memory().save("memory.png")
    trace.plot_timeline(memory=True).save("timeline.png")
    trace.save(path)
    again: labkit.Trace = labkit.Trace.load(path)
    print([leak.bytes for leak in trace.leaks()], again.peak_line)
    again.peek()  # type: ignore[attr-defined]
    return again.peak + len(labkit.races())


def in_other_processes() -> list[float]:
    try:
        run: labkit.Isolated = labkit.isolated(sum, [1, 2], timeout=10)
        ranks = labkit.torchrun("train.py", 3, ranks=2, devices="cpu")
    except labkit.IsolatedError as error:
        print(error, error.output)
    except labkit.TorchrunError as error:
        print(error.rank, error.outputs)
    else:
        print(run.value, ranks.results)
        return [float(len(output)) for output in ranks.outputs]
    return []


def exercises() -> bool:
    print(labkit.progress("01"), labkit.lessons().rows)
    print(labkit.puzzle("free first", gpus_in_use))
    return labkit.check("01.1", gpus_in_use).passed


def step_seconds(gpus: int, rows: int) -> float:
    return labkit.seconds(lambda: torch.ones(rows, device=f"cuda:{gpus - 1}"))


def experiments() -> None:
    run = labs.copy_speed()
    result = labkit.labs.collect(run)
    print(result.column("seconds", memory="pinned"), result.table(), result.recorded())
    labs.plot_copy_speed(result, prediction=2.0).save("copies.png")
    lab = labs.CopySpeedLab()
    print(lab.prediction, lab.result)
    times: labkit.Result = labkit.measure(step_seconds, {"gpus": [1, 2], "rows": 64}, values=False)
    times.where(gpus=[1, 2]).plot("gpus", "speed-up", prediction=(2, 1.5)).save("speed_up.png")
    times.save("times.json")
    own: labkit.Lab = labkit.Lab(
        step_seconds, {"gpus": [1, 2]}, question="How many?", predict="speed-up", within=1.5
    )
    print(own.prediction, own.result)
    labkit.fly()  # type: ignore[attr-defined]
