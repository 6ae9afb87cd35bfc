"""The plugin of pytest, found as its users find it: by the entry point of the installed package.

Each test runs a suite of its own, in a process of its own. In this process, a suite would leave
modules behind that were imported twice.
"""

import importlib.util
import time
from fnmatch import fnmatch

import pytest

pytest_plugins = ["pytester"]
pytestmark = pytest.mark.slow


PYTEST = importlib.util.find_spec("pytest.__main__").origin


@pytest.fixture
def suite(pytester, warm_processes, monkeypatch):
    """A function that runs a suite with this text, in a process that has imported torch already.

    No other plugin is loaded, because loading them takes longer than a suite.
    """
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")

    def run(text, *options):
        pytester.makepyfile(text)
        options = ("-p", "virtual_gpus", "-p", "no:cacheprovider", *options)
        if not {"--virtual-gpus", "--virtual-like"} & set(options):
            return pytester.runpytest_subprocess(*options)
        said, began = pytester.path / "said", time.monotonic()
        with said.open("wb") as output:
            ended = warm_processes.start([PYTEST, *options], output.fileno()).wait()
        lines = said.read_text().splitlines()
        return pytest.RunResult(ended, lines, lines, time.monotonic() - began)

    return run


AT_IMPORT = """
    import pytest, torch
    there = torch.cuda.is_available()

    @pytest.mark.skipif(not there, reason="needs CUDA")
    def test_on_cuda():
        assert torch.cuda.device_count() == 2 and "T4" in torch.cuda.get_device_name()
        assert torch.ones(3, device="cuda:1").sum().item() == 3
"""


def test_modules_and_conftests_see_the_gpus_when_they_are_imported(suite, pytester, monkeypatch):
    monkeypatch.delenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD")
    pytester.makeconftest("import torch\nassert torch.cuda.device_count() == 2")
    result = suite(AT_IMPORT, "--virtual-gpus", "2", "--virtual-like", "T4")
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(["virtual GPUs: <2 virtual GPUs, modelled on NVIDIA Tesla T4, *"])


def test_without_its_options_it_changes_nothing(suite):
    import torch

    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU, which the suite sees")
    suite(AT_IMPORT).assert_outcomes(skipped=1)


OPTIONS_OF_A_SUITE = """
    def pytest_addoption(parser):
        names = "gpus like memory gpu device no-values values virtual-time seconds"
        for name in names.split():
            parser.addoption(f"--{name}", help="the suite's own")
        parser.addini("gpus", "the suite's own")
"""


@pytest.mark.parametrize("options", [(), ("--virtual-gpus", "1")])
def test_a_suite_may_have_options_of_any_other_name(suite, pytester, options):
    pytester.makeconftest(OPTIONS_OF_A_SUITE)
    text = """
        def test_own(pytestconfig):
            assert pytestconfig.getoption("gpus") == "3"
            assert pytestconfig.getoption("--like") == "mine"
    """
    suite(text, "--gpus", "3", "--like", "mine", *options).assert_outcomes(passed=1)


def test_without_its_options_it_imports_neither_torch_nor_the_kit(suite, monkeypatch):
    monkeypatch.delenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD")
    text = """
        import sys
        import pytest
        def test_modules(pytestconfig):
            assert pytestconfig.pluginmanager.has_plugin("virtual_gpus")
            kit = {"torch", "virtualgpu", "gputrace", "labkit", "labcourse"}
            assert kit & {name.split(".")[0] for name in sys.modules} == set()
        @pytest.mark.gpu_budget(memory="1GiB")
        def test_budget(): pass
        def test_leak(no_gpu_leak): pass
    """
    result = suite(text, "--strict-markers")
    result.assert_outcomes(passed=1, skipped=2)


def test_its_marker_and_its_options_are_shown(suite):
    result = suite("", "--markers")
    result.stdout.fnmatch_lines(
        ["@pytest.mark.gpu_budget(memory=None, seconds=None): limits of the test on virtual GPUs*"]
    )
    result = suite("", "--help")
    result.stdout.fnmatch_lines(["*--virtual-gpus=N*", "*--virtual-like=MODEL*"])


def test_a_model_that_there_is_not_is_a_usage_error(suite):
    result = suite("", "--virtual-like", "T5")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["ERROR: *T5*"])


def test_what_a_virtual_gpu_cannot_do_is_a_skip_that_says_so(suite, monkeypatch):
    text = """
        import torch
        def test_interface():
            torch.ones(2, device="cuda").__cuda_array_interface__
        def test_values_that_the_host_has_no_memory_for():
            torch.ones(1 << 20, device="cuda").sum().item()
        def test_of_the_programs_own():
            raise NotImplementedError("not yet")
    """
    monkeypatch.setenv("LABKIT_HOST_BUDGET", "1000000")
    result = suite(text, "--virtual-gpus", "1", "-rs")
    result.assert_outcomes(skipped=2, failed=1)
    result.stdout.fnmatch_lines(
        [
            "SKIPPED * __cuda_array_interface__ * is not supported by the virtual GPU*",
            "SKIPPED * were not kept*",
        ]
    )


def test_an_error_that_a_refusal_led_to_is_a_skip_too(suite):
    text = """
        import pytest, torch
        def refused(*_): torch.ones(2, device="cuda").__cuda_array_interface__
        def test_of_a_cause():
            try:
                refused()
            except NotImplementedError as error:
                raise ValueError("no such kernel") from error
        def test_while_it_was_handled():
            with pytest.raises(RuntimeError, match="another message"):
                refused()
        def test_in_a_group():
            try:
                refused()
            except NotImplementedError as error:
                raise ExceptionGroup("several", [error])
        def test_in_a_process_of_its_own():
            torch.multiprocessing.spawn(refused)
        def test_said_to_be_another_matter():
            try:
                refused()
            except NotImplementedError:
                raise ValueError("no such kernel") from None
    """
    result = suite(text, "--virtual-gpus", "1", "-rs")
    result.assert_outcomes(skipped=4, failed=1)
    assert all(
        "is not supported by the virtual GPU" in line
        for line in result.outlines
        if line.startswith("SKIPPED")
    )


def test_a_module_that_a_refusal_keeps_from_being_imported_is_skipped(suite):
    result = suite(
        "import torch\ntorch.ones(2, device='cuda').__cuda_array_interface__",
        "--virtual-gpus",
        "1",
        "-rs",
    )
    result.assert_outcomes(skipped=1)
    result.stdout.fnmatch_lines(["SKIPPED * is not supported by the virtual GPU*"])


def test_budgets_of_memory_and_time(suite):
    text = """
        import pytest, torch
        @pytest.mark.gpu_budget(memory="2MiB", seconds=1)
        def test_within():
            torch.ones(1 << 18, device="cuda")
        @pytest.mark.gpu_budget(memory="1KiB")
        def test_memory():
            torch.ones(1 << 18, device="cuda")
        @pytest.mark.gpu_budget(seconds=1e-6)
        def test_time():
            torch.ones(1 << 18, device="cuda")
    """
    result = suite(text, "--virtual-gpus", "1", "--strict-markers")
    result.assert_outcomes(passed=1, failed=2)
    result.stdout.fnmatch_lines(
        ["it took 1 MiB on cuda:0, more than 1 KiB", "it took * of modelled time, more than 1*µs"]
    )


def test_a_budget_of_the_test_itself_comes_before_that_of_its_class(suite):
    text = """
        import pytest, torch
        @pytest.mark.gpu_budget(memory="1KiB", seconds=1)
        class TestWork:
            @pytest.mark.gpu_budget(memory="2MiB")
            def test_within(self): torch.ones(1 << 18, device="cuda")
            @pytest.mark.gpu_budget(seconds=1e-6)
            def test_memory(self): torch.ones(1 << 18, device="cuda", dtype=torch.int8).sum()
    """
    suite(text, "--virtual-gpus", "1").assert_outcomes(passed=1, failed=1)


WRONG_BUDGETS = {
    "": "expected memory=, seconds= or both",
    "'1GiB'": "expected memory=, seconds= or both",
    "memroy='1GiB'": "expected memory=, seconds= or both",
    "memory='1GiBs'": "memory='1GiBs': give a positive number of bytes*",
    "seconds='1s'": "expected a positive number of seconds, got '1s'",
    "seconds=-1": "expected a positive number of seconds, got -1",
}


def test_a_budget_that_is_none_says_so(suite):
    tests = [
        f"@pytest.mark.gpu_budget({limits})\ndef test_{number}(): pass\n"
        for number, limits in enumerate(WRONG_BUDGETS)
    ]
    result = suite("import pytest\n" + "".join(tests), "--virtual-gpus", "1")
    result.assert_outcomes(failed=len(WRONG_BUDGETS))
    said = [line for line in result.outlines if line.startswith("gpu_budget: ")]
    assert len(said) == len(WRONG_BUDGETS)
    for line, expected in zip(said, WRONG_BUDGETS.values(), strict=True):
        assert fnmatch(line, f"gpu_budget: {expected}")
    result.stdout.no_fnmatch_line("*pytest_plugin.py*")


@pytest.mark.parametrize("count", ["0", "17", "two"])
def test_a_number_of_gpus_that_there_is_not_is_a_usage_error(suite, count):
    result = suite("", "--virtual-gpus", count)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(
        [f"*argument --virtual-gpus: expected a whole number from 1 to 16, got {count}"]
    )


def test_leaks_races_and_hidden_synchronizations(suite):
    text = """
        import torch
        kept = []
        def work(): return torch.ones(1 << 18, device="cuda")
        def race():
            side, x = torch.cuda.Stream(), torch.zeros(1 << 24, device="cuda")
            x += 1
            with torch.cuda.stream(side):
                return x + 1
        def test_clean(no_gpu_leak, no_gpu_race, no_gpu_synchronization): work() + 1
        def test_leak(no_gpu_leak): kept.append(work())
        def test_race(no_gpu_race): race()
        def test_synchronization(no_gpu_synchronization): work()[0].item()
        def test_synchronization_elsewhere(): work()[0].item()
    """
    result = suite(text, "--virtual-gpus", "1", "-W", "ignore")
    result.assert_outcomes(passed=2, failed=3)
    result.stdout.fnmatch_lines(
        [
            "it leaves 1 MiB behind:",
            "1 MiB on cuda:0*kept*",
            "*called a synchronizing CUDA operation",
        ]
    )


def test_a_race_fails_each_test_that_it_is_in_and_no_other(suite):
    text = """
        import pytest, torch
        side = torch.cuda.Stream()
        def race():
            x = torch.zeros(1 << 24, device="cuda")
            x += 1
            with torch.cuda.stream(side):
                return x + 1
        def test_that_does_not_ask(): race()
        @pytest.mark.parametrize("number", range(2))
        def test_race(no_gpu_race, number): race()
        def test_clean(no_gpu_race): torch.zeros(1 << 24, device="cuda")
    """
    suite(text, "--virtual-gpus", "1", "-W", "ignore").assert_outcomes(passed=2, failed=2)


def test_assertions_are_skipped_where_there_are_no_virtual_gpus(suite):
    text = """
        import pytest
        def test_clean(no_gpu_leak, no_gpu_race, no_gpu_synchronization): pass
        @pytest.mark.gpu_budget(seconds=1)
        def test_budget(): pass
    """
    result = suite(text, "-rs")
    result.assert_outcomes(skipped=2)
    result.stdout.fnmatch_lines(
        [
            f"SKIPPED * test_assertions*.py:{line}: * Run pytest with --virtual-gpus 1"
            for line in (2, 3)
        ]
    )


def test_each_worker_of_xdist_has_its_gpus(suite):
    result = suite(AT_IMPORT, "--virtual-gpus", "2", "-n", "1", "-p", "xdist")
    result.assert_outcomes(passed=1)
