"""The page that `trace` writes, used by wheel and keyboard, with ranks and with our own traces."""

import subprocess
import sys
from pathlib import Path

import pytest

from .accessibility import GRAVE

pytestmark = pytest.mark.browser

TRANSFORMER = """
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group()
torch.cuda.set_device(dist.get_rank())
options = {"activation": "gelu", "batch_first": True, "dropout": 0.0}
layer = nn.TransformerEncoderLayer(64, 4, dim_feedforward=256, **options)
model = DistributedDataParallel(nn.Sequential(layer, nn.Linear(64, 100)).cuda())
optimizer = torch.optim.AdamW(model.parameters())
y = model(torch.randn(8, 32, 64).cuda())  # </script><img src=x onerror=document.title='broken'>
loss = y.square().mean()
loss.backward()
optimizer.step()
dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def trace_page(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("trace")
    (folder / "step.py").write_text(TRANSFORMER)
    command = [
        sys.executable,
        "-m",
        "labkit",
        "trace",
        "--ranks",
        "4",
        "--output",
        "step.html",
        "step.py",
    ]
    subprocess.run(command, cwd=folder, check=True, capture_output=True, timeout=240)
    return folder / "step.html"


@pytest.fixture
def opened_page(browser, trace_page):
    page = browser.new_page()
    wrong = []
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on(
        "console", lambda message: wrong.append(message.text) if message.type == "error" else None
    )
    page.goto(trace_page.as_uri())
    page.locator(".explorer .frame canvas[data-drawn]").wait_for()
    yield page
    page.close()
    assert wrong == []


def canvas_of(page):
    return page.locator(".explorer .frame canvas")


def looked_at(page) -> tuple[float, float]:
    """Return the interval (start, end) that is drawn, when the drawing is complete."""
    page.evaluate(
        "() => new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))"
    )
    return tuple(float(canvas_of(page).get_attribute(f"data-{name}")) for name in ("from", "until"))


def test_the_keyboard_reaches_one_kernel_and_what_is_known_of_it(opened_page):
    whole = looked_at(opened_page)
    opened_page.get_by_label("Find a kernel, a block or a line").fill("gelu")
    opened_page.keyboard.press("Enter")
    chosen = opened_page.locator(".explorer .chosen")
    assert (
        "gelu" in chosen.inner_text()
        and "takes" in chosen.inner_text()
        and "cuda:0 default" in chosen.inner_text()
    )
    # a line of the script, as text
    assert "step.py:13" in chosen.inner_text() and "<img src=x onerror=" in chosen.inner_text()
    start, end = looked_at(opened_page)
    assert end - start < (whole[1] - whole[0]) / 20
    canvas_of(opened_page).focus()
    opened_page.keyboard.press("+")
    assert looked_at(opened_page)[1] - looked_at(opened_page)[0] < 0.75 * (end - start)
    opened_page.keyboard.press("ArrowRight")
    assert looked_at(opened_page)[0] > start
    before = chosen.inner_text()
    opened_page.keyboard.press(".")
    assert chosen.inner_text() != before
    opened_page.keyboard.press("0")
    assert looked_at(opened_page) == whole
    assert opened_page.title().startswith("GPU memory and time of")


def test_the_wheel_zooms_to_what_is_under_the_pointer_which_is_told(opened_page):
    place = opened_page.evaluate(
        """() => {
            const explorer = document.querySelector(".explorer").explorer;
            const lane = explorer.lanes[0];
            const lengths = [...lane.end].map((end, index) => end - lane.start[index]);
            const longest = lengths.indexOf(Math.max(...lengths));
            const middle = (lane.start[longest] + lane.end[longest]) / 2;
            return { x: explorer.x(middle), y: lane.top + 12, name: lane.title(longest) };
        }"""
    )
    before = looked_at(opened_page)
    at = {"x": place["x"], "y": place["y"]}
    canvas_of(opened_page).hover(position=at)
    opened_page.mouse.wheel(0, -400)
    assert looked_at(opened_page) == before  # one can scroll past it
    canvas_of(opened_page).click(position=at)
    for _ in range(4):
        opened_page.mouse.wheel(0, -400)
    start, end = looked_at(opened_page)
    assert end - start < (before[1] - before[0]) / 20
    opened_page.mouse.move(0, 0)
    canvas_of(opened_page).hover(position=at)
    tip = opened_page.locator(".explorer .tip")
    assert (
        tip.is_visible()
        and place["name"] in tip.inner_text()
        and "takes" in tip.inner_text()
        and "line" in tip.inner_text()
    )


def test_dragging_moves_it(opened_page):
    opened_page.get_by_role("button", name="Zoom in").click()
    start, _ = looked_at(opened_page)
    box = canvas_of(opened_page).bounding_box()
    opened_page.mouse.move(box["x"] + 600, box["y"] + 40)
    opened_page.mouse.down()
    opened_page.mouse.move(box["x"] + 500, box["y"] + 40, steps=4)
    opened_page.mouse.up()
    assert looked_at(opened_page)[0] > start


LARGEST_BLOCK = """() => {
    const explorer = document.querySelector(".explorer").explorer;
    const lane = explorer.lanes.find(lane => lane.place);
    const index = lane.size.indexOf(Math.max(...lane.size));
    const [top, bottom] = lane.rows(index), [start, end] = lane.extent(index);
    const y = lane.top + (top + bottom) / 2 * lane.height;
    return { x: explorer.x((start + end) / 2), y, share: bottom - top };
}"""


def test_a_block_is_linked_with_the_line_that_made_it(opened_page):
    found = opened_page.evaluate(LARGEST_BLOCK)
    at = {"x": found["x"], "y": found["y"]}
    canvas_of(opened_page).hover(position=at)
    tip = opened_page.locator(".explorer .tip").inner_text()
    assert "asked for" in tip and "step.py:" in tip
    canvas_of(opened_page).click(position=at)
    opened_page.mouse.move(0, 0)
    chosen = opened_page.locator(".explorer .chosen")
    assert chosen.locator("dl").inner_text() == tip
    chosen.locator("summary").click()
    assert chosen.locator("li", has_text="step.py:").is_visible()


def test_a_line_of_the_table_leads_to_its_blocks_and_they_lead_back(opened_page):
    table = opened_page.get_by_role("group", name="cuda:1, 4 ranks")
    row = table.get_by_role("row").filter(has_text="optimizer.step()")
    row.get_by_role("button", name="step.py:16").press("Enter")
    chosen = opened_page.locator(".explorer .chosen")
    assert "cuda:1 blocks" in chosen.inner_text() and "step.py:16" in chosen.inner_text()
    assert canvas_of(opened_page).evaluate("canvas => canvas === document.activeElement")
    first = chosen.locator("dl").inner_text()
    opened_page.keyboard.press("n")
    assert (
        chosen.locator("dl").inner_text() != first
        and "step.py:16" in chosen.locator("dl").inner_text()
    )
    chosen.get_by_role("button", name="Its line in the table").press("Enter")
    assert row.get_by_role("button").evaluate("button => button === document.activeElement")


def test_what_no_line_of_the_table_made_leads_nowhere(opened_page):
    opened_page.evaluate("""() => {
        const { explorer } = document.querySelector(".explorer");
        const lane = explorer.lanes.find(lane => lane.made);
        explorer.choose(lane, 0);
        explorer.tables.rows.length = 0;
        explorer.choose(lane, 0);
    }""")
    assert opened_page.get_by_role("button", name="Its line in the table").count() == 0


def test_blocks_are_zoomed_into_by_keyboard(opened_page):
    before = opened_page.evaluate(LARGEST_BLOCK)
    canvas_of(opened_page).focus()
    opened_page.keyboard.press("t")
    looked_at(opened_page)
    assert opened_page.evaluate(LARGEST_BLOCK)["share"] == pytest.approx(before["share"] / 0.7)
    opened_page.keyboard.press("0")
    assert opened_page.evaluate(LARGEST_BLOCK)["share"] == before["share"]


@pytest.mark.parametrize(
    ("tool", "starts"),
    [("Perfetto", b'{"displayTimeUnit"'), ("PyTorch's memory viewer", b"\x80\x04")],
)
def test_one_click_gives_the_file_that_the_tool_opens(opened_page, tmp_path, tool, starts):
    with opened_page.expect_download() as download:
        opened_page.get_by_role("button", name=f"Download for {tool}").click()
    download.value.save_as(tmp_path / "file")
    assert (tmp_path / "file").read_bytes().startswith(starts)
    assert (
        opened_page.get_by_role("link", name=f"Open {tool}")
        .get_attribute("href")
        .startswith("https://")
    )


@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_everybody_can_read_and_reach_it(opened_page, look, scheme, width):
    from axe_playwright_python.sync_playwright import Axe

    opened_page.set_viewport_size({"width": width, "height": 900})
    opened_page.emulate_media(color_scheme=scheme)
    canvas_of(opened_page).focus()
    opened_page.keyboard.press("ArrowDown")
    look(opened_page, f"trace_page_{scheme}_{width}", canvas_of(opened_page))
    found = Axe().run(opened_page, options={"resultTypes": ["violations"]}).response["violations"]
    assert [
        (each["id"], each["nodes"][0]["html"]) for each in found if each["impact"] in GRAVE
    ] == []
    assert opened_page.evaluate("document.documentElement.scrollWidth") <= width
    assert (
        canvas_of(opened_page).evaluate("canvas => getComputedStyle(canvas).outlineStyle")
        == "solid"
    )


def test_the_picture_is_there_where_scripts_do_not_run(browser, trace_page, tmp_path):
    silent = tmp_path / "silent.html"
    text = trace_page.read_text("utf-8")
    # the page's own rule forbids it
    silent.write_text(text.replace("sha256-", "sha256-A"), "utf-8")
    page = browser.new_page()
    page.goto(silent.as_uri())
    assert (
        page.locator("details[open] figure img").first.is_visible()
        and not page.locator(".explorer").first.is_visible()
    )
    page.close()
