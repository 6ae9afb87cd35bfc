"""Plugin of pytest: the kernels of notebooks are copies of a process that has imported PyTorch.

`make notebooks` loads it with `-p tools.forked_kernels`. Each lesson still has a kernel of its own.
Its imports take no time, because the fork server of `labkit.torchrun` has made them already. The
ranks and isolated functions of a lesson are copies of the same server. Where there is no fork
server, as on macOS, a kernel starts afresh.
"""

import contextlib
import os
import signal
from typing import Any

import ipykernel_launcher
import pytest
from jupyter_client.provisioning import local_provisioner

from labkit.processes import forkserver

# What nearly every lesson imports besides. A learner's fork server does not need these modules.
MODULES = (
    "ipykernel.kernelapp",
    "IPython.core.completer",
    "matplotlib.pyplot",
    "gputrace.figures",
    "labkit.labs",
)
# A kernel sets this variable before matplotlib is imported, which reads it at its import.
BACKEND = "module://matplotlib_inline.backend_inline"
_ORIGINAL = pytest.StashKey[Any]()


class ForkedKernel:
    """The process of a kernel, with the part of `subprocess.Popen` that jupyter_client uses."""

    stdin = stdout = stderr = None

    def __init__(self, arguments: list[str], env: dict[str, str]) -> None:
        command = [ipykernel_launcher.__file__, *arguments]
        with open(os.devnull, "wb") as nowhere:
            output = nowhere.fileno()
            self._process = forkserver.popen(command, env, output=output, with_server=True)
        self.pid = self._process.pid
        self.poll = self._process.poll
        self.wait = self._process.wait

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def launch_kernel(cmd: list[str], *, env: dict[str, str], cwd: str, **_: Any) -> ForkedKernel:
    """Start the kernel that the command of a kernel specification names."""
    own = {name: value for name, value in env.items() if not name.startswith("JPY_")}
    own.setdefault("MPLBACKEND", BACKEND)
    arguments = cmd[cmd.index("ipykernel_launcher") + 1 :]
    with contextlib.chdir(cwd):
        return ForkedKernel(arguments, own)


def pytest_configure(config: pytest.Config) -> None:
    """Let jupyter_client start forked kernels in this process."""
    forkserver.MODULES.extend(MODULES)
    config.stash[_ORIGINAL] = local_provisioner.launch_kernel
    local_provisioner.launch_kernel = launch_kernel


def pytest_unconfigure(config: pytest.Config) -> None:
    """Let jupyter_client start kernels afresh again, and end the fork server."""
    local_provisioner.launch_kernel = config.stash[_ORIGINAL]
    forkserver.end()
    del forkserver.MODULES[-len(MODULES) :]
