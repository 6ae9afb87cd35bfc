import json
import re
from dataclasses import FrozenInstanceError
from pathlib import Path

import pytest

from virtualgpu import profiles

FOLDER = Path(profiles.__file__).parent
ALL = profiles.names()


def test_seven_models():
    assert ALL == ["T4", "L4", "A100", "H100", "H200", "RTX 4090", "A100-80"]
    assert len({profiles.load(name).name for name in ALL}) == 7


@pytest.mark.parametrize(
    ("asked", "name"),
    [
        ("T4", "Tesla T4"),
        ("tesla t4", "Tesla T4"),
        ("l4", "NVIDIA L4"),
        ("a100", "NVIDIA A100-SXM4-40GB"),
        ("NVIDIA A100-SXM4-40GB", "NVIDIA A100-SXM4-40GB"),
        ("a100-40", "NVIDIA A100-SXM4-40GB"),
        ("a100-80", "NVIDIA A100-SXM4-80GB"),
        ("H100-80", "NVIDIA H100 80GB HBM3"),
        ("NVIDIA A100-SXM4-80GB", "NVIDIA A100-SXM4-80GB"),
        ("H100", "NVIDIA H100 80GB HBM3"),
        ("h200", "NVIDIA H200"),
        ("NVIDIA H200", "NVIDIA H200"),
        ("RTX 4090", "NVIDIA GeForce RTX 4090"),
        ("rtx 4090", "NVIDIA GeForce RTX 4090"),
        ("RTX4090", "NVIDIA GeForce RTX 4090"),
        ("nvidia geforce rtx 4090", "NVIDIA GeForce RTX 4090"),
    ],
)
def test_load_takes_short_names_and_torch_names(asked, name):
    assert profiles.load(asked).name == name


@pytest.mark.parametrize("wrong", ["T5", "", "H20", "NVIDIA", "4090", None, 4])
def test_an_unknown_model_names_the_choices(wrong):
    with pytest.raises(ValueError, match=r"T4, L4, A100, H100, H200, RTX 4090") as error:
        profiles.load(wrong)
    assert repr(wrong) in str(error.value)


def test_a_profile_cannot_be_changed():
    profile = profiles.load("T4")
    with pytest.raises(FrozenInstanceError):
        profile.total_memory = 1
    with pytest.raises(TypeError):
        profile.peak_flops["float32"] = 1.0


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.toml")), ids=lambda path: path.stem)
def test_every_figure_has_a_source(path):
    source = re.compile(
        r"#.*(\[[mdqgap]\]|measured|fitted|assumed|as malloc_seconds|driver branch)"
    )
    table_source = None
    for line in path.read_text(encoding="utf-8").splitlines():
        if line.startswith("["):
            table_source = source.search(line)
        elif "=" in line and not line.startswith("#"):
            assert source.search(line) or table_source, f"{path.name}: no source for {line!r}"


@pytest.mark.parametrize("name", ALL)
def test_figures_fit_together(name):
    p = profiles.load(name)
    assert set(p.peak_flops) == set(p.matmul_efficiency) == set(profiles.FORMATS)
    assert all(0 < p.matmul_efficiency[f] <= 1 for f in profiles.FORMATS)
    assert 0 < p.memory_efficiency <= 1
    assert 0 < p.context_bytes < p.total_memory // 20
    # The bus transfers twice per clock over its whole width, so the bandwidth in a datasheet is the
    # product of the other two figures.
    assert 2e3 * p.memory_clock_khz * p.memory_bus_bits / 8 == pytest.approx(
        p.memory_bytes_per_second, rel=0.03
    )
    # Copies are fast from page-locked memory, and faster still over NVLink to another GPU.
    assert p.pageable_h2d_bytes_per_second < p.pinned_h2d_bytes_per_second
    assert p.pageable_d2h_bytes_per_second < p.pinned_d2h_bytes_per_second
    assert (
        p.peer_access == (p.nvlinks > 0) == (p.p2p_bytes_per_second > p.pinned_h2d_bytes_per_second)
    )
    assert 0 < p.small_tile_efficiency <= 1
    assert (
        p.shared_memory_per_block_bytes
        < p.shared_memory_per_block_optin_bytes
        <= p.shared_memory_per_multiprocessor_bytes
    )


def test_float32_peak_is_two_operations_a_core_a_clock():
    """Check that a datasheet's float32 figure is cores × boost clock × 2.

    This holds for chips whose boost clock is the maximum clock here.
    """
    cores = {
        "T4": 64,
        "L4": 128,
        "A100": 64,
        "A100-80": 64,
        "H100": 128,
        "H200": 128,
        "RTX 4090": 128,
    }
    for name, per_multiprocessor in cores.items():
        p = profiles.load(name)
        made = 2e3 * p.sm_clock_khz * p.multiprocessors * per_multiprocessor
        assert made == pytest.approx(p.peak_flops["float32"], rel=0.02), name


def test_h200_memory_is_what_the_real_one_reported():
    recorded = json.loads(
        (Path(__file__).parents[1] / "benchmarks" / "timing" / "micro.json").read_text(
            encoding="utf-8"
        )
    )
    free, total = recorded["mem_get_info_first"]
    p = profiles.load("H200")
    assert p.total_memory == total
    assert p.total_memory - p.context_bytes == free


def test_a_slower_host_changes_what_the_host_does_and_nothing_of_the_gpu():
    usual, slow = profiles.load("H200"), profiles.load("H200", 2.0)
    assert slow.launch_seconds == 2 * usual.launch_seconds and slow.cpu_flops == usual.cpu_flops / 2
    assert slow.rising_addresses is usual.rising_addresses
    for name in (
        "kernel_minimum_seconds",
        "memory_bytes_per_second",
        "p2p_latency_seconds",
        "name",
    ):
        assert getattr(slow, name) == getattr(usual, name)


@pytest.mark.parametrize("name", ALL)
def test_no_gpu_s_bar_is_narrower_than_that_of_the_one_with_most_recordings(name):
    most = profiles.load("H200")
    for idle, host_is_given in ((0.0, False), (0.5, False), (0.5, True)):
        error = profiles.load(name).time_error(idle, host_is_given)
        assert error is None or error >= most.time_error(idle, host_is_given) > 0
