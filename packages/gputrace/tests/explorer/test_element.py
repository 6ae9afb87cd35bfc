"""The explorer's HTML element.

Names of a trace never become HTML. The same trace gives the same bytes. Files to download are
whole.
"""

import base64
import gzip
import json
import pickle
import re

import pytest
import torch

import gputrace
from gputrace import Trace
from gputrace.events import SourceLine
from gputrace.explorer import element

HOSTILE = "</script><img src=x onerror=alert(1)>"


def packed(html: str, identity: str) -> bytes:
    found = re.search(f'<script type="application/gzip" id="{identity}">([^<]*)</script>', html)
    return gzip.decompress(base64.b64decode(found[1]))


@pytest.fixture
def trace(machine) -> Trace:
    with gputrace.record(timeline=True) as trace:
        torch.ones(1000, device="cuda")
    return trace


def test_names_stay_text(trace_of):
    line = SourceLine(f"/home/{HOSTILE}.py", 1, HOSTILE, HOSTILE)
    html = element.element(
        trace_of([(0.0, "segment_alloc", 1, 20), (0.1, "alloc", 1, 2, 0, 1)], stacks=[(), (line,)])
    )
    assert HOSTILE not in html and "onerror" not in html
    assert json.loads(packed(html, "columns"))["lines"][0][2] == HOSTILE


def test_the_files_are_those_that_a_trace_exports(trace, tmp_path):
    html = element.element(trace)
    trace.export_chrome(tmp_path / "trace.json")
    trace.export_snapshot(tmp_path / "memory.pickle")
    assert packed(html, "file-json") == (tmp_path / "trace.json").read_bytes()
    assert pickle.loads(packed(html, "file-pickle")) == pickle.loads(
        (tmp_path / "memory.pickle").read_bytes()
    )
    assert (
        'href="https://ui.perfetto.dev"' in html and 'href="https://pytorch.org/memory_viz"' in html
    )


def test_a_file_that_cannot_be_made_is_not_offered(trace_of):
    html = element.element(trace_of([(0.1, "alloc", 1, 2)], lost=3))
    assert "file-json" not in html and "file-pickle" not in html


def test_the_same_trace_gives_the_same_bytes(trace):
    assert element.element(trace) == element.element(trace)


def test_the_policy_admits_the_script_alone():
    assert "default-src 'none'" in element.policy() and re.search(
        r"script-src 'sha256-[\w+/]{43}='", element.policy()
    )
    assert "</" not in element.script()  # it would end there


def test_scripts_fetch_nothing():
    text = element.script() + element.style()
    assert not re.search(r"https?:|//\w+\.|import |fetch\(|url\(|innerHTML|eval\(", text)
