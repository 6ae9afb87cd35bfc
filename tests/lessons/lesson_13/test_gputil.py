"""GPUtil, which two claims of the articles are about, can be imported by every Python."""

import subprocess
import sys
import textwrap

import labkit
from gpulessons.lesson_13 import gputil

H200 = (
    "0, GPU-5e4a, 37, 143771, 4, 143151, 570.133.20, NVIDIA H200, 1652923003, Disabled, Enabled, 31"
)

WITHOUT_DISTUTILS = """
    import sys
    GONE = ("distutils", "setuptools", "_distutils_hack")
    class Gone:
        def find_spec(self, name, path=None, target=None):
            if name.split(".")[0] in GONE:
                raise ModuleNotFoundError(f"No module named {name!r}", name=name)
    for name in list(sys.modules):
        if name.split(".")[0] in GONE:
            del sys.modules[name]
    finders = [f for f in sys.meta_path if type(f).__name__ != "DistutilsMetaFinder"]
    sys.meta_path[:] = [Gone(), *finders]
"""


def without_distutils(code: str) -> subprocess.CompletedProcess:
    program = textwrap.dedent(WITHOUT_DISTUTILS) + textwrap.dedent(code)
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", program], capture_output=True, text=True
    )


def test_gputil_itself_needs_distutils():
    result = without_distutils("import GPUtil")
    assert result.returncode == 1 and "No module named 'distutils'" in result.stderr


def test_gputil_works_without_distutils(tmp_path, monkeypatch):
    smi = tmp_path / "nvidia-smi"
    smi.write_text(f'#!/bin/sh\necho "{H200}"\n', encoding="utf-8")
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    result = without_distutils("""
        from gpulessons.lesson_13 import gputil
        print(gputil.load().getGPUs()[0].name)
        import GPUtil
        print(GPUtil.getAvailable())
        print([name for name in sys.modules if name.startswith("distutils")])
        try:
            import distutils
        except ModuleNotFoundError:
            print("distutils is as absent as before")
    """)
    assert result.stderr == ""
    assert result.stdout.splitlines() == [
        "NVIDIA H200",
        "[0]",
        "[]",
        "distutils is as absent as before",
    ]


def test_gputil_shows_a_table_of_virtual_gpus(capsys):
    with labkit.use(gpus=1, like="H200", virtual=True, quiet=True):
        GPUtil = gputil.load()
        (gpu,) = GPUtil.getGPUs()
        assert (gpu.id, gpu.name, gpu.load, gpu.memoryTotal) == (0, "NVIDIA H200", 0, 143156)
        GPUtil.showUtilization()
        assert (
            capsys.readouterr().out
            == "| ID | GPU | MEM |\n------------------\n|  0 |  0% |  0% |\n"
        )
