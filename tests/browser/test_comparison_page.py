"""The page that `trace --compare` writes: everybody can read it, in both themes and narrow."""

import subprocess
import sys
from pathlib import Path

import pytest

from .accessibility import GRAVE

pytestmark = pytest.mark.browser

COMPARED = """
import torch
import gputrace
import virtualgpu

traces = []
for like, width in (("T4", 512), ("A100", 1024)):
    with virtualgpu.use(1, like=like):
        with gputrace.record(timeline=True) as trace:
            model = torch.nn.Linear(512, width).cuda()
            model(torch.ones(64, 512, device="cuda")).square().mean().backward()
        traces.append(trace)
    del model
traces[0].compare(traces[1]).save("comparison.html")
"""


@pytest.fixture(scope="module")
def comparison_page(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("comparison")
    (folder / "compared.py").write_text(COMPARED)
    command = [sys.executable, "compared.py"]
    subprocess.run(command, cwd=folder, check=True, capture_output=True, timeout=240)
    return folder / "comparison.html"


@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_everybody_can_read_it(browser, comparison_page, look, scheme, width):
    from axe_playwright_python.sync_playwright import Axe

    page = browser.new_page()
    page.set_viewport_size({"width": width, "height": 900})
    page.emulate_media(color_scheme=scheme)
    wrong: list[str] = []
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on(
        "console", lambda message: wrong.append(message.text) if message.type == "error" else None
    )
    page.goto(comparison_page.as_uri())
    look(page, f"comparison_page_{scheme}_{width}", page.locator("main"))
    assert "The GPUs differ: before virtual GPU" in page.locator("main > p").inner_text()
    font = "cell => getComputedStyle(cell).fontFamily"
    source = page.get_by_role("cell", name="model = torch.nn.Linear(512, width).cuda()").first
    assert "monospace" in source.evaluate(font)
    found = Axe().run(page, options={"resultTypes": ["violations"]}).response["violations"]
    assert [
        (each["id"], each["nodes"][0]["html"]) for each in found if each["impact"] in GRAVE
    ] == []
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    page.close()
    assert wrong == []
