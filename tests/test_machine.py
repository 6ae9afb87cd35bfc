"""Which GPUs a lesson runs on, and what bad input is told."""

import re
from functools import partial
from types import SimpleNamespace

import pytest
import torch

import labkit
import virtualgpu
from gputrace import Table
from labkit import machine
from virtualgpu import machines


@pytest.fixture(autouse=True)
def none_left(monkeypatch):
    monkeypatch.delenv("LABKIT_VIRTUAL", raising=False)
    yield
    labkit.use(None)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"gpus": 0}, "gpus=0: choose a whole number from 1 to 16"),
        ({"gpus": -1}, "gpus=-1: choose a whole number from 1 to 16"),
        ({"gpus": 2.0}, "gpus=2.0"),
        ({"gpus": True}, "gpus=True"),
        ({"gpus": 17}, "gpus=17"),
        ({"like": "T5"}, "Choose one of T4, L4, A100, H100, H200, RTX 4090"),
        ({"like": 4}, "Choose one of T4"),
        (
            {"memory": "banana"},
            "memory='banana': give a positive number of bytes, or a size such as '16GiB'",
        ),
        ({"memory": "-1GiB"}, "memory='-1GiB'"),
        ({"memory": 0}, "memory=0"),
        ({"memory": "10MiB", "virtual": True}, "at least 1.0 GiB"),
        ({"virtual": "yes"}, "virtual='yes': choose one of True, False, None"),
        ({"values": None}, "values=None: choose one of True, False"),
    ],
)
def test_bad_input_names_the_choices_and_changes_nothing(arguments, message):
    names = set(vars(torch._C))
    with pytest.raises(ValueError, match=message.replace("(", r"\(")):
        labkit.use(**arguments)
    assert labkit.current() is None
    assert set(vars(torch._C)) == names


def test_too_few_real_gpus():
    with pytest.raises(RuntimeError, match="virtual=False asks for 16 real CUDA GPU"):
        labkit.use(gpus=16, virtual=False)
    assert labkit.current() is None


def test_the_same_request_again_is_a_cell_run_twice():
    first = labkit.use(gpus=2, virtual=True, quiet=True)
    x = torch.ones(3, device="cuda:1")
    assert labkit.use(gpus=2, virtual=True, quiet=True) is first
    assert (x + 1).sum().item() == 6


def test_gpus_with_another_host_are_those_that_a_program_asks_for():
    """A script under `fit` may call `labkit.use`, although `fit` has put GPUs in use before."""
    with virtualgpu.use(2, like="H200", host=2.0) as placed:
        assert labkit.use(gpus=2, like="H200", virtual=True, quiet=True) is placed


def test_another_request_is_refused_and_leaves_the_first_machine():
    first = labkit.use(gpus=2, virtual=True, quiet=True)
    with pytest.raises(
        RuntimeError, match=r"a machine is already in use .*2 virtual GPUs.*labkit.use\(None\)"
    ):
        labkit.use(gpus=4, virtual=True, quiet=True)
    assert labkit.current() is first
    assert torch.cuda.device_count() == 2


def test_a_machine_inside_another_is_refused():
    with labkit.use(gpus=1, virtual=True, quiet=True) as outer:
        with (
            pytest.raises(RuntimeError, match="already in use"),
            labkit.use(gpus=1, virtual=True, quiet=True),
        ):
            pass
        assert labkit.current() is outer
        assert torch.ones(2, device="cuda").sum().item() == 2
    assert labkit.current() is None


@pytest.mark.parametrize("real_first", [True, False])
def test_real_and_virtual_gpus_are_not_in_use_at_once(one_t4, real_first):
    use_real, use_virtual = (
        partial(labkit.use, 1, virtual=False, quiet=True),
        partial(virtualgpu.use, 1),
    )
    first, second = (use_real, use_virtual) if real_first else (use_virtual, use_real)
    used = first()
    with pytest.raises(RuntimeError, match="a machine is already in use .*T4"):
        second()
    assert labkit.current() is used
    assert virtualgpu.current() is (None if real_first else used)


def test_gpus_that_are_kept_are_not_taken_away():
    used = labkit.use(gpus=1, virtual=True, quiet=True)
    with used.kept("not now"):
        for call in (
            lambda: labkit.use(None),
            lambda: virtualgpu.use(None),
            lambda: labkit.use(gpus=2, virtual=True),
        ):
            with pytest.raises(RuntimeError, match="not now"):
                call()
        assert labkit.use(gpus=1, virtual=True, quiet=True) is used
    labkit.use(None)


def test_none_takes_the_machine_away_and_may_be_said_twice():
    labkit.use(gpus=1, virtual=True, quiet=True)
    assert labkit.use(None) is None
    assert labkit.use(None) is None
    assert labkit.current() is None


def test_banner_is_one_line_that_says_what_the_lesson_runs_on(capsys):
    labkit.use(gpus=2, like="h200", memory="16GiB", virtual=True)
    said = capsys.readouterr().out
    assert said == (
        "labkit: 2 virtual GPUs, modelled on NVIDIA H200, 16.0 GiB each. Times are the "
        "model's, not this computer's.\n"
    )


@pytest.fixture
def one_t4(monkeypatch):
    """Pretend that the computer has one T4, as far as a lesson's first cell asks."""
    monkeypatch.setattr(machine, "real_gpus", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index=0: "Tesla T4")
    monkeypatch.setattr(
        torch.cuda,
        "get_device_properties",
        lambda index=0: SimpleNamespace(total_memory=15_828_320_256),
    )


def test_on_one_t4_a_lesson_for_one_gpu_is_measured(one_t4, capsys):
    used = labkit.use(gpus=1)
    assert (
        capsys.readouterr().out
        == "labkit: 1 GPU of this computer: NVIDIA Tesla T4, 14.7 GiB each.\n"
    )
    assert used.badge == "measured on NVIDIA Tesla T4"


def test_on_one_t4_a_lesson_for_four_gpus_is_virtual_and_says_why(one_t4, capsys):
    used = labkit.use(gpus=4)
    assert used is labkit.use(gpus=4, quiet=True)
    assert capsys.readouterr().out == (
        "labkit: 4 virtual GPUs, modelled on NVIDIA Tesla T4, 14.6 GiB each. This computer has "
        "only 1 of its own. "
        "Times are the model's, not this computer's.\n"
    )
    assert used.badge == "virtual GPU, modelled on NVIDIA Tesla T4"


@pytest.mark.parametrize("wish", [{"virtual": True}, {"like": "T4"}, {"values": False}])
def test_who_asks_for_virtual_gpus_is_not_told_what_the_computer_has(one_t4, capsys, wish):
    labkit.use(gpus=4, **wish)
    assert "This computer has" not in capsys.readouterr().out


def test_environment_forces_virtual_gpus(monkeypatch):
    monkeypatch.setenv("LABKIT_VIRTUAL", "1")
    used = labkit.use(quiet=True)
    assert used.virtual
    assert used.badge == "virtual GPU, modelled on NVIDIA Tesla T4"


def test_memory_is_that_of_each_gpu():
    with labkit.use(gpus=2, memory="2GiB", virtual=True, quiet=True):
        assert torch.cuda.get_device_properties(1).total_memory == 2 << 30
        with pytest.raises(torch.OutOfMemoryError, match="total capacity of 2.00 GiB"):
            torch.empty(3 << 30, dtype=torch.uint8, device="cuda:1")


def test_host_time_runs_on_the_machines_clock():
    with labkit.use(gpus=1, virtual=True, quiet=True):
        start = labkit.host_time()
        torch.ones(1000, device="cuda").sum()
        assert 0 < labkit.host_time() - start < 1e-3


def test_gpus_says_where_figures_come_from():
    assert "No GPUs are in use" in repr(labkit.gpus())
    with labkit.use(gpus=2, like="H200", virtual=True, quiet=True):
        table = labkit.gpus()
        assert (
            "cuda:1" in repr(table)
            and "NVIDIA H200" in repr(table)
            and "labkit's profile of the model" in repr(table)
        )
        assert table._repr_html_().count("<tr>") == 3


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("16GiB", 16 << 30),
        ("1.5 GiB", 3 << 29),
        ("500MB", 500_000_000),
        (4096, 4096),
        ("2kib", 2048),
        ("7", 7),
    ],
)
def test_parse_bytes(text, nbytes):
    assert machines.parse_bytes(text) == nbytes


def test_a_block_with_values_computes_them_and_ends():
    with labkit.use(gpus=1, virtual=True, values=False, quiet=True) as used:
        with pytest.raises(KeyError), used.with_values():
            large = torch.ones(1 << 20, device="cuda")
            assert large.sum().item() == 1 << 20
            with used.without_values():
                lost = torch.ones(1 << 20, device="cuda") + 1
            raise KeyError
        with pytest.raises(RuntimeError, match="values of this tensor on cuda:0 were not kept"):
            (torch.ones(1 << 20, device="cuda") + 1)[0].item()
        del large, lost


def test_a_block_without_values_computes_nothing_and_ends():
    with labkit.use(virtual=True, quiet=True) as used:
        kept = torch.ones(2, device="cuda")
        with pytest.raises(KeyError), used.without_values():
            assert "values not kept" in repr(torch.rand(1000, device="cuda"))
            # as small as a number
            assert repr(kept + torch.ones(2, device="cuda")) == "tensor([2., 2.], device='cuda:0')"
            raise KeyError
        assert (kept + 1).tolist() == [2, 2]


@pytest.mark.gpu
def test_a_real_gpu_computes_values_all_the_same():
    with labkit.use(virtual=False, quiet=True) as used, used.without_values():
        assert (torch.ones(2, device="cuda") + 1).tolist() == [2, 2]


@pytest.mark.gpu
def test_real_gpus_are_taken_when_there_are_enough():
    with labkit.use(gpus=1, quiet=True) as used:
        assert not used.virtual
        assert used.badge.startswith("measured on NVIDIA")
        assert not hasattr(torch.ones(1, device="cuda"), "_gpu")


@pytest.mark.gpu
def test_memory_on_a_real_gpu_is_the_process_limit():
    before = torch.cuda.get_per_process_memory_fraction(0)
    with labkit.use(gpus=1, memory="1GiB", quiet=True), pytest.raises(torch.OutOfMemoryError):
        torch.empty(2 << 30, dtype=torch.uint8, device="cuda")
    assert torch.cuda.get_per_process_memory_fraction(0) == before


def test_a_tables_text_stands_left_and_wraps_and_its_figures_stand_right():
    source = "loss = model(batch.to(device)).square().mean()"
    html = Table(
        ("change", "line", "source"),
        (("+4 MiB", "a.py:1", source), ("0 B", "a.py:22", "")),
        "lines",
    )._repr_html_()
    styles = dict(re.findall(r'<td style="([^"]*)">([^<]+)</td>', html)[i][::-1] for i in range(3))
    assert styles["+4 MiB"] == "text-align: right; white-space: nowrap"
    assert styles["a.py:1"] == "text-align: left; white-space: nowrap"
    assert "text-align: left" in styles[source] and "overflow-wrap: anywhere" in styles[source]
    assert html.count("<th ") == 3 and html.count('<th scope="col" style="text-align: left') == 2
    assert "<script" not in html and Table((), (), "none")._repr_html_().count("<td") == 0
