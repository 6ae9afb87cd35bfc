"""Data loaders with workers, whose operators and times do not affect the host's time."""

import time

import pytest
import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils.data import DataLoader, Dataset

import virtualgpu

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning"),
]


class Samples(Dataset):
    """Data set whose samples come late or early, and say how many modes of PyTorch are on."""

    def __init__(self, seconds: float = 0) -> None:
        self.seconds = seconds

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(self.seconds if index == 0 else 0)
        return torch.full((1 << 16,), len(_get_current_dispatch_mode_stack()))


def test_when_a_worker_is_done_takes_no_host_time():
    """Check a batch that arrives early, while the loader waits for another one."""

    def times(seconds: float) -> list[float]:
        with virtualgpu.use(gpus=1):
            return [
                virtualgpu.host_time()
                for _ in DataLoader(Samples(seconds), batch_size=1, num_workers=2)
            ]

    early, late = times(0), times(0.5)
    assert early == late


@pytest.mark.parametrize("starts", ["fork", "spawn"])
def test_in_a_forked_worker_no_operator_is_looked_at(starts):
    with virtualgpu.use(gpus=1):
        torch.cuda.init()
        here = len(_get_current_dispatch_mode_stack())
        [batch] = DataLoader(Samples(), batch_size=8, num_workers=1, multiprocessing_context=starts)
        assert int(batch.max()) == (here - 1 if starts == "fork" else here)


class OnTheGpu(Samples):
    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.ones(1, device="cuda") + 1


def test_a_forked_worker_still_has_no_gpu():
    with virtualgpu.use(gpus=1):
        torch.cuda.init()
        with pytest.raises(RuntimeError, match="Cannot re-initialize CUDA in forked subprocess"):
            list(DataLoader(OnTheGpu(), num_workers=1, multiprocessing_context="fork"))
