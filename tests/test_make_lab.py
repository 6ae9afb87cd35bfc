"""What `make lab` finds out: pip's source of PyTorch, and whether JupyterLab already runs."""

import re
import subprocess
import sys
import urllib.error
from pathlib import Path

import pytest
from jupyter_client import KernelManager

from tools import running_lab, torch_index

TOOL = Path(__file__).parents[1] / "tools" / "torch_index.py"

TABLE = "http://localhost:8889/lab/tree/index.ipynb?token=b"


@pytest.fixture
def machine(monkeypatch):
    """A function that imitates a machine: its system, its driver and the index of wheels."""

    def be(platform: str = "linux", driver: bool = False, online: bool = True) -> None:
        monkeypatch.setattr(torch_index.sys, "platform", platform)
        monkeypatch.setattr(torch_index, "has_driver", lambda: driver)
        monkeypatch.setattr(torch_index, "answers", lambda index: online)

    return be


@pytest.mark.parametrize(
    ("what", "expected"),
    [
        ({}, torch_index.CPU),
        ({"driver": True}, ""),
        ({"online": False}, ""),
        ({"platform": "darwin"}, ""),
    ],
    ids=["no driver", "a driver", "offline", "macOS"],
)
def test_the_cpu_build_is_for_linux_without_a_driver(machine, what, expected):
    machine(**what)
    index, sentence = torch_index.choose()
    assert index == expected
    assert sentence.endswith(".") and "PyTorch comes" in sentence


def test_what_is_given_is_taken(machine):
    machine(online=False)
    assert torch_index.choose("https://example.org/simple")[0] == "https://example.org/simple"


def test_the_default_build_can_be_chosen(machine):
    machine()
    assert torch_index.choose(torch_index.DEFAULT) == (
        "",
        "PyTorch comes in its default build, as you chose.",
    )


def test_an_index_that_does_not_answer_is_no_error(monkeypatch):
    def fail(*args, **kwargs):
        raise urllib.error.URLError("no route")

    monkeypatch.setattr(torch_index.urllib.request, "urlopen", fail)
    assert not torch_index.answers(torch_index.CPU)


def test_the_command_prints_options_for_pip_and_a_sentence_for_the_reader():
    done = subprocess.run(
        [sys.executable, TOOL, "https://example.org/simple"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "--extra-index-url https://example.org/simple\n"
    assert "example.org" in done.stderr


def test_a_server_of_the_same_folder_is_found_and_no_other(tmp_path):
    servers = [
        {"root_dir": str(tmp_path / "other"), "url": "http://localhost:8888/", "token": "a"},
        {"root_dir": str(tmp_path / "work"), "url": "http://localhost:8889/", "token": "b"},
    ]
    assert (
        running_lab.address(str(tmp_path / "work" / ".." / "work"), servers, "index.ipynb") == TABLE
    )
    assert running_lab.address(str(tmp_path), servers, "index.ipynb") is None


def test_kernels_are_encrypted_so_that_none_warns_in_the_terminal():
    [policy] = re.findall(
        r"--KernelManager.transport_encryption=(\w+)", (TOOL.parents[1] / "Makefile").read_text()
    )
    assert KernelManager(transport_encryption=policy).transport_encryption == "auto"
