"""What is wrong with a page is found, and said."""

import pytest
from keyboard import walk
from pages import make_notebook, opened

pytestmark = pytest.mark.browser

PIXEL = "data:image/gif;base64,R0lGODlhAQABAAAAACH5BAEKAAEALAAAAAABAAEAAAICTAEAOw=="
HTML = (
    "<p style='color: #999999; background: white'>pale</p>",
    f"<svg width='20' height='20' role='img'></svg><img src='{PIXEL}' width='20' height='20'>",
    f"<img src='{PIXEL}' width='20' height='20' alt='figure 1'>",
    "<script>console.error('something broke')</script>",
    "<div id='panel'><button>1</button><br><button style='position: relative; top: -40px'>2</button>"
    "<input style='outline: none; border: none' aria-label='unseen'><a tabindex='0' href='#'>3</a></div>",
)
CELLS = ("from IPython.display import HTML", *(f"HTML({html!r})" for html in HTML))


def test_each_fault_is_told(server, browser, folder):
    with pytest.raises(AssertionError) as raised, opened(server, browser) as open_and_run:
        page = open_and_run(make_notebook(folder, "faulty", CELLS))
        panel = page.locator("#panel")
        panel.locator("button").first.focus()
        page.keyboard.press("Shift+Tab")
        assert sorted(fault.split(":")[0] for fault in walk(page, panel)) == ["cannot be seen there", "reached too late"]
    told = str(raised.value)
    assert "faulty.ipynb: something broke" in told
    assert "svg-img-alt (serious)" in told
    assert "a picture whose words are “Image”" in told and "a picture whose words are “figure 1”" in told  # JupyterLab names it so
    assert "Light: color-contrast (serious)" in told and "Dark: color-contrast (serious)" in told
