"""A page about a job: it needs nothing else, says all there is, and works in a browser."""

import dataclasses
import html.parser
import importlib.metadata
import itertools as it
import pathlib
import re
import shlex
import tomllib

import jax
import msgspec
import numpy as np
import pytest

import prism_jax as prism
from prism_jax import report as reports
from prism_jax.analysis import LEVELS
from prism_jax.cli._main import make_parser
from prism_jax.diagnosis import Diagnosis, StepPart
from prism_jax.law import law_table


_ROOT = pathlib.Path(__file__).parents[1]
_JOB = ("megatron-22b-a100-8", ["schedule.num_microbatches=3"])
_EVIL = '<script>alert("1")</script>&'


@pytest.fixture(scope="module")
def report():
    """Of a small job whose texts are hostile."""
    job = prism.load_job(*_JOB)
    assert job.measured is not None
    assert job.model is not None
    measured = msgspec.structs.replace(job.measured, source=_EVIL)
    model = msgspec.structs.replace(job.model, title=_EVIL)
    job = msgspec.structs.replace(job, name=_EVIL, source=_EVIL, measured=measured, model=model)
    commands = {"simulate": f"prism-jax simulate {_EVIL} --samples 320 --seed 5"}
    key = jax.random.key(5)
    options = {"objective": prism.Mean(), "commands": commands, "seed": "5"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("prism_jax.analysis._sensitivity._MOST_GAINS", 3)
        return reports.gather(job, num_samples=320, key=key, **options)


@pytest.fixture(scope="module")
def page(report):
    return reports.html_page(report)


class _Reader(html.parser.HTMLParser):
    """Checks that elements are closed in order, and keeps ids, references and texts."""

    _EMPTY = frozenset({"meta", "link", "input"})

    def __init__(self):
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.ids: list[str] = []
        self.references: list[str] = []
        self.texts: list[str] = []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        for name, value in attrs:
            if name == "id":
                self.ids.append(value or "")
            if name in ("href", "src", "xlink:href"):
                self.references.append(value or "")
        if tag not in self._EMPTY:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        self.handle_endtag(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.append(data)


def _read(page):
    reader = _Reader()
    reader.feed(page)
    assert reader.open == []
    return reader


def test_a_page_is_whole_and_loads_nothing(page):
    read = _read(page)
    assert len(read.ids) == len(set(read.ids))
    assert read.tags.count("svg") == 7  # One in each section that has a figure.
    for reference in read.references:
        assert reference.startswith(("#", "data:"))
        assert not reference.startswith("#") or reference[1:] in read.ids
    assert all(name in read.ids for name in re.findall(r"url\(#([^)]+)\)", page))
    assert "default-src 'none'" in page


def test_text_of_users_is_escaped_on_the_page(page):
    read = _read(page)
    assert read.tags.count("script") == 1
    assert _EVIL not in page
    assert sum(_EVIL in text for text in read.texts) >= 4


def test_a_page_has_all_figures_of_its_report(report, page):
    text = " ".join(_read(page).texts)
    law = report.law
    expected = report.epistemic.intervals(report.levels)
    for cell in it.chain(*law_table(law, report.levels, expected=expected).cells()):
        assert cell in text
    assert f"{100 * report.throughput.mfu:.1f} %" in text
    low, _ = prism.expected_error(report.job).interval(0.9)
    assert f"differ by {100 * (low - 1):+.0f} % to" in text
    for part in report.sensitivity.parts:
        assert part.name in text
    for name in report.memory.ranks[0].parts:
        assert name in text
    for key in prism.data.assumed_keys(report.of):
        assert key.key in text
    for variation in report.of.kernels.variability:
        assert variation.source in text
    assert "320 steps" in text
    assert "--samples 320 --seed 5" in text
    assert importlib.metadata.version("prism-jax") in text
    assert re.search(r"20\d\d-\d\d-\d\d\.", text)
    for start in ("Expect a step of", "Besides compute, ", "Change first: "):
        assert start in text
    assert f"{report.sliders.check.simulated:.5g} s, and" in text
    for slider in report.sliders.sliders:
        assert slider.name in text
    for heading in ("Throughput", "Criticality", "Memory", "One step", "Expected error"):
        assert heading in text


@pytest.mark.parametrize(
    ("measured", "verdict"),
    [
        (1.238, "normal"),
        (1.6, "not normal"),
        (0.9, "not normal"),
        (1.07, "normal"),
        (20, "not normal"),
    ],
)
def test_a_page_with_measured_steps_begins_with_them(report, measured, verdict):
    steps = measured * np.array([0.99, 1.0, 1.0, 1.02])
    normal = verdict == "normal"
    beside = {"predicted": 1.182, "interval_90": (1.07, 1.3), "percentile": 50.0}
    found = Diagnosis(normal, measured, 4, 0.5, (), None, **beside)
    with_measured = dataclasses.replace(
        report, measured=steps, diagnosis=found, tokens=15e12, price=2.0
    )
    text = " ".join(_read(reports.html_page(with_measured)).texts)
    sentence = f"You measured {measured:.4g} s; predicted 1.182 (90 %: 1.07 .. 1.30): {verdict}."
    assert text.index(sentence) < text.index("Expect a step of")
    assert "measured, 4 steps" in reports.html_page(with_measured) or "measured p50" in text
    days = 15e12 / (86_400 * 8 * report.throughput.tokens_per_s_per_gpu)
    for tile in ("15 trillion tokens", f"{days:,.4g} days", f"{2 * 24 * 8 * days:,.0f}"):
        assert tile in text


def test_a_page_with_a_profile_has_its_parts_beside_those_predicted(report):
    parts = (StepPart("gemm", 0.25, 0.5), StepPart("idle: input", None, 0.125))
    page = _read(reports.html_page(dataclasses.replace(report, beside=parts)))
    text = " ".join(page.texts)
    assert "Measured beside predicted" in text
    assert "gemm 250 500" in text
    assert "idle: input - 125" in text


def test_figures_take_the_colours_of_the_page(page):
    for svg in re.findall(r"<svg.*?</svg>", page, re.S):
        assert "var(--ink)" in svg
        assert not re.search(r"#(000000|ffffff|17335f|b5301c|c9d8ee)", svg)


def test_expected_errors_are_those_of_the_docs():
    text = (_ROOT / "docs/accuracy.md").read_text()
    known = tomllib.loads((_ROOT / "prism_jax/report/_accuracy.toml").read_text())
    lines = [f"| {' | '.join(row)} |" for row in (*known["means"], *known["traces"])]
    assert len(lines) > 20
    for line in (*lines, *known["calibrated"]):
        assert line in text


def test_a_page_lists_missing_parts(report):
    why = "interrupted"
    left = dict.fromkeys(("sliders", "sensitivities", "criticality", "timeline"), why)
    none = dict.fromkeys(("sliders", "sensitivity", "criticality", "step", "epistemic"))
    some = dataclasses.replace(report, **none, missing=left)
    page = reports.html_page(some)
    assert _read(page).tags.count("svg") == 3
    assert page.count("Missing: ") == 4


def test_ctrl_c_keeps_the_parts_of_a_report_so_far(report, monkeypatch):
    def interrupted(*arguments, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr("prism_jax.report._gather.sensitivity", interrupted)
    job = prism.load_job(*_JOB)
    found = reports.gather(job, num_samples=320, key=jax.random.key(5))
    assert found.law.num_samples == 320
    assert found.missing.keys() == {"sliders", "sensitivities", "criticality", "timeline"}


def test_ctrl_c_after_the_last_step_of_the_law_ends_the_rest(monkeypatch, ctrl_c):
    from prism_jax.engine._pools import PooledSteps

    errors = PooledSteps.errors

    def interrupt(*arguments):
        ctrl_c()
        return errors(*arguments)

    monkeypatch.setattr(PooledSteps, "errors", interrupt)
    job = prism.load_job(*_JOB)
    found = reports.gather(job, num_samples=320, key=jax.random.key(5))
    assert found.law.num_samples == 320
    left = {"first change", "sliders", "sensitivities", "criticality", "timeline"}
    assert found.missing.keys() == {"law", *left}


def test_a_page_of_a_profile_lists_the_parts_only_jobs_have(report):
    from prism_jax.data import Outline
    from prism_jax.profile import Profile
    from prism_jax.profile._profile import Fitted

    job = prism.load_job("megatron-22b-a100-8")
    fitted = Fitted(num_steps=7, notes=(_EVIL,))
    profile = Profile("traced", job.layout, job.schedule, Outline(), (), (), fitted)
    page = reports.html_page(
        dataclasses.replace(report, of=profile, memory=None, throughput=None, epistemic=None)
    )
    assert "Fitted to 7 steps" in page
    assert "slow_worker" in page
    assert "published runs" not in page
    assert _EVIL not in page


@pytest.fixture
def no_simulation(report, monkeypatch):
    """The command line gives the report that is there, and what it was asked for."""
    asked = []

    def gather(*arguments, **options):
        asked.append(options)
        return report

    monkeypatch.setattr("prism_jax.report.gather", gather)
    monkeypatch.setattr("prism_jax.cli._load.compiled", lambda arguments, job: (None, {}))
    return asked


def test_report_on_the_command_line(no_simulation, report, tmp_path, answered):
    out = tmp_path / "report.html"
    words = ["report", "megatron-22b-a100-8", "--set", "layout.dp=1", "--seed", "3"]
    assert str(out) in answered(
        [*words, "--quantile", "0.9", "--objective", "mean", "--out", str(out)]
    )
    _read(out.read_text())
    (asked,) = no_simulation
    assert asked["objective"] == prism.Mean()
    assert asked["quantile"] == 0.9
    commands = asked["commands"]
    job = "megatron-22b-a100-8 --set layout.dp=1"
    assert commands["simulate"] == (
        f"prism-jax simulate {job} --samples 65536 --seed 3 --sampling auto"
    )
    assert "--samples 8192 --seed 3 --objective mean" in commands["sensitivity"]
    parser, _ = make_parser()
    for command in commands.values():  # Each is one that the command line takes.
        assert parser.parse_args(shlex.split(command)[1:]).run is not None
    found = answered([*words, "--out", str(out), "--force", "--json"])
    assert found["step_time_s"]["mean"] == report.law.mean


@pytest.fixture
def opened(browser, page, tmp_path):
    """The page in the browser, light, which must complain of nothing."""
    path = tmp_path / "report.html"
    path.write_text(page, encoding="utf-8")
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", _media("light"))
    browser.get(path.as_uri())
    yield browser
    assert browser.get_log("browser") == []


def _media(scheme, media=""):
    return {"media": media, "features": [{"name": "prefers-color-scheme", "value": scheme}]}


def _column(browser, table, column):
    script = (
        "return [...document.querySelectorAll('table')[arguments[0]].tBodies[0].rows]"
        ".map(row => row.cells[arguments[1]].dataset.value ?? row.cells[arguments[1]].textContent)"
    )
    return browser.execute_script(script, table, column)


def test_a_browser_draws_all_of_a_page(opened):
    from selenium.webdriver.common.by import By

    assert "script" in opened.title  # As a text.
    figures = opened.find_elements(By.CSS_SELECTOR, "figure svg")
    assert len(figures) == 7
    for figure in figures:
        assert figure.size["width"] > 500
        assert figure.size["height"] > 60
        assert figure.get_attribute("aria-label")
    for wide in (400, 900, 1400):  # What is wide scrolls within its frame.
        sizes = {"width": wide, "height": 1000, "deviceScaleFactor": 1, "mobile": False}
        opened.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", sizes)
        script = "return [document.documentElement.scrollWidth, document.body.scrollWidth]"
        assert max(opened.execute_script(script)) <= wide
    # No word is broken within a table.
    script = (
        "return [...document.querySelectorAll('table, table *')].map(getComputedStyle)"
        ".every(style => style.overflowWrap === 'normal' && style.wordBreak === 'normal')"
    )
    assert opened.execute_script(script)
    # Labels of a figure do not lie on each other: matplotlib lays them out, the browser scales.
    assert opened.execute_script("return document.querySelectorAll('section h2').length") == 11


def test_tables_are_sorted_by_their_buttons(opened):
    from selenium.webdriver.common.by import By

    before = _column(opened, 0, 1)
    buttons = opened.find_elements(By.CSS_SELECTOR, "table:first-of-type thead button")
    headers = opened.find_elements(By.CSS_SELECTOR, "table:first-of-type thead th")
    buttons[1].click()
    numbers = [float(x) for x in _column(opened, 0, 1)]
    assert numbers == sorted(float(x) for x in before)
    assert headers[1].get_attribute("aria-sort") == "ascending"
    buttons[1].click()
    assert [float(x) for x in _column(opened, 0, 1)] == numbers[::-1]
    assert headers[1].get_attribute("aria-sort") == "descending"
    buttons[0].click()
    assert _column(opened, 0, 0) == ["mean", "p5", "p50", "p95", "p99", "std"]
    assert headers[1].get_attribute("aria-sort") is None
    # Of measured figures most are not known: these are last, up and down.
    for _ in range(2):
        buttons[3].click()
        column = _column(opened, 0, 3)
        assert column[0] != ""
        assert set(column[1:]) == {""}


def test_a_keyboard_is_enough(opened):
    from selenium.webdriver.common.by import By
    from selenium.webdriver.common.keys import Keys

    def focused():
        return opened.switch_to.active_element

    body = opened.find_element(By.TAG_NAME, "body")
    body.send_keys(Keys.TAB)
    assert focused().get_attribute("href").endswith("#sliders")
    focused().send_keys(Keys.TAB)
    assert focused().get_attribute("href").endswith("#step-time")
    focused().send_keys(Keys.ENTER)
    for _ in range(3):  # The frame of the first table, and two of its buttons.
        focused().send_keys(Keys.TAB)
    assert focused().text.startswith("predicted")
    outline = opened.execute_script("return getComputedStyle(document.activeElement).outlineWidth")
    assert outline == "3px"
    focused().send_keys(Keys.ENTER)
    rising = [float(x) for x in _column(opened, 0, 1)]
    assert rising == sorted(rising)
    focused().send_keys(Keys.SPACE)
    assert [float(x) for x in _column(opened, 0, 1)] == rising[::-1]


def test_the_law_follows_the_sliders(opened, report):
    from selenium.webdriver.common.by import By
    from selenium.webdriver.common.keys import Keys

    def shown():
        return [
            float(x.text.split()[0]) for x in opened.find_elements(By.CSS_SELECTOR, "dd output")
        ]

    def expected(factor=1.0, **values):
        change = report.sliders.at(values) - report.sliders.law
        law = factor * (report.law.quantile(LEVELS) + change)
        return [
            float(f"{x:.5g}") for x in np.maximum.accumulate(law)[LEVELS.searchsorted([0.5, 0.95])]
        ]

    (setting, *_), (*_, last) = report.settings, report.sliders.sliders
    inputs = opened.find_elements(By.CSS_SELECTOR, ".sliders input")
    assert len(inputs) == len(report.settings) + len(report.sliders.sliders)
    assert shown() == pytest.approx(expected(), rel=2e-5)
    grey, dark = (f"return document.querySelector('path.{x}').getAttribute('d')" for x in _LAWS)
    assert opened.execute_script(grey) == opened.execute_script(dark)

    def move(entry, keys, places, own):
        for _ in range(abs(keys)):
            entry.send_keys(Keys.ARROW_RIGHT if keys > 0 else Keys.ARROW_LEFT)
        value = places[places.index(own) + keys]
        assert f"{value:.3g}" in entry.get_attribute("aria-valuetext")
        return value

    # What can be set multiplies what others add.
    values = [*setting.factors]
    one_on = 1 if setting.own < values[-1] else -1
    factor = setting.factors[move(inputs[0], one_on, values, setting.own)]
    assert shown() == pytest.approx(expected(factor), rel=2e-5)
    both = {last.name: move(inputs[-1], 5, last.positions(), last.own)}
    assert shown() == pytest.approx(expected(factor, **both), rel=2e-5)
    assert opened.execute_script(grey) != opened.execute_script(dark)
    dots = (f"return document.querySelector('circle.{x}').getAttribute('cx')" for x in _LAWS)
    was, now = (float(opened.execute_script(dot)) for dot in dots)
    assert (now > was) == (expected(factor, **both)[1] > expected()[1])
    ends = opened.find_elements(By.CSS_SELECTOR, ".sliders p .faint")[:2]
    assert [end.text for end in ends] == [setting.label(x) for x in (values[0], values[-1])]
    opened.find_element(By.CSS_SELECTOR, ".sliders button").click()
    assert shown() == pytest.approx(expected(), rel=2e-5)


_LAWS = ("own", "moved")
_COLOURS = """
const ink = getComputedStyle(document.body), text = document.querySelector("#law-text_1 use") ||
  document.querySelector("#law-text_1 path");
return [ink.backgroundColor, ink.color, getComputedStyle(text).fill];
"""


def _lightness(colour):
    return sum(int(x) for x in re.findall(r"\d+", colour)[:3]) / 765


def test_colours_are_those_the_system_prefers_and_light_in_print(opened):
    for scheme, media, dark in (("light", "", False), ("dark", "", True), ("dark", "print", False)):
        opened.execute_cdp_cmd("Emulation.setEmulatedMedia", _media(scheme, media))
        paper, ink, figure = map(_lightness, opened.execute_script(_COLOURS))
        assert (paper < 0.2, ink > 0.8, figure > 0.8) == (dark, dark, dark)
        assert abs(paper - ink) > 0.6
    opened.execute_script("dispatchEvent(new Event('beforeprint'))")
    assert (
        opened.execute_script("return document.querySelectorAll('details:not([open])').length") == 0
    )
