"""`trace.explore()` in a notebook: its frame, its keys, and few boxes for 100,000 spans."""

import pytest

pytestmark = pytest.mark.browser

CELLS = (
    "import torch\nimport labkit\nlabkit.use(gpus=1)",
    "with labkit.record(timeline=True) as trace:\n    x = torch.ones(512, 512, device='cuda')\n"
    "    y = (x @ x).relu()",
    "trace.explore()",
)
MANY = 100_000
MOST = 12_000  # boxes of one drawing: some for each of the pixels, whatever the number of spans
DRAW = """() => {
    const explorer = document.querySelector(".explorer").explorer;
    explorer.draw();
    return explorer.pen.drawn;
}"""


def test_a_notebook_shows_it(open_cells, look):
    page = open_cells("explore", CELLS)
    frame = page.frame_locator("iframe.labkit-explorer")
    canvas = frame.locator(".frame canvas[data-drawn]")
    canvas.wait_for()
    canvas.focus()
    for key in ("ArrowDown", "ArrowDown", "."):
        page.keyboard.press(key)
    frame.locator(".chosen", has_text="line").wait_for()
    assert "default stream" in frame.locator(".chosen").inner_text()
    frame.get_by_label("Find a kernel, a block or a line").fill("relu")
    page.keyboard.press("Enter")
    assert "y = (x @ x).relu()" in frame.locator(".chosen").inner_text()
    assert not page.locator(".labkit-explored img").is_visible()  # it is folded
    look(page, "explore", page.locator("iframe.labkit-explorer"))
    with page.expect_download() as download:
        frame.get_by_role("button", name="Download for Perfetto").click()
    assert download.value.suggested_filename == "trace.json"


@pytest.fixture(scope="module")
def many_spans(tmp_path_factory):
    """A page of 100,000 spans and as many blocks."""
    import numpy as np

    from gputrace.events import ACTION_OF, Events, MemoryEvent
    from gputrace.replay import complete
    from gputrace.spans import KERNEL, Execution, Spans, Waits
    from gputrace.trace import Trace
    from virtualgpu.allocator.settings import Settings

    spans = Spans.of(
        (n * 1e-6, 0.9e-6, 0, n % 4, KERNEL, f"kernel {n % 50}", 0, -1) for n in range(MANY)
    )
    kept = [(n * 1e-6, "alloc", (n % 4096) * 4096) for n in range(MANY)]
    freed = [
        ((n + 4000) * 1e-6, kind, (n % 4096) * 4096)
        for n in range(MANY - 4000)
        for kind in ("free_requested", "free_completed")
    ]
    rows = [(0.0, "segment_alloc", 0), *kept, *freed]
    events = Events.of(
        MemoryEvent(
            at,
            0,
            0,
            ACTION_OF[kind],
            address + (1 << 30),
            0,
            1 << 24 if kind == "segment_alloc" else 4096,
            0,
        )
        for at, kind, address in rows
    )
    trace = Trace(
        events=complete(events, [], Settings()),
        stacks=[()],
        start=[],
        settings=Settings(),
        phases=[],
        used=[],
        allocated_at_end={0: 4000 * 4096},
        reserved_at_end={0: 1 << 24},
        totals={0: 1 << 30},
        seconds=MANY * 1e-6,
        lost=0,
        error="",
        badge="made for a test",
        origin={},
        census=None,
        execution=Execution(spans, Waits.of([]), []),
    )
    assert (
        len(trace.spans) == MANY
        and np.count_nonzero(trace.events.action == ACTION_OF["alloc"]) == MANY
    )
    path = tmp_path_factory.mktemp("many") / "many.html"
    trace.explore().save(path)
    return path


def test_a_hundred_thousand_spans_and_blocks_cost_a_drawing_no_more_boxes_than_it_has_pixels(
    browser, many_spans
):
    assert many_spans.stat().st_size < 5e6
    page = browser.new_page()
    page.goto(many_spans.as_uri())
    page.locator(".explorer .frame canvas[data-drawn]").wait_for()
    assert (
        page.evaluate(
            "document.querySelector('.explorer').explorer.lanes.reduce((sum, lane) => sum + "
            "lane.count, 0)"
        )
        > 2 * MANY
    )
    frames = []
    for _ in range(12):  # from all of it down to single kernels
        frames.append(page.evaluate(DRAW))
        page.evaluate("document.querySelector('.explorer').explorer.zoom(0.4)")
    assert max(frames) < MOST
    page.close()
