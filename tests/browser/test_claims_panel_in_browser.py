"""The panel of claims in a notebook, used with mouse and keyboard."""

import pytest

from .labs import button, message

pytestmark = pytest.mark.browser

CELLS = (
    "import labkit\n\nlabkit.use(gpus=3)",
    'from gpulessons.lesson_13.labs import ClaimsPanel\n\nClaimsPanel("empy_cache")',
)


def test_a_learner_guesses_filters_and_tries_another(open_cells, look):
    from playwright.sync_api import expect

    page = open_cells("claims_panel", CELLS)
    said = message(page)
    code = page.locator(".widget-html-content pre").first
    outcome = page.locator(".widget-html-content", has_text="Here:").locator("pre").first
    holds, deprecated, wrong = (
        button(page, name) for name in ("It holds", "It is deprecated", "It is false")
    )
    expect(said).to_contain_text("First guess")
    expect(code).to_contain_text("torch.cuda.empy_cache()")
    holds.click()
    expect(said).to_contain_text("No: it has a typo. A letter is missing.")
    expect(outcome).to_contain_text(
        "AttributeError: module 'torch.cuda' has no attribute 'empy_cache'"
    )
    look(page, "claims_guessed", said)

    page.get_by_label("Article:").select_option(label="Speed Up your Algorithms Part 1 — PyTorch")
    page.get_by_label("Verdict:").select_option(label="deprecated")
    claims = page.get_by_label("Claim:")
    expect(claims.locator("option")).to_have_count(3)
    claims.select_option(label="memory_cached")
    expect(code).to_contain_text("torch.cuda.memory_cached()")
    expect(said).to_contain_text("First guess")
    deprecated.focus()
    page.keyboard.press("Enter")
    expect(said).to_contain_text("Right: it is deprecated.")
    expect(outcome).to_contain_text("FutureWarning")

    page.get_by_label("Article:").select_option(label="Using Shared GPU Memory with PyTorch")
    expect(said).to_contain_text("No claim of this article has this verdict")
    expect(wrong).to_be_disabled()
    page.get_by_label("Verdict:").select_option(label="holds")
    claims.select_option(label="no copy between processes")  # which runs in processes of its own
    wrong.click()
    expect(said).to_contain_text("No: it holds.")
    expect(outcome).to_contain_text("[1.0, 1.0, 1.0, 1.0]")
    look(page, "claims_alone", said)
