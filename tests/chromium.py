"""Chromium for tests and benchmarks of pages."""

import contextlib
import importlib.util
import os
import shutil
import tempfile

import pytest


@contextlib.contextmanager
def chromium():
    """Chromium without a window; skips where it is not installed."""
    program, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if program is None or driver is None:
        pytest.skip("chromium and chromedriver are not installed; `make browser` installs them")
    if importlib.util.find_spec("selenium") is None:
        pytest.skip("selenium is not installed")
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = program
    words = ["--headless=new", "--disable-gpu", "--disable-dev-shm-usage", "--window-size=1100,900"]
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        words += [f"--user-data-dir={folder}", *["--no-sandbox"] * (os.geteuid() == 0)]
        for word in words:
            options.add_argument(word)
        options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
        opened = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
        yield opened
        opened.quit()
