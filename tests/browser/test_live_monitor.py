"""The monitor in a notebook: what it shows while cells run and between them."""

import re

import pytest
from labs import button

pytestmark = pytest.mark.browser

CELLS = (
    "import asyncio\nimport threading\nimport time\n\nimport ipywidgets\nimport torch",
    "import labkit\n\nlabkit.use(gpus=2, like='H200', values=False)\nmonitors = []",
    "monitors.append(labkit.widgets.Monitor())\ndisplay(monitors[-1], monitors[-1])",
    # What a learner would do in further cells, at the press of a button.
    "def work():\n"
    "    x = torch.ones(65536, 32768, device='cuda')\n"
    "    for _ in range(10):\n"
    "        x.T @ x\n"
    "        time.sleep(0.1)\n"
    "    torch.cuda.synchronize()\n\n\n"
    "def offer(name, action):\n"
    "    button = ipywidgets.Button(description=name)\n"
    "    button.on_click(lambda _: action())\n"
    "    return button\n\n\n"
    "async def count():\n"
    "    while True:\n"
    "        threads = [thread for thread in threading.enumerate() if thread.name == 'labkit readings']\n"
    "        answer.value = f'threads: {len(threads)}, monitors: {len(monitors)}'\n"
    "        await asyncio.sleep(0.1)\n\n\n"
    "answer = ipywidgets.HTML()\n"
    "counting = asyncio.get_running_loop().create_task(count())\n"
    "ipywidgets.VBox([offer('Work', work), offer('Take away', lambda: labkit.use(None)), answer])",
)


FITS = """() => {
    const table = document.querySelector(".labkit-gpus table");
    return table.offsetWidth <= table.closest(".widget-html").clientWidth;
}"""  # asked in one go: the tables are drawn anew twice a second


@pytest.fixture(scope="module")
def page(open_cells_once):
    return open_cells_once("monitor", CELLS)


def test_a_cell_that_is_run_again_leaves_one_thread(page, front_end):
    """The first monitor, displayed no more, rests."""
    from playwright.sync_api import expect

    answer = page.locator(".widget-html-content", has_text="threads: ")
    expect(answer).to_have_text("threads: 1, monitors: 1")
    page.locator(front_end.cell).nth(2).locator(front_end.source).click()
    page.keyboard.press("Shift+Enter")
    expect(answer).to_have_text("threads: 1, monitors: 2")
    expect(page.locator("p[role=status]")).to_have_text(["Watching 2 GPUs."] * 2)


def test_a_learner_watches_a_busy_cell_and_a_machine_that_goes(page, front_end, look):
    from playwright.sync_api import expect

    messages, tables = page.locator("p[role=status]"), page.locator(".labkit-gpus table")
    expect(messages).to_have_text(["Watching 2 GPUs."] * 2)  # displayed twice
    expect(tables).to_have_count(4)
    first = tables.first
    expect(first.locator("caption")).to_have_text("GPU 0: NVIDIA H200, 139.8 GiB")
    expect(first.get_by_role("rowheader")).to_have_text(["memory", "utilization", "power", "temperature"])
    expect(first.get_by_role("cell", name="not modelled")).to_have_count(2)
    expect(page.locator(".labkit-gpus + p").first).to_contain_text("virtual GPU, modelled on NVIDIA H200")
    look(page, "monitor_idle", first)

    button(page, "Work").click()
    memory = first.get_by_role("img", name=re.compile(r"memory of GPU 0: .* GiB in the last 60 s"))
    expect(memory).to_be_visible()
    expect(first.get_by_role("img", name=re.compile("utilization of GPU 0: 0 % to 100 % in the last 60 s"))).to_be_visible()
    look(page, "monitor_worked", first)
    page.set_viewport_size({"width": front_end.narrow, "height": 1000})
    look(page, "monitor_narrow", first)
    page.wait_for_function(FITS)
    page.set_viewport_size({"width": 1200, "height": 1000})

    button(page, "Take away").click()
    expect(messages.first).to_contain_text("No GPU to show: ")
    expect(messages.first).to_contain_text("labkit.use(gpus=1)")
    expect(tables).to_have_count(0)
    look(page, "monitor_none", messages.first)
