"""Settings of PyTorch that a measured function or an answer changes are restored."""

import pytest
import torch

import labkit
from labkit.checks.settings import settings_kept

CHANGES = {
    "torch.backends.cuda.matmul.allow_tf32": True,
    "torch.backends.cudnn.allow_tf32": False,
    "torch.backends.fp32_precision": "tf32",
    "torch.backends.cudnn.conv.fp32_precision": "ieee",
    "torch.backends.cudnn.enabled": False,
    "torch.backends.cudnn.benchmark": True,
    "torch.backends.cudnn.deterministic": True,
    "torch.backends.cuda.matmul.allow_fp16_accumulation": True,
    "torch.get_float32_matmul_precision()": "medium",
    "torch.get_deterministic_debug_mode()": 1,
    "torch.get_default_dtype()": torch.float64,
    "torch.get_default_device()": torch.device("cuda:1"),
    "torch.get_num_threads()": 3,
    "torch.is_grad_enabled()": False,
    "torch.cuda.get_sync_debug_mode()": 1,
    "torch.cuda.get_per_process_memory_fraction()": 0.5,
    "torch.cuda.current_device()": 1,
    "torch.cuda.current_stream(1)": None,
}
SETTERS = {
    "torch.is_grad_enabled()": torch.set_grad_enabled,
    "torch.cuda.current_device()": torch.cuda.set_device,
    "torch.cuda.current_stream(1)": lambda value: torch.cuda.set_stream(torch.cuda.Stream(1)),
}


@pytest.fixture(autouse=True)
def two_gpus():
    labkit.use(gpus=2, virtual=True, quiet=True)
    yield
    labkit.use(None)


def change(setting, value):
    if setting in SETTERS:
        SETTERS[setting](value)
    elif setting.endswith("()"):
        eval(setting[:-2].replace("get_", "set_"))(value)
    else:
        module, name = setting.rsplit(".", 1)
        setattr(eval(module), name, value)


def values():
    return [eval(setting) for setting in CHANGES]


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@pytest.mark.parametrize("setting", CHANGES)
def test_a_changed_setting_is_restored(setting):
    before = values()
    with settings_kept():
        change(setting, CHANGES[setting])
        assert eval(setting) != before[list(CHANGES).index(setting)]
    assert values() == before


@pytest.mark.filterwarnings("ignore:.*mix of the legacy and new APIs")
def test_old_and_new_names_of_tf32_may_be_mixed():
    with settings_kept():
        torch.backends.cuda.matmul.fp32_precision = "tf32"
        with settings_kept():
            torch.backends.cudnn.allow_tf32 = False
        assert torch.backends.cuda.matmul.fp32_precision == "tf32"
        assert torch.backends.cudnn.conv.fp32_precision == "tf32"


def test_tf32_of_one_measurement_is_not_that_of_the_next():
    def allowed(n):
        before = torch.backends.cuda.matmul.allow_tf32
        torch.backends.cuda.matmul.allow_tf32 = True
        return before

    assert labkit.measure(allowed, {"n": [1, 2]}).column("allowed") == [False, False]
    assert not torch.backends.cuda.matmul.allow_tf32
