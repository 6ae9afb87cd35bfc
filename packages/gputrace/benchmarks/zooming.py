"""How long the explorer takes to zoom, in Chromium.

usage: python benchmarks/zooming.py trace.html

The page is one that `trace` or `trace.explore().save()` wrote. A frame counts from the key to the
end of its drawing. The exit status is 1 if half of the frames take longer than 100 ms.
"""

import shutil
import statistics
import sys
from pathlib import Path

from playwright.sync_api import sync_playwright

MOST = 100  # milliseconds
STEPS = 14  # of zooming in and out again
ZOOM = """async ([factor, steps]) => {
    const { explorer } = document.querySelector(".explorer"), frames = [];
    for (let step = 0; step < steps; step++) {
        const begun = performance.now();
        explorer.zoom(factor, explorer.data.end * 0.6);
        await new Promise(done => requestAnimationFrame(() => setTimeout(done)));
        frames.push(performance.now() - begun);
    }
    return frames;
}"""


def main(path: str) -> int:
    """Print how long the frames took, and return the exit status."""
    program = shutil.which("chromium") or shutil.which("google-chrome")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1280, "height": 900})
        page.goto(Path(path).resolve().as_uri())
        page.locator(".explorer .frame canvas[data-drawn]").wait_for()
        frames = []
        for factor in (0.5, 2):
            frames += page.evaluate(ZOOM, [factor, STEPS])
        browser.close()
    middle = statistics.median(frames)
    print(f"{len(frames)} frames: median {middle:.0f} ms, longest {max(frames):.0f} ms")
    return int(middle > MOST)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
