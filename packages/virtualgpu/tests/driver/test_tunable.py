"""Tunable operators are off, and the settings that a program makes are remembered."""

import pytest
import torch
from torch.cuda import tunable


@pytest.fixture(autouse=True)
def used(machine):
    return machine


def test_what_a_gpu_answers_where_nobody_has_set_anything():
    assert (
        tunable.is_enabled(),
        tunable.tuning_is_enabled(),
        tunable.record_untuned_is_enabled(),
    ) == (False, True, False)
    assert (
        tunable.get_max_tuning_duration(),
        tunable.get_max_tuning_iterations(),
        tunable.get_filename(),
    ) == (30, 100, "")


def test_what_is_set_is_answered(monkeypatch):
    tunable.enable(False)
    tunable.tuning_enable(False)
    tunable.record_untuned_enable(True)
    tunable.set_max_tuning_duration(-1)
    tunable.set_max_tuning_iterations(5)
    assert (tunable.tuning_is_enabled(), tunable.record_untuned_is_enabled()) == (False, True)
    assert (tunable.get_max_tuning_duration(), tunable.get_max_tuning_iterations()) == (0, 5)
    monkeypatch.setenv("PYTORCH_TUNABLEOP_MAX_TUNING_ITERATIONS", "7")
    assert tunable.get_max_tuning_iterations() == 7


@pytest.mark.parametrize(
    ("name", "found"),
    [("a.b.csv", "a.b1.csv"), ("a%d.csv", "a1.csv"), ("results", "results1"), ("", "")],
)
def test_the_file_of_results_has_the_number_of_its_gpu(name, found):
    with torch.cuda.device(1):
        tunable.set_filename(name, True)
    assert tunable.get_filename() == found
    tunable.set_filename(name)
    assert tunable.get_filename() == name


def test_switching_it_on_is_refused_by_name(monkeypatch):
    with pytest.raises(
        NotImplementedError,
        match=(
            "torch.cuda.tunable, which times cuBLAS's kernels one against another, is not supported"
        ),
    ):
        tunable.enable()
    monkeypatch.setenv("PYTORCH_TUNABLEOP_ENABLED", "1")
    with pytest.raises(NotImplementedError, match="torch.cuda.tunable"):
        tunable.is_enabled()


def test_the_jiterator_is_refused_for_its_compiler():
    fn = torch.cuda.jiterator._create_jit_fn("template <typename T> T f(T x) { return x; }")
    with pytest.raises(
        NotImplementedError,
        match="which compiles CUDA code with nvrtc, is not supported by the virtual GPU",
    ):
        fn(torch.ones(2, device="cuda"))
