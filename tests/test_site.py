"""The site, once `make docs` has built it: opened from the disk, without a server."""

import contextlib
import pathlib
import time

import pytest


_SITE = pathlib.Path(__file__).parents[1] / "site"


@pytest.fixture(scope="module")
def site():
    if not (_SITE / "index.html").exists():
        pytest.skip("the site is not built; run `make docs`")
    return _SITE


def test_the_site_has_no_compiled_python(site):
    assert [*site.rglob("__pycache__")] == []


def _widen(browser, width):
    sizes = {"width": width, "height": 1000, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", sizes)


def _count(browser, selector, condition):
    """How many elements meet a condition on `x`."""
    script = f"return [...document.querySelectorAll('{selector}')].filter(x => {condition}).length"
    return browser.execute_script(script)


@pytest.mark.slow  # As it needs Chromium.
def test_the_site_is_searched_from_a_disk(browser, site):
    _widen(browser, 1400)
    browser.get((site / "index.html").as_uri())
    from selenium.common.exceptions import ElementNotInteractableException

    box = browser.find_element("css selector", "input[name=query]")
    deadline = time.monotonic() + 30
    links = []
    while not links and time.monotonic() < deadline:
        time.sleep(0.5)
        with contextlib.suppress(ElementNotInteractableException):  # Not yet laid out.
            box.clear()
            box.send_keys("glossary")
        links = browser.find_elements("css selector", ".md-search-result__link")
    assert any("glossary.html" in link.get_attribute("href") for link in links)


@pytest.mark.slow  # As it needs Chromium.
def test_keys_are_not_broken_and_text_is_as_wide_as_the_page(browser, site):
    browser.get((site / "job_reference.html").as_uri())
    assert _count(browser, "td:first-child code", "x.getClientRects().length > 1") == 0
    _widen(browser, 1600)
    browser.get((site / "index.html").as_uri())
    assert _count(browser, "pre > code", "x.scrollWidth > x.clientWidth") == 0


@pytest.mark.slow  # As it needs Chromium.
@pytest.mark.parametrize("page", ["gallery", "layouts", "accuracy", "notebooks/3*", "notebooks/6*"])
def test_a_narrow_page_does_not_scroll_sideways(browser, site, page):
    _widen(browser, 400)
    (path,) = site.glob(f"{page}.html")
    browser.get(path.as_uri())
    assert browser.execute_script("return document.documentElement.scrollWidth") <= 400
