"""Stand-ins for Colab: its module in each kernel, and a fresh runtime without the kit."""

import os
import subprocess
import sys
import venv
from pathlib import Path

MODULE = Path(__file__).parent / "platforms" / "colab"  # holds a stand-in for google.colab


def kernel_settings(folder: Path) -> dict[str, str]:
    """Return variables that make IPython load Colab's module in each kernel.

    IPython's own files are in `folder`.
    """
    startup = folder / "profile_default" / "startup"
    startup.mkdir(parents=True, exist_ok=True)
    (startup / "00_colab.py").write_text("__import__('google.colab')\n")
    paths = [str(MODULE), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {"IPYTHONDIR": str(folder), "PYTHONPATH": os.pathsep.join(paths)}


def runtime(folder: Path) -> Path:
    """Make a Python with all packages of this one, and a folder of its own for new ones."""
    venv.create(folder, with_pip=False)
    python = folder / "bin" / "python"
    ask = "import sysconfig; print(sysconfig.get_path('purelib'))"
    own, shared = (
        subprocess.check_output([program, "-c", ask], text=True).strip()
        for program in (python, sys.executable)
    )
    (Path(own) / "packages_of_colab.pth").write_text(f"{shared}\n")
    return python
