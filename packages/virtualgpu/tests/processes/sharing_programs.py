"""Plain programs whose processes share a GPU, without labkit.

Each prints its observations as JSON, which are the same on CUDA. `python sharing_programs.py
NAME...` runs some of them. Two processes talk through a pipe, so nothing depends on which one is
faster.
"""

import json
import re
import subprocess
import sys
from multiprocessing.reduction import ForkingPickler

import torch
import torch.multiprocessing as mp

MIB = 1 << 20
LONG = 400_000_000  # cycles, which take about 0.2 s
HERE = "cuda:0"


def allocated() -> float:
    return torch.cuda.memory_allocated() / MIB


def message(run, *arguments, **keywords) -> str:
    """Call `run` with these arguments, and return the class and the first line of its error."""
    try:
        run(*arguments, **keywords)
    except Exception as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0]}"
    return "nothing was raised"


class Child:
    """A process that runs a function of this file and has the other end of a pipe."""

    def __init__(self, context, function, *arguments) -> None:
        self.end, other = context.Pipe()
        self.process = context.Process(target=function, args=(other, *arguments))
        self.process.start()
        other.close()

    def ask(self, what=None):
        self.end.send(what)
        return self.end.recv()

    def finish(self):
        self.process.join(200)
        self.end.close()
        return self.process.exitcode


# Operations that a consumer may perform


def consume(end) -> None:
    whole, half, weight, none, crosswise = end.recv()
    before = allocated(), torch.cuda.memory_reserved()
    half.add_(1)
    torch.cuda.synchronize()
    end.send({
        "values": whole.tolist(),
        "allocated, reserved": before,
        "allocated after a write": allocated(),
        "one storage": whole.untyped_storage().data_ptr() == half.untyped_storage().data_ptr() != 0,
        "offset": half.storage_offset(),
        "device": str(whole.device),
        "a parameter": [
            isinstance(weight, torch.nn.Parameter), weight.requires_grad, weight.is_leaf,
            weight.grad is None,
        ],
        "empty": [list(none.shape), str(none.device)],
        "strides": crosswise.stride(),
        "shared": whole.is_shared(),
    })  # fmt: skip
    again = end.recv()
    end.send(
        [
            again.data_ptr() == whole.data_ptr(),
            message(end.send, whole),
            message(whole.detach().resize_, 1000),
        ]
    )
    end.recv()
    end.send(whole.clone())  # a copy belongs to the child
    end.recv()


def one_memory(context) -> dict:
    child = Child(context, consume)
    whole = torch.arange(6.0, device=HERE)
    weight = torch.nn.Parameter(torch.ones(2, 3, device=HERE))
    weight.sum().backward()
    seen = child.ask(
        (whole, whole.view(2, 3)[1], weight, torch.empty(0, 3, device=HERE), weight.detach().t())
    )
    facts = {"child": seen, "parent": whole.tolist()}
    facts["child again"] = child.ask(whole)
    copy = child.ask()
    facts["sent back"] = [copy.tolist(), copy.data_ptr() != whole.data_ptr()]
    del copy
    child.end.send(None)
    facts["exit"] = child.finish()
    facts["non-leaf"] = message(ForkingPickler.dumps, weight * 2)
    facts["storage"] = message(ForkingPickler.dumps, whole.untyped_storage())
    return facts


# Lifetime of memory


def hold(end) -> None:
    tensor = end.recv()
    end.send(tensor.sum().item())
    end.recv()
    del tensor
    end.send("gone")
    end.recv()


def lifetime(context) -> dict:
    """Delete a sent tensor, which stays until the child has dropped it and the parent checks.

    The parent checks in ipc_collect, and if it finds no free block.
    """
    facts = {}
    child = Child(context, hold)
    tensor = torch.ones(MIB, device=HERE)
    child.ask(tensor)
    del tensor
    facts["deleted, used"] = allocated()
    torch.cuda.ipc_collect()
    facts["collected, used"] = allocated()
    child.ask()
    facts["let go"] = allocated()
    torch.cuda.ipc_collect()
    facts["let go, collected"] = allocated()
    child.end.send(None)
    child.finish()
    child = Child(context, hold)
    tensor = torch.ones(8 * MIB, device=HERE)
    child.ask(tensor)
    del tensor
    child.ask()
    reserved = torch.cuda.memory_reserved()
    tensor = torch.ones(8 * MIB, device=HERE)
    facts["a block found again"] = [
        tensor.nbytes / MIB,
        allocated(),
        torch.cuda.memory_reserved() == reserved,
    ]
    child.end.send(None)
    child.finish()
    return facts


def give(end) -> None:
    end.send(torch.full((MIB,), 2.0, device=HERE))
    end.recv()
    end.send([allocated(), torch.cuda.ipc_collect(), allocated()])
    end.recv()


def from_a_child(context) -> dict:
    child = Child(context, give)
    tensor = child.end.recv()
    facts = {"mean": tensor.mean().item(), "parent": allocated()}
    facts["child, used"] = child.ask()[0]
    del tensor
    child.end.send(None)
    facts["exit"] = child.finish()
    return facts


def by_file_name(context) -> dict:
    """Share CPU memory in torch.multiprocessing's other way, which changes nothing on CUDA."""
    before = mp.get_sharing_strategy()
    mp.set_sharing_strategy("file_system")
    child = Child(context, hold)
    tensor = torch.ones(4, device=HERE)
    facts = {"sum": child.ask(tensor)}
    del tensor
    torch.cuda.ipc_collect()
    facts["used"] = torch.cuda.memory_allocated()
    child.ask()
    torch.cuda.ipc_collect()
    facts["let go"] = torch.cuda.memory_allocated()
    child.end.send(None)
    facts["exit"] = child.finish()
    mp.set_sharing_strategy(before)
    return facts


# Queues, pools, arguments


def square_in_place(tensor):
    tensor.mul_(tensor)
    torch.cuda.synchronize()
    return tensor.device.index


def make(number):
    return torch.full((2,), float(number), device=HERE)


def train(model, queue, done) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    model(torch.ones(1, 2, device=HERE)).sum().backward()
    optimizer.step()
    torch.cuda.synchronize()
    queue.put([name for name, _ in model.named_parameters()])
    done.wait(200)


def ways_to_send(context) -> dict:
    facts = {}
    tensor = torch.tensor([2.0, 3.0], device=HERE)
    with context.Pool(1) as pool:
        facts["pool"] = [pool.map(square_in_place, [tensor, tensor]), tensor.tolist()]
        made = pool.map(make, [5, 6])
        facts["made in a pool"] = [x.tolist() for x in made]
        del made
    model = torch.nn.Linear(2, 1).to(HERE)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(1)
    queue, done = context.Queue(), context.Event()
    process = context.Process(target=train, args=(model, queue, done))
    process.start()
    facts["names"] = queue.get(timeout=200)
    facts["trained by the child"] = [parameter.tolist() for parameter in model.parameters()]
    facts["gradients here"] = [parameter.grad for parameter in model.parameters()]
    done.set()
    process.join(200)
    return facts


# Memory that all processes hold


def hog(end, nbytes, fraction) -> None:
    free, total = torch.cuda.mem_get_info()
    torch.cuda.set_per_process_memory_fraction(fraction)
    refused = message(torch.empty, total // 2, dtype=torch.uint8, device=HERE)
    held = torch.empty(nbytes, dtype=torch.uint8, device=HERE)
    end.send([refused.startswith("OutOfMemoryError"), "allowed" in refused, free])
    end.recv()
    del held


def one_device(context) -> dict:
    gib = 1 << 30
    torch.cuda.empty_cache()
    before, total = torch.cuda.mem_get_info()
    child = Child(context, hog, 2 * gib, 0.25)
    limited, limit_named, free_there = child.end.recv()
    after = torch.cuda.mem_get_info()[0]
    error = message(torch.empty, total - gib, dtype=torch.uint8, device=HERE)
    told = re.findall(r"(this process|Process (\d+)) has (\S+ \S+) memory in use", error)
    # a real GPU has other users
    told = [
        (who, number, size) for who, number, size in told if number in ("", str(child.process.pid))
    ]
    apps = subprocess.run(
        ["nvidia-smi", "--query-compute-apps=pid,used_gpu_memory", "--format=csv,noheader,nounits"],
        capture_output=True,
        text=True,
    )
    used = {
        int(pid): int(mebibytes)
        for pid, mebibytes in (line.split(",") for line in apps.stdout.splitlines())
    }
    facts = {
        "a limit for the child alone": [
            limited,
            limit_named,
            torch.cuda.get_per_process_memory_fraction(),
        ],
        "the child has a context": 0 < before - free_there < gib,
        "taken, whole GiB": (before - after) // gib,
        "in the error": sorted([who != "this process", size.split()[1]] for who, _, size in told),
        "the child in the error": [number for _, number, _ in told if number]
        == [str(child.process.pid)],
        "the child in nvidia-smi, whole GiB": used.get(child.process.pid, 0) >> 10,
    }
    child.process.kill()
    child.finish()
    facts["a killed child holds nothing"] = abs(torch.cuda.mem_get_info()[0] - before) < 64 * MIB
    return facts


# Forks, and processes that end first


def touch(end) -> None:
    end.send(message(lambda: torch.ones(2, device=HERE).sum().item()))
    end.recv()


def forks(context) -> dict:
    child = Child(context, touch)
    facts = {"before CUDA": child.ask()}
    child.end.send(None)
    child.finish()
    torch.ones(1, device=HERE)
    child = Child(context, touch)
    facts["after CUDA"] = child.ask()
    child.end.send(None)
    child.finish()
    return facts


def wait_and_record(end) -> None:
    event = end.recv()
    end.send(None)
    end.recv()
    found = [event.query()]
    event.synchronize()
    end.send([*found, event.query()])
    end.recv()
    torch.cuda._sleep(LONG)
    event.record()
    end.send(None)
    end.recv()  # CUDA requires that the event exists while somebody waits for it


def events(context) -> dict:
    event = torch.cuda.Event(interprocess=True)
    child = Child(context, wait_and_record)
    child.ask(event)
    torch.cuda._sleep(LONG)
    event.record()
    facts = {"in the child": child.ask(), "here": event.query()}
    child.ask()
    found = [event.query()]
    event.synchronize()
    facts["of the child"] = [*found, event.query()]
    child.end.send(None)
    return facts | {"exit": child.finish()}


def put_and_end(queue) -> None:
    queue.put(torch.ones(3, device=HERE))


def producer_ends_first(context) -> dict:
    """End the producer first. The child warns, because its tensor was never received."""
    queue = context.Queue()
    process = context.Process(target=put_and_end, args=(queue,))
    process.start()
    process.join(200)
    return {"exit": process.exitcode, "received": message(queue.get, True, 200)}


def held_at_the_end(context) -> dict:
    """Keep a tensor until the end. PyTorch warns, although the child has dropped it."""
    global held
    child = Child(context, hold)
    held = torch.ones(4, device=HERE)
    facts = {"sum": child.ask(held), "gone": child.ask()}
    child.end.send(None)
    child.finish()
    return facts


PROGRAMS = {
    "one memory": (one_memory, "forkserver"),
    "lifetime": (lifetime, "forkserver"),
    "from a child": (from_a_child, "forkserver"),
    "by file name": (by_file_name, "forkserver"),
    "ways to send": (ways_to_send, "forkserver"),
    "one device": (one_device, "forkserver"),
    "events": (events, "forkserver"),
    "forks": (forks, "fork"),
    "held at the end": (held_at_the_end, "fork"),  # the first process to use the GPU
    "producer ends first": (producer_ends_first, "spawn"),
}


def main(names: list[str]) -> None:
    mp.get_context("forkserver").set_forkserver_preload(["torch"])
    for name in names:
        program, method = PROGRAMS[name]
        print(json.dumps({name: program(mp.get_context(method))}))


if __name__ == "__main__":
    main(sys.argv[1:])
