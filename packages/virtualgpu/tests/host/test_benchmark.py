"""torch.utils.benchmark on virtual time."""

import subprocess
import sys
import textwrap
import timeit

import pytest
import torch
from torch.utils import benchmark

import virtualgpu


@pytest.mark.parametrize("timer", [{}, {"timer": benchmark.timer}])
def test_it_measures_the_work_of_the_gpu_on_the_virtual_clock(timer):
    with virtualgpu.use(1, like="H200"):
        x = torch.ones(512, 512, device="cuda")
        first, second = (
            benchmark.Timer("x @ x; x + 1", globals={"x": x}, **timer).timeit(20) for _ in range(2)
        )
        for _ in range(3):
            x @ x
        torch.cuda.synchronize()
        begin = virtualgpu.host_time()
        for _ in range(20):
            x @ x
            x + 1
        torch.cuda.synchronize()
        expected = (virtualgpu.host_time() - begin) / 20
    assert first.mean == pytest.approx(second.mean, rel=1e-6) == pytest.approx(expected, rel=0.01)


def test_it_decides_how_often_to_measure_by_virtual_time():
    with virtualgpu.use(1, like="H200"):
        measured = benchmark.Timer(
            "x + 1", globals={"x": torch.ones(3, device="cuda")}
        ).blocked_autorange(min_run_time=0.01)
    assert (
        sum(time * measured.number_per_run for time in measured.raw_times) > 0.009
        and measured.iqr < 1e-7
    )


def test_a_timer_of_the_programs_own_is_left_to_it_and_all_is_put_back():
    before = benchmark.utils.timer.timer, benchmark.Timer.__init__
    with virtualgpu.use(1):
        assert (
            benchmark.Timer("pass", timer=timeit.default_timer)._timer.timer is timeit.default_timer
        )
    assert (benchmark.utils.timer.timer, benchmark.Timer.__init__) == before


@pytest.mark.slow
def test_it_is_changed_when_the_program_imports_it_and_sees_the_gpus():
    """Check that virtual GPUs do not import torch.utils.benchmark, which takes 0.3 s.

    In a build for CUDA, and with CUDA's compiler, torch.utils.cpp_extension warns if it sees no GPU
    when it is imported.
    """
    code = """
        import importlib.abc, sys
        class Asked(importlib.abc.MetaPathFinder):
            def find_spec(self, name, path, target=None):
                if name == "torch.utils.cpp_extension":
                    import torch
                    print(torch.cuda.is_available())
        import virtualgpu
        virtualgpu.use(1)
        sys.meta_path.insert(0, Asked())
        print("imported:", "torch.utils.benchmark" in sys.modules)
        import torch
        from torch.utils.benchmark import Timer
        x = torch.ones(4096, 4096, device="cuda")
        print("at least the model's time:", Timer("x @ x", globals={"x": x}).timeit(1).mean > 0.01)
    """
    ended = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=280
    )
    assert (ended.returncode, ended.stdout) == (
        0,
        "imported: False\nTrue\nat least the model's time: True\n",
    ), ended.stderr
