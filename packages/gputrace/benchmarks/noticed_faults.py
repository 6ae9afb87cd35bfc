"""Say which tool notices which fault of a GPU program on a computer without a GPU.

usage: python noticed_faults.py          all faults with all tools, each pair in a new process
       python noticed_faults.py TOOL FAULT      one of them

Each fault is a small test that fails on two real T4s. A tool notices the fault if the test fails
with it, too. FakeGPU must be in a folder of PYTHONPATH.
"""

import subprocess
import sys
from collections.abc import Callable
from datetime import date
from unittest import mock

import torch


def model_and_input_on_two_devices() -> None:
    """Give a model on the GPU an input on the CPU."""
    torch.nn.Linear(8, 8).cuda()(torch.ones(4, 8))


def two_gpus_in_one_sum() -> None:
    """Add tensors of two GPUs."""
    torch.ones(8).cuda(0) + torch.ones(8).cuda(1)


def gpu_tensor_to_numpy() -> None:
    """Turn a GPU's tensor into an array without a copy to the CPU."""
    torch.ones(8).cuda().numpy()


def index_out_of_range() -> None:
    """Look up a row that an embedding does not have."""
    torch.nn.Embedding(10, 4).cuda()(torch.tensor([10]).cuda()).sum().item()


def more_memory_than_there_is() -> None:
    """Ask a GPU with 15 GiB for 20 GiB."""
    torch.ones(1).cuda().expand(5 << 30).clone()


def leak() -> None:
    """Keep the loss of every step, with its graph."""
    model, losses = torch.nn.Linear(256, 256).cuda(), []
    after = []
    for _ in range(3):
        losses.append(model(torch.ones(4096, 256).cuda()).square().mean())
        after.append(torch.cuda.memory_allocated())
    assert after[2] == after[1]


def peak_above_the_budget() -> None:
    """Allocate 40 MiB for a moment, where 10 MiB are allowed."""
    torch.cuda.reset_peak_memory_stats()
    rows = torch.ones(1024, 1).cuda()
    (rows - torch.ones(1, 10240).cuda()).abs().sum()
    assert torch.cuda.max_memory_allocated() < 10 << 20


def hidden_synchronization() -> None:
    """Read the loss in every step, where reading is forbidden."""
    torch.cuda.set_sync_debug_mode("error")
    torch.ones(8).cuda().sum().item()


def missing_wait_for_a_stream() -> None:
    """Read on one stream while another stream is still writing."""
    left, side = torch.ones(2048, 2048).cuda(), torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        product = left @ left
    copy = product.clone()
    torch.cuda.synchronize()
    assert copy[0, 0] == 2048


def no_fault() -> None:
    """Train correctly, which no tool may refuse."""
    model = torch.nn.Linear(8, 1).cuda()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    losses = []
    for _ in range(5):
        loss = (model(torch.ones(4, 8).cuda()) - 3).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]


FAULTS: dict[str, Callable[[], None]] = {
    each.__name__: each
    for each in (
        model_and_input_on_two_devices,
        two_gpus_in_one_sum,
        gpu_tensor_to_numpy,
        index_out_of_range,
        more_memory_than_there_is,
        leak,
        peak_above_the_budget,
        hidden_synchronization,
        missing_wait_for_a_stream,
        no_fault,
    )
}


def with_virtualgpu() -> None:
    """Install two virtual T4s."""
    import virtualgpu

    virtualgpu.use(2, like="T4")


def with_fakegpu() -> None:
    """Install two T4s of FakeGPU, a package that imitates GPUs, and put it on Python's path."""
    import fakegpu

    fakegpu.init(runtime="fakecuda", profile="t4", device_count=2)


def with_mocks() -> None:
    """Replace the functions of torch.cuda that a test calls, as people do by hand."""
    for owner in (torch.Tensor, torch.nn.Module):
        mock.patch.object(owner, "cuda", lambda self, *device: self).start()
    for name, value in (("memory_allocated", 0), ("max_memory_allocated", 0)):
        mock.patch.object(torch.cuda, name, return_value=value).start()
    for name in ("synchronize", "reset_peak_memory_stats", "set_sync_debug_mode", "Stream"):
        mock.patch.object(torch.cuda, name).start()
    mock.patch.object(torch.cuda, "stream").start()


TOOLS: dict[str, Callable[[], None]] = {
    "virtualgpu": with_virtualgpu,
    "FakeGPU": with_fakegpu,
    "mocks": with_mocks,
}


def one(tool: str, fault: str) -> None:
    """Print whether a tool notices a fault, and how."""
    TOOLS[tool]()
    try:
        FAULTS[fault]()
    except BaseException as error:
        text = str(error).partition("\n")[0]
        print("NOTICED", f"{type(error).__name__}: {text}")
    else:
        print("PASSED")


def main() -> None:
    """Print the table, and what each tool said."""
    print(f"{date.today()}, torch {torch.__version__}")
    said = []
    for fault in FAULTS:
        cells = []
        for tool in TOOLS:
            command = [sys.executable, __file__, tool, fault]
            ended = subprocess.run(command, capture_output=True, text=True, timeout=300)
            lines = [line for line in ended.stdout.splitlines() if line[:6] in ("NOTICE", "PASSED")]
            outcome = (lines or [f"DIED with status {ended.returncode}"])[0]
            cells.append(f"{outcome.split()[0].lower():12}")
            said.append(f"{fault}, {tool}: {outcome}")
        print(f"{fault:32}", *cells, flush=True)
    print(f"{'':32}", *(f"{tool:12}" for tool in TOOLS))
    print(*said, sep="\n")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        one(*sys.argv[1:])
    else:
        main()
