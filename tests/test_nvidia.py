"""What the three sources say, with drivers and programs faked in every state that learners meet."""

import math
import stat
import subprocess
import sys
import textwrap
import time
import types
from pathlib import Path

import pytest
import torch

import labkit
from labkit import nvidia

MIB = 1 << 20
H200 = "0, NVIDIA H200, GPU-5e4a, 143771, 4, 37, 570.133.20"
# GPUtil's own query has other columns than ours; the fake answers both.
GPUTIL_H200 = "0, GPU-5e4a, 37, 143771, 4, 143151, 570.133.20, NVIDIA H200, 1652923003, Disabled, Enabled, 31"
FAILED = "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver."


@pytest.fixture
def smi(tmp_path, monkeypatch):
    """A function that puts a fake nvidia-smi, a shell script, on an otherwise ordinary PATH."""
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")

    def install(body: str) -> Path:
        script = tmp_path / "nvidia-smi"
        script.write_text(f"#!/bin/sh\n{body}\n", encoding="utf-8")
        script.chmod(script.stat().st_mode | stat.S_IXUSR)
        return script

    return install


def table(ours: str, gputil: str) -> str:
    return f'case "$1" in *gpu_serial*) echo "{gputil}";; *) echo "{ours}";; esac'


@pytest.fixture
def no_smi(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))


# nvidia-smi


def test_smi_reads_its_table(smi):
    smi(f"printf '%s\\n' '{H200}' '1, NVIDIA H200, GPU-77aa, 143771, 1024, 0, 570.133.20'")
    first, second = nvidia.ask_nvidia_smi().gpus
    assert first == nvidia.GPUReading(0, "NVIDIA H200", "GPU-5e4a", 143771 * MIB, 4 * MIB, 0.37, "570.133.20")
    assert (second.index, second.used, second.utilization) == (1, 1024 * MIB, 0.0)


def test_smi_missing(no_smi):
    answer = nvidia.ask_nvidia_smi()
    assert answer.gpus == () and "no nvidia-smi on the PATH" in answer.trouble


@pytest.mark.parametrize(
    ("body", "trouble"),
    [
        (f'echo "{FAILED}"; exit 9', f"exit status 9: {FAILED}"),
        *(
            (f"printf '{text}\\n'", "not its table")
            for text in ("Segmentation fault", "0, NVIDIA H200", "\\377\\376\\000", "a, b, c, d, e, f, g")
        ),
    ],
)
def test_smi_that_gives_no_table(smi, body, trouble):
    smi(body)
    answer = nvidia.ask_nvidia_smi()
    assert answer.gpus == () and trouble in answer.trouble


def test_smi_that_is_no_program(smi):
    smi("").write_bytes(b"\x7fELF not really")
    assert "cannot be run" in nvidia.ask_nvidia_smi().trouble


def test_smi_that_hangs_is_given_up(smi):
    smi("exec sleep 30")
    start = time.monotonic()
    answer = nvidia.ask_nvidia_smi(timeout=0.2)
    assert "did not answer in 0.2 s" in answer.trouble and time.monotonic() - start < 20


@pytest.mark.parametrize(
    ("figures", "read"),
    [
        ("15360 MiB, 3 MiB, 12 %", (15360 * MIB, 3 * MIB, 0.12)),
        *((", ".join([word] * 3), (None,) * 3) for word in ("[N/A]", "[Not Supported]", "N/D", "不支持", "", "nan", "-1")),
    ],
)
def test_smi_figures_with_units_and_words_in_their_place(smi, figures, read):
    smi(f"echo '0, NVIDIA GB10, GPU-1, {figures}, 580.95'")
    (gpu,) = nvidia.ask_nvidia_smi().gpus
    assert (gpu.name, gpu.memory, gpu.used, gpu.utilization) == ("NVIDIA GB10", *read)


# NVML


class FakeNvml(types.ModuleType):
    """Shaped like pynvml: errors are classes of their own under NVMLError."""

    def __init__(self, broken: dict[str, str]):
        super().__init__("pynvml")
        self.NVMLError = type("NVMLError", (Exception,), {})
        self.shut_down = 0
        answers = {
            "nvmlInit": lambda: None,
            "nvmlShutdown": self._shut_down,
            "nvmlDeviceGetCount": lambda: 1,
            "nvmlDeviceGetHandleByIndex": lambda index: index,
            "nvmlDeviceGetMemoryInfo": lambda handle: types.SimpleNamespace(total=1000 * MIB, used=10 * MIB),
            "nvmlDeviceGetUtilizationRates": lambda handle: types.SimpleNamespace(gpu=50),
            "nvmlDeviceGetCudaComputeCapability": lambda handle: (9, 0),
            "nvmlDeviceGetName": lambda handle: b"NVIDIA H200",
            "nvmlDeviceGetUUID": lambda handle: "GPU-1",
            "nvmlSystemGetDriverVersion": lambda: "570.1",
        }
        for name, answer in answers.items():
            setattr(self, name, self._failing(broken[name]) if name in broken else answer)

    def _shut_down(self):
        self.shut_down += 1

    def _failing(self, error: str):
        def fail(*arguments):
            raise type(error, (self.NVMLError,), {})(f"the text of {error}")

        return fail


@pytest.fixture
def nvml(monkeypatch):
    def install(broken: dict[str, str] | None = None) -> FakeNvml:
        fake = FakeNvml(broken or {})
        monkeypatch.setitem(sys.modules, "pynvml", fake)
        return fake

    return install


def test_nvml_reads_all(nvml):
    fake = nvml()
    answer = nvidia.ask_nvml()
    assert answer.trouble == ""
    assert answer.gpus == (nvidia.GPUReading(0, "NVIDIA H200", "GPU-1", 1000 * MIB, 10 * MIB, 0.5, "570.1", (9, 0)),)
    assert fake.shut_down == 1


@pytest.mark.parametrize(
    ("error", "said"),
    [
        ("NVMLError_LibraryNotFound", "no NVIDIA driver"),
        ("NVMLError_DriverNotLoaded", "not loaded"),
        ("NVMLError_LibRmVersionMismatch", "restart the machine"),
        ("NVMLError_Unknown", "the text of NVMLError_Unknown"),
    ],
)
def test_nvml_that_does_not_start(nvml, error, said):
    nvml({"nvmlInit": error})
    answer = nvidia.ask_nvml()
    assert answer.gpus == () and said in answer.trouble


def test_nvml_leaves_open_what_a_gpu_does_not_support(nvml):
    unsupported = ("nvmlDeviceGetMemoryInfo", "nvmlDeviceGetUtilizationRates", "nvmlDeviceGetCudaComputeCapability")
    nvml(dict.fromkeys(unsupported, "NVMLError_NotSupported"))
    (gpu,) = nvidia.ask_nvml().gpus
    assert (gpu.name, gpu.memory, gpu.used, gpu.utilization, gpu.capability) == ("NVIDIA H200", None, None, None, None)


def test_nvml_shuts_down_after_a_lost_gpu(nvml):
    fake = nvml({"nvmlDeviceGetHandleByIndex": "NVMLError_GpuIsLost"})
    answer = nvidia.ask_nvml()
    assert "GpuIsLost" in answer.trouble and fake.shut_down == 1


# GPUtil

WITHOUT_DISTUTILS = """
    import sys
    class Gone:
        def find_spec(self, name, path=None, target=None):
            if name.split(".")[0] in ("distutils", "setuptools", "_distutils_hack"):
                raise ModuleNotFoundError(f"No module named {name!r}", name=name)
    for name in [name for name in sys.modules if name.split(".")[0] in ("distutils", "setuptools", "_distutils_hack")]:
        del sys.modules[name]
    sys.meta_path[:] = [Gone()] + [finder for finder in sys.meta_path if type(finder).__name__ != "DistutilsMetaFinder"]
"""


def without_distutils(code: str) -> subprocess.CompletedProcess:
    program = textwrap.dedent(WITHOUT_DISTUTILS) + textwrap.dedent(code)
    return subprocess.run([sys.executable, "-W", "error", "-c", program], capture_output=True, text=True)


def test_gputil_itself_needs_distutils():
    result = without_distutils("import GPUtil")
    assert result.returncode == 1 and "No module named 'distutils'" in result.stderr


def test_gputil_works_without_distutils(smi):
    smi(table(H200, GPUTIL_H200))
    result = without_distutils("""
        from labkit import nvidia
        print(nvidia.gputil().getGPUs()[0].name)
        import GPUtil
        print(GPUtil.getAvailable())
        print([name for name in sys.modules if name.startswith("distutils")])
        try:
            import distutils
        except ModuleNotFoundError:
            print("distutils is as absent as before")
    """)
    assert result.stderr == ""
    assert result.stdout.splitlines() == ["NVIDIA H200", "[0]", "[]", "distutils is as absent as before"]


def test_gputil_reads(smi):
    smi(table(H200, GPUTIL_H200))
    (gpu,) = nvidia.ask_gputil().gpus
    assert gpu == nvidia.GPUReading(0, "NVIDIA H200", "GPU-5e4a", 143771 * MIB, 4 * MIB, 0.37, "570.133.20")


def test_gputil_without_smi(no_smi):
    assert nvidia.gputil().getGPUs() == []
    answer = nvidia.ask_gputil()
    assert answer.gpus == () and "missing or cannot be run" in answer.trouble


@pytest.mark.parametrize(("unread", "left"), [(" 37,", (143771 * MIB, 4 * MIB, None)), (" 143771,", (None, 4 * MIB, 0.37))])
def test_gputil_leaves_open_what_it_cannot_read(smi, unread, left):
    smi(table("", GPUTIL_H200.replace(unread, " [N/A],")))
    assert any(map(math.isnan, (nvidia.gputil().getGPUs()[0].load, nvidia.gputil().getGPUs()[0].memoryTotal)))
    (gpu,) = nvidia.ask_gputil().gpus
    assert (gpu.memory, gpu.used, gpu.utilization) == left


@pytest.mark.parametrize("output", [FAILED, "0, GPU-5e4a, 37", GPUTIL_H200.replace("143771", "0")])
def test_gputil_that_stumbles(smi, output):
    smi(f'echo "{output}"')
    answer = nvidia.ask_gputil()
    assert answer.gpus == () and "could not read what nvidia-smi printed" in answer.trouble


# All three


@pytest.mark.parametrize(
    ("module", "ask", "trouble"),
    [("pynvml", nvidia.ask_nvml, "nvidia-ml-py is missing"), ("GPUtil", nvidia.ask_gputil, "cannot be imported")],
)
def test_a_package_that_is_missing(monkeypatch, module, ask, trouble):
    monkeypatch.setitem(sys.modules, module, None)
    assert trouble in ask().trouble


def test_a_gputil_that_is_broken_leaves_the_other_answers(monkeypatch, tmp_path, smi, nvml):
    (tmp_path / "GPUtil.py").write_text("raise RuntimeError('not with this Python')")
    monkeypatch.delitem(sys.modules, "GPUtil", raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    smi(table(H200, GPUTIL_H200))
    nvml()
    *answers, gputil = nvidia.ask_all()
    assert [len(answer.gpus) for answer in answers] == [1, 1]
    assert gputil.trouble == "the package GPUtil cannot be imported (not with this Python)"


def test_all_three_on_one_machine(smi, nvml):
    smi(table(H200, GPUTIL_H200))
    nvml()
    answers = nvidia.ask_all()
    assert [(answer.source, len(answer.gpus), answer.trouble) for answer in answers] == [
        ("NVML", 1, ""),
        ("nvidia-smi", 1, ""),
        ("GPUtil", 1, ""),
    ]


def test_gputil_is_not_asked_when_smi_hangs(smi):
    smi("exec sleep 30")
    start = time.monotonic()
    _, smi_answer, gputil_answer = nvidia.ask_all(timeout=0.2)
    assert "did not answer" in smi_answer.trouble and "not asked" in gputil_answer.trouble and time.monotonic() - start < 20


@pytest.mark.gpu
def test_the_sources_agree_on_a_real_gpu():
    nvml, smi, gputil = (answer.gpus[0] for answer in nvidia.ask_all())
    assert nvml.name == smi.name == gputil.name and nvml.uuid == smi.uuid == gputil.uuid
    assert abs(nvml.memory - smi.memory) < MIB and nvml.capability >= (5, 0)


def test_nvml_tells_of_virtual_gpus_too():
    with labkit.use(gpus=2, like="H200", virtual=True, quiet=True):
        answer = nvidia.ask_nvml()
        assert [gpu.name for gpu in answer.gpus] == ["NVIDIA H200"] * 2
        assert answer.gpus[0].memory == torch.cuda.get_device_properties(0).total_memory


def test_gputil_shows_a_table_of_virtual_gpus(capsys):
    with labkit.use(gpus=1, like="H200", virtual=True, quiet=True):
        GPUtil = nvidia.gputil()
        (gpu,) = GPUtil.getGPUs()
        assert (gpu.id, gpu.name, gpu.load, gpu.memoryTotal) == (0, "NVIDIA H200", 0, 143156)
        GPUtil.showUtilization()
        assert capsys.readouterr().out == "| ID | GPU | MEM |\n------------------\n|  0 |  0% |  0% |\n"
