"""The page about a script is complete and well formed, however the script ends."""

import datetime
import json
import os
import pickle
import re
from html.parser import HTMLParser
from types import MappingProxyType

import pytest
import torch
from torch.utils.data import DataLoader

import gputrace
import virtualgpu
from gputrace import report
from gputrace.sources.this_computer import ComputerTime
from virtualgpu.source_lines import SourceLine

MiB = 1 << 20
_VOID = {"meta", "img"}


class Page(HTMLParser):
    """Parser that checks that elements are closed in order, and collects attributes and text."""

    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.text, self.ids = [], [], "", set()
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        if tag not in _VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data if not {"style", "script"} & set(self.open) else ""

    def having(self, tag):
        return [attributes for name, attributes in self.tags if name == tag]


@pytest.fixture
def target(tmp_path):
    return tmp_path / "page.html"


@pytest.fixture
def card():
    with virtualgpu.use(gpus=2, memory="2GiB") as used:
        yield used


def written(target, run, more=MappingProxyType({}), **options):
    """Return the page about what `run` does, and the error that it raised."""
    raised = None
    try:
        report.run_and_report(
            run, "train.py --name '<x> & y'", {"--output": target, **more}, **options
        )
    except BaseException as error:
        raised = error
    return Page(target.read_text("utf-8")), raised


def test_a_page_holds_all_that_it_shows(card, target, capsys):
    kept = []

    def run():
        kept.append(torch.zeros(MiB, device="cuda"))
        torch.zeros(2 * MiB, device="cuda")

    before = datetime.date.today()
    page, raised = written(target, run)
    assert raised is None
    assert capsys.readouterr().err == f"gputrace trace: wrote {target.as_uri()}\n"
    days = (before, datetime.date.today())  # midnight may lie between
    assert any(day.isoformat() in page.text.partition("Ended")[0] for day in days)
    assert (
        "train.py --name '<x> & y'" in page.text
        and "12 MiB allocated on cuda:0, made by test_report.py" in page.text
    )
    assert (
        "virtual GPU, modelled on NVIDIA Tesla T4" in page.text
        and "on the model's clock" in page.text
    )
    assert "torch.zeros(2 * MiB" in page.text and "Nothing that the script" not in page.text
    assert "kept" in page.text.partition("Alive at the end")[2]
    images = page.having("img")
    assert len(images) == 3 and all(
        image["src"].startswith("data:image/png;base64,") and len(image["alt"]) > 40
        for image in images
    )
    policy = next(meta["content"] for meta in page.having("meta") if meta.get("http-equiv"))
    assert "default-src 'none'" in policy
    assert "script-src 'sha256-" in policy and [
        script for script in page.having("script") if script.get("type") != "application/gzip"
    ] == [{}]
    assert not {"link", "iframe"} & {tag for tag, _ in page.tags}
    assert [link["href"] for link in page.having("a")] == [
        "https://ui.perfetto.dev",
        "https://pytorch.org/memory_viz",
    ]
    assert page.having("html") == [{"lang": "en"}] and len(page.having("title")) == 1
    # What may be wider than the page is reached with the keyboard
    wide = [part for part in page.having("div") if "overflow-x: auto" in part.get("style", "")]
    assert len(wide) >= 3 and all(
        part["tabindex"] == "0" and part["role"] == "group" and part["aria-label"] for part in wide
    )


def test_the_page_says_how_long_loading_a_batch_took(card, target):
    def run():
        for batch in DataLoader(torch.ones(6, 4), batch_size=2):
            batch.cuda().sum()

    page, _ = written(target, run)
    said = page.text.partition("Loading a batch")[2]
    assert re.match(
        r".* on this computer, measured \(median of 3 calls of the DataLoader's __next__ at "
        r"test_report\.py:\d+\)\. The rest of a step takes .* on the model's clock",
        said,
    )


def test_the_page_shows_the_time_outside_torch(card, target, trace_of):
    line = SourceLine("/home/me/data.py", 9, "parse", "words = line.split()")
    trace = trace_of([], computers=[ComputerTime(10.0, [(line, 4.0)], [])])
    text = report.page(trace, "train.py", "at its last line", datetime.date.today())
    shown = Page(text).text
    assert "Slowest linedata.py:9 words = line.split() took 4 s outside torch" in shown
    assert "if a line calls torch directly and waits for no GPU" in shown
    assert "linetimesharesourcedata.py:94 s40%words = line.split()" in shown


def test_a_recording_in_a_notebook_measures_nothing_of_this_computer(card):
    with gputrace.record() as trace:
        torch.zeros(1, device="cuda")
    assert trace.computers == []
    text = report.page(trace, "train.py", "at its last line", datetime.date.today())
    assert "Time outside torch" not in text and "Loading a batch" not in text


def test_every_device_has_its_part(card, target):
    def run():
        for index in range(2):
            torch.zeros(MiB, device=f"cuda:{index}")

    page, _ = written(target, run)
    assert re.findall(r"All devices|cuda:\d(?=Peak|\n|The figure)", page.text)[0] == "All devices"
    assert [
        heading
        for heading in ("cuda:0", "cuda:1")
        if f"<h2>{heading}</h2>" in target.read_text("utf-8")
    ] == ["cuda:0", "cuda:1"]
    assert len(page.having("img")) == 6


def test_a_script_that_uses_no_gpu(card, target):
    page, _ = written(target, lambda: None)
    assert "requested no memory on a GPU" in page.text and page.having("img") == []


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (ValueError("a <b>\nand more"), "by ValueError: a <b> and more"),
        (ZeroDivisionError(), "by ZeroDivisionError"),
        (KeyboardInterrupt(), "by Ctrl-C"),
        (SystemExit(3), "by sys.exit(3)"),
        (SystemExit(), "at its last line"),
        (RuntimeError("long " * 1000), "long …"),
    ],
)
def test_the_page_is_written_however_the_script_ends(card, target, error, said):
    def run():
        torch.zeros(MiB, device="cuda")
        raise error

    page, raised = written(target, run)
    assert (
        raised is error
        and said in page.text
        and len(page.text) < 10_000
        and "4 MiB allocated on cuda:0" in page.text
    )


def test_running_out_of_memory_is_explained(card, target, capsys):
    page, raised = written(target, lambda: torch.zeros(1 << 30, device="cuda"))
    told = (
        f"gputrace trace: wrote {target.as_uri()}\ngputrace trace: Out of memory on cuda:0: "
        f"larger than the GPU\n"
    )
    assert capsys.readouterr().err == told
    assert type(raised) is torch.OutOfMemoryError
    assert (
        "Why the memory ran out" in page.text
        and "Out of memory on cuda:0: larger than the GPU." in page.text
    )
    assert "segments when the memory ran out" in page.text


def test_lost_events_are_told(card, target):
    def run():
        for _ in range(20):
            torch.zeros(MiB, device="cuda")

    page, _ = written(target, run, max_events=10)
    assert (
        "events were lost" in page.text
        and "--max-events" in page.text
        and len(page.having("img")) == 2
    )
    assert "Nothing that the script allocated after the lost events was alive" in page.text


def test_many_survivors_are_folded(card, target):
    kept = []
    page, _ = written(
        target,
        lambda: kept.extend(torch.zeros(1000 + 128 * index, device="cuda") for index in range(15)),
    )
    assert "15 tensors with 112.5 KiB: the" in page.text and "5 more rows" in page.text


def test_survivors_that_are_alike_have_one_row(card, target):
    kept = []
    page, _ = written(
        target, lambda: kept.extend(torch.zeros(1000, device="cuda") for _ in range(15))
    )
    assert (
        "15 tensors with 60 KiB: the" in page.text
        and "15 × 4 KiB" in page.text
        and "14 more like this" in page.text
    )
    assert "more row" not in page.text


def without_addresses(path):
    """Return the page without the file for PyTorch's viewer, whose addresses differ by run."""
    text, found = re.subn(r'(id="file-pickle">)[^<]+', r"\1", path.read_text("utf-8"))
    assert found == 1
    return text


def test_the_same_page_every_time(card, target):
    def run():
        torch.cuda.empty_cache()
        torch.zeros(MiB, device="cuda")

    run()
    pages = set()
    for _ in range(2):
        written(target, run)
        pages.add(without_addresses(target))
    assert len(pages) == 1


def test_a_forked_child_writes_no_page(card, target, monkeypatch):
    report.run_and_report(
        lambda: monkeypatch.setattr(os, "getpid", lambda: 0), "fork.py", {"--output": target}
    )
    assert not target.exists()


def test_where_a_page_may_go(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert report.default_path("some/where/train.py").name == "train-memory.html"
    (tmp_path / "old.html").write_text("old")
    assert report.checked("old.html") == tmp_path / "old.html"
    with pytest.raises(ValueError, match="expected a file such as .*, got a directory"):
        report.checked(tmp_path)
    with pytest.raises(ValueError, match="there is no directory"):
        report.checked("absent/page.html")
    (tmp_path / "train.py").write_text("the script")
    with pytest.raises(
        ValueError, match=r"this file exists and does not end in .html, .* such as train.html"
    ):
        report.checked("train.py")
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(ValueError, match="no permission to write"):
        report.checked("page.html")


def test_a_page_that_cannot_be_written_leaves_the_scripts_end_alone(card, tmp_path, capsys):
    target = tmp_path / "gone" / "page.html"  # its directory went away meanwhile

    def run():
        raise SystemExit(4)

    with pytest.raises(SystemExit) as raised:
        report.run_and_report(run, "train.py", {"--output": target})
    assert (
        raised.value.code == 4 and "could not be written: No such file" in capsys.readouterr().err
    )
    assert not report.run_and_report(lambda: None, "train.py", {"--output": target})


def test_a_recording_that_cannot_begin_says_why(target, monkeypatch):
    def refuse(max_events, timeline):
        raise RuntimeError("the driver does not answer")

    monkeypatch.setattr(report, "record_and_measure", refuse)
    with pytest.raises(RuntimeError, match="the driver does not answer"):
        report.run_and_report(lambda: None, "train.py", {"--output": target})
    assert not target.exists()


def test_the_page_says_what_ran_when_and_how_long(card, target):
    def run():
        x = torch.ones(MiB).cuda()
        (x + x).sum().item()

    page, _ = written(target, run)
    part = page.text.partition("What ran when")[2]
    assert (
        "cuda:0" in part
        and "the host waited" in part
        and "kernels" in part.partition("Line by line")[0]
    )
    assert any(
        "worked" in image["alt"] and "kernels and copies" in image["alt"]
        for image in page.having("img")
    )


def test_time_is_told_by_line_and_by_kernel(card, target):
    def run():
        x = torch.ones(2048, 2048, device="cuda")
        for _ in range(3):
            x @ x

    page, _ = written(target, run)
    by_line = page.text.partition("The devices' time by line")[2]
    first = by_line.partition("source")[2].partition("x @ x")[0]
    assert "test_report.py" in first and "3" in first and "%" in first  # the products take most
    by_kernel = page.text.partition("time by kernel or copy")[2].partition("cuda:0")[0]
    assert by_kernel.index("mm") < by_kernel.index("fill")


def test_a_table_without_rows_is_left_out(card, target):
    def run():
        kept.append(torch.empty(1000, device="cuda"))

    kept: list[torch.Tensor] = []
    page, _ = written(target, run)
    assert "The devices' time by line" not in page.text and "cuda:0" in page.text


def test_the_story_of_a_race_shows_code_as_code(card, target):
    def run():
        side = torch.cuda.Stream()
        x = torch.ones(2048, 2048, device="cuda")
        y = x @ x
        with torch.cuda.stream(side):
            y + 1

    with pytest.warns(virtualgpu.RaceWarning):
        written(target, run)
    text = target.read_text("utf-8")
    assert "<code>add</code> on stream 1 of cuda:0" in text and "`" not in text.split("<script>")[0]


def test_files_for_other_viewers_are_written_too(card, target, tmp_path, capsys):
    files = {"--chrome": tmp_path / "ran.json", "--snapshot": tmp_path / "memory.pickle"}
    written(target, lambda: torch.ones(MiB, device="cuda"), files)
    assert {"fill_", "memory, bytes"} & {
        event["name"] for event in json.loads(files["--chrome"].read_text())["traceEvents"]
    }
    assert pickle.loads(files["--snapshot"].read_bytes())["device_traces"]
    assert capsys.readouterr().err.splitlines()[1:] == [
        f"gputrace trace: wrote {path.as_uri()}" for path in files.values()
    ]

    def many():
        for _ in range(20):
            torch.zeros(MiB, device="cuda")

    written(target, many, files, max_events=10)
    assert "memory.pickle could not be written: 50 events were lost" in capsys.readouterr().err


def test_a_page_of_memory_alone_says_why(card, target):
    page, _ = written(target, lambda: torch.ones(MiB, device="cuda"), timeline=False)
    assert "Not known: it was asked for memory alone" in page.text and len(page.having("img")) == 2
