"""Pytest plugin: `pytest --virtual-gpus 2 --virtual-like T4` runs CUDA tests on virtual GPUs.

pytest imports this module wherever the kit is installed. So the module only declares the options,
the marker and the fixtures. It imports neither torch nor virtualgpu until one of the options is
given. Then `gputrace.pytest_plugin` does the work.

With an option, the GPUs exist before the first conftest.py is imported, also in each worker of
pytest-xdist. If a test or a module needs something that a virtual GPU cannot do, it is skipped,
and the reason says what it needs.

The marker `gpu_budget(memory="1GiB", seconds=0.01)` fails a test that takes more memory on a GPU,
or more modelled time. A limit at the test itself overrides that of its class or module. The
fixtures `no_gpu_leak`, `no_gpu_race` and `no_gpu_synchronization` fail a test that leaves tensors
behind, whose streams race, or that makes the host wait for a GPU implicitly. Without an option,
tests with the marker or a fixture are skipped, also on a machine with a real GPU.
"""

from argparse import ArgumentTypeError

import pytest

MARKER = "gpu_budget"
MARKER_HELP = "limits of the test on virtual GPUs: memory on each GPU, and modelled time"
IN_USE = "virtual_gpus_in_use"  # name of the plugin that is registered when an option is given
WITHOUT = "it checks something about virtual GPUs. Run pytest with --virtual-gpus 1"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Declare the command-line options `--virtual-gpus` and `--virtual-like`."""
    group = parser.getgroup("virtual GPUs")
    group.addoption(
        "--virtual-gpus",
        type=_count,
        metavar="N",
        help="run CUDA tests on N virtual GPUs (default with --virtual-like: 1)",
    )
    group.addoption(
        "--virtual-like",
        metavar="MODEL",
        help="GPU model of the virtual GPUs, such as T4 or H200 (default: T4)",
    )


def _count(text: str) -> int:
    """Convert the text of an option to a number of GPUs.

    Raise ArgumentTypeError if it is not one.
    """
    from virtualgpu.machines import MAXIMUM

    if not text.isdecimal() or not 1 <= int(text) <= MAXIMUM:
        raise ArgumentTypeError(f"expected a whole number from 1 to {MAXIMUM}, got {text}")
    return int(text)


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests(early_config: pytest.Config) -> None:
    """Install the virtual GPUs before any module is imported, because modules look for GPUs."""
    options = early_config.known_args_namespace
    if options.virtual_gpus is None and options.virtual_like is None:
        return
    from gputrace import pytest_plugin

    plugin = pytest_plugin.VirtualGPUPlugin(options.virtual_gpus or 1, options.virtual_like)
    early_config.pluginmanager.register(plugin, IN_USE)


def pytest_configure(config: pytest.Config) -> None:
    """Declare the marker `gpu_budget`."""
    config.addinivalue_line("markers", f"{MARKER}(memory=None, seconds=None): {MARKER_HELP}")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip tests with a budget if there are no virtual GPUs to measure it on."""
    if config.pluginmanager.has_plugin(IN_USE):
        return
    for item in items:
        if item.get_closest_marker(MARKER) is not None:
            item.add_marker(pytest.mark.skip(reason=WITHOUT))


def _assert(request: pytest.FixtureRequest, what: str) -> None:
    """Add a check to the test that uses a fixture, or skip the test without virtual GPUs.

    `what` is the check's name, such as "no leak".
    """
    plugin = request.config.pluginmanager.get_plugin(IN_USE)
    if plugin is None:
        pytest.skip(WITHOUT)
    plugin.add_check(request.node, what)


@pytest.fixture
def no_gpu_leak(request: pytest.FixtureRequest) -> None:
    """Fail the test if it leaves tensors on a GPU behind."""
    _assert(request, "no leak")


@pytest.fixture
def no_gpu_race(request: pytest.FixtureRequest) -> None:
    """Fail the test if two streams access the same memory without an order between them."""
    _assert(request, "no race")


@pytest.fixture
def no_gpu_synchronization(request: pytest.FixtureRequest) -> None:
    """Fail the test at a line that makes the host wait for a GPU implicitly.

    Such lines read or copy a value, as `torch.cuda.set_sync_debug_mode` defines.
    """
    _assert(request, "no synchronization")
