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


def test_each_fault_is_told(server, browser, folder, front_end):
    with pytest.raises(AssertionError) as raised, opened(server, browser) as open_and_run:
        page = open_and_run(make_notebook(folder, "faulty", CELLS))
        panel = page.locator("#panel")
        panel.locator("button").first.focus()
        front_end.select_cell(page, page.locator(front_end.cell).nth(len(HTML)))
        assert sorted(fault.split(":")[0] for fault in walk(page, panel)) == ["cannot be seen there", "reached too late"]
    told = str(raised.value)
    assert "faulty.ipynb: something broke" in told
    assert "svg-img-alt (serious)" in told
    assert told.count("a picture whose words are") == 2 * len(front_end.themes) and "a picture whose words are “figure 1”" in told
    assert all(f"{theme}: color-contrast (serious)" in told for theme in front_end.themes)
