"""Print pip's options for PyTorch's index: `python torch_index.py [URL or default]`.

PyTorch's default build for Linux brings several gigabytes of CUDA. A Linux machine without an
NVIDIA driver gets the CPU build, which is a tenth as large, if its index answers. A given URL is
used unchanged. One line on standard error says what was chosen and how to choose.
"""

import os
import shutil
import sys
import urllib.error
import urllib.request

CPU = "https://download.pytorch.org/whl/cpu"
DEFAULT = "default"  # the word for PyTorch's default build, which for Linux is the one with CUDA
# The driver's files: on Linux, and on Windows' Subsystem for Linux, whose driver is that of
# Windows.
DRIVER = ("/proc/driver/nvidia/version", "/dev/nvidiactl", "/usr/lib/wsl/lib/libcuda.so")
PATIENCE = 5.0  # seconds


def has_driver() -> bool:
    """Return whether this machine has an NVIDIA driver."""
    return shutil.which("nvidia-smi") is not None or any(map(os.path.exists, DRIVER))


def answers(index: str) -> bool:
    """Return whether the index has a page for torch."""
    try:
        with urllib.request.urlopen(
            urllib.request.Request(f"{index}/torch/", method="HEAD"), timeout=PATIENCE
        ):
            return True
    except (OSError, urllib.error.URLError, ValueError):
        return False


def choose(given: str = "") -> tuple[str, str]:
    """Return pip's additional index, or "", and a sentence about the choice."""
    if given == DEFAULT:
        return "", "PyTorch comes in its default build, as you chose."
    if given:
        return given, f"PyTorch comes from {given}, as you chose."
    if sys.platform != "linux":
        return "", "PyTorch comes in its default build."
    if has_driver():
        return (
            "",
            "This machine has an NVIDIA driver: PyTorch comes with CUDA. "
            f"TORCH_INDEX={CPU} takes its CPU build.",
        )
    if answers(CPU):
        return (
            CPU,
            "No NVIDIA driver here: PyTorch comes in its CPU build. "
            f"TORCH_INDEX={DEFAULT} takes the one with CUDA.",
        )
    return (
        "",
        f"No NVIDIA driver here, but {CPU} does not answer: PyTorch comes in its default build, "
        "which may be large.",
    )


if __name__ == "__main__":
    index, sentence = choose(*sys.argv[1:2])
    print(sentence, file=sys.stderr)
    if index:
        print(f"--extra-index-url {index}")
