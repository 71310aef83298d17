"""What results show of themselves: one screen of text, and a table for notebooks."""

import argparse
import csv
import dataclasses
import html.parser
import io
import json

import jax
import msgspec
import numpy as np
import pytest

import prism_jax as prism
from prism_jax._estimate import Estimate, rounded
from prism_jax._summary import Shown, Table
from prism_jax.analysis import WhatIf
from prism_jax.cli._options import Output
from prism_jax.data._types import Label, Name

from .helpers import made_law, refusal, rich_program
from .test_plot import _criticality, _run_law, _sensitivity


_MANY = [(f"part {i}", float(i), Estimate(1.0, 0.1)) for i in range(100)]


def _results():
    one = Estimate(1.6, 0.01)
    law = made_law()
    ranks = {"rank": np.arange(4), "probability": np.ones(4), "share": np.full(4, 0.25)}
    ranks["standard_error"] = np.full(4, 0.01)
    order, numbers = np.array([1, 0, 2]), {"replica": np.arange(3), "factor": np.ones(3)}
    return {
        "law": law,
        "score": prism.score(law, np.linspace(0.5, 2, 30), key=jax.random.key(0)),
        "job": prism.load_job("gpt3-175b-h100-4096"),
        "program": rich_program(4),
        "placement": prism.placement.Placement(
            order, "p95", "s", one, one, one, one, None, numbers, 100, 7
        ),
        "sensitivity": _sensitivity(),
        "criticality": dataclasses.replace(_criticality(), ranks=ranks),
        "what_if": WhatIf({"mean": one}, {"slow": {"mean": one}}, 1600),
        "run": _run_law(),
        "prediction": prism.predict(prism.load_job("dit-xl-2-a100-8")),
        "many": Table(("part", "value", "figure"), _MANY, "Many", most=20),
    }


@pytest.fixture(scope="module")
def results():
    return _results()


class _Cells(html.parser.HTMLParser):
    def __init__(self, text):
        super().__init__()
        self.open, self.rows = [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.open.append(tag)
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open[-1] in ("td", "th"):
            self.rows[-1][-1] = data


def test_text_fits_a_screen_and_the_table_has_the_same_cells(results):
    for name, result in results.items():
        summary = result if name == "many" else result.summary()
        text, page = summary.text(), summary.html()
        if name != "many":
            assert repr(result) == text
            assert result._repr_html_() == page
        lines = text.splitlines()
        assert 3 <= len(lines) <= 24, name
        assert max(map(len, lines)) <= 140, name
        cells = _Cells(page)
        assert cells.open == [], name
        assert all(cell in text for row in cells.rows for cell in row), name
        assert len({len(row) for row in cells.rows if row}) == 1, name


def test_figures_are_those_of_the_result(results):
    assert "1.600 +- 0.010" in repr(results["placement"])
    assert "2 of them moved" in repr(results["placement"])
    crps, noise = (x["crps_s"] for x in (results["score"].values, results["score"].noise))
    lines = [line.split() for line in repr(results["score"]).splitlines()]
    assert ["crps_s", rounded(crps, noise), rounded(noise, noise)] in lines
    assert "4,096 x H100 SXM (512 nodes)" in repr(results["job"])
    assert "... and 80 more" in results["many"].text()
    found = results["prediction"]
    lines = str(found).splitlines()
    assert [line.split("  ")[0] for line in lines[2:-1]] == [
        name for name, _ in sorted(found.breakdown.items(), key=lambda part: -part[1])
    ]
    assert f"{found.mean:.5g} s" in lines[0]
    assert lines[-1].endswith(f"MFU {100 * found.mfu:.1f} %")
    assert "tokens" not in lines[-1]  # A model without words.


def test_the_mean_of_a_rank_is_not_called_what_can_be_saved(results):
    """Others decide long before a rank takes no time; of kernels nothing is said."""
    found = results["sensitivity"]
    for group, said in (("rank", True), ("stage", True), ("kernel", False)):
        parts = tuple(dataclasses.replace(part, group=group) for part in found.parts)
        text = repr(dataclasses.replace(found, parts=parts))
        assert ("not all of it can be saved" in text) == said
        assert "took no time" not in text
        assert max(map(len, text.splitlines())) <= 140


class _Answer(Shown):
    def headline(self):
        return "it takes 1 s"

    def to_json(self):
        return {"seconds": 1.0}


def test_an_output_is_printed_and_is_json_by_its_parts():
    table = Table(("a",), [{"a": float(i)} for i in range(30)])
    law = made_law()
    output = Output("job", {"n": np.inf, "answer": _Answer()}, ["a line"], None, table, law)
    _, *blocks = texts = [str(block) for block in output.blocks()]
    assert texts[0] == "job"
    assert blocks == ["it takes 1 s\na line", table.text(), law.headline(), law.summary().text()]
    assert output.to_json() == {"n": None, "answer": {"seconds": 1.0}, **law.to_json()}
    printed = {
        form: output.printed(argparse.Namespace(json=form == "json", csv=form == "csv"))
        for form in ("text", "json", "csv")
    }
    assert printed["text"] == "\n\n".join(texts)
    assert json.loads(printed["json"]) == json.loads(json.dumps(output.to_json()))
    assert printed["csv"] == table.csv()


def test_a_result_of_lines_shows_them(results):
    answer = _Answer()
    assert repr(answer) == "it takes 1 s"
    assert answer._repr_html_() == "<pre>it takes 1 s</pre>"
    for name, result in results.items():
        if name not in ("many", "program", "job"):  # These are no answers.
            json.dumps(result.to_json(), allow_nan=False)


def test_names_are_no_markup():
    job = msgspec.structs.replace(prism.load_job("gpt3-175b-h100-4096"), name="<b>mine</b>")
    assert "<b>" not in job._repr_html_()
    assert "&lt;b&gt;mine" in job._repr_html_()


def test_notes_stand_below_the_rows():
    summary = Table(("part", "mean"), [("a", 1.0)], "title", ("Too few <samples>.",))
    assert summary.text().splitlines()[-1] == "Too few <samples>."
    assert summary.html().endswith("<p>Too few &lt;samples&gt;.</p>")


# What erases a line, rings (C0, C1), ends a line, turns the direction of writing, and is not seen.
_CONTROLS = ["\x1b[2K", "\x07", "\x9b31m", "\n", "\r", "\u2028", "\u202e", "\u2066", "\u200b"]


@pytest.mark.parametrize("control", _CONTROLS)
def test_no_name_controls_a_terminal(control):
    name = f"forward{control}compute"
    table = Table((name, "mean"), [{name: name, "mean": 1.0}], name, (name,))
    given = argparse.Namespace(json=False, csv=False)
    printed = Output(f"a line\n{name if control != chr(10) else ''}", table).printed(given)
    for text, lines in ((table.text(), 4), (table.csv(), 2), (printed, 7)):
        assert all(c.isprintable() for line in text.split("\n") for c in line), text
        assert text.count("\n") == lines - 1
    refusal(lambda: msgspec.convert(name, Name), "regex", msgspec.ValidationError)
    refusal(lambda: msgspec.convert(f"compute{control}", Label), "regex", msgspec.ValidationError)


def test_text_is_text_in_a_spreadsheet():
    texts = ["=1+1", "+cmd|' /C calc'!A0", "@sum(a)", "-3 +cmd", "-2.5", "+1e-3", "a=1", "tp2 pp2"]
    rows = [{"name": text, "=x": -1.5} for text in texts]
    read = list(csv.DictReader(io.StringIO(Table(("name",), rows).csv())))
    assert [row["name"] for row in read] == [f"'{text}" for text in texts[:4]] + texts[4:]
    assert [float(row["'=x"]) for row in read] == [-1.5] * len(texts)
