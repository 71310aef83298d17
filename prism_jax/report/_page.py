"""A self-contained HTML page, which needs no network and no other file."""

import os

from .._files import written_whole
from .._misc import counted
from .._summary import Table
from ..data import layout_and_order
from ._assumptions import assumptions, expected_error, notes
from ._gather import Report
from ._html import Markup, check_matplotlib, join, resource, table, tag
from ._sections import sections
from ._sliders import headline, tiles


# A browser that obeys this policy loads nothing from elsewhere.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"

# Figures that a profile does not have.
_OF_JOBS = ("throughput, breakdown", "memory", "assumptions")


def save_html(report: Report, path: str | os.PathLike[str]) -> None:
    """Writes a report as one page of HTML.

    **Arguments:**

    - `report`: from `gather`.
    - `path`: the file, which is written whole or not at all.

    **Raises:**

    `OSError` if the file cannot be written; `ValueError` if matplotlib is not installed.
    """
    text = html_page(report)
    with written_whole(path) as partial:
        partial.write_text(text, encoding="utf-8")


def html_page(report: Report) -> str:
    """The page of a report.

    **Arguments:**

    - `report`: from `gather`.

    **Returns:**

    HTML that contains its figures, its style and its script. Buttons in the headers sort tables.
    Colours follow the preference of the reader's system, and are light in print.

    **Raises:**

    `ValueError` if matplotlib is not installed.
    """
    check_matplotlib()
    shown = {
        **sections(report),
        "Expected error": expected_error(report),
        "Assumptions": assumptions(report),
        "How each figure was obtained": _origin(report),
    }
    links = [tag("li", tag("a", name, href=f"#{_anchor(name)}")) for name in shown]
    main = [
        tag("section", tag("h2", name, id=f"h-{_anchor(name)}"), content, id=_anchor(name))
        for name, content in shown.items()
    ]
    order = layout_and_order(report.of.layout, report.of.schedule)
    about = f"{order}, {report.num_ops:,} ops a replica"
    body = tag(
        "body",
        tag("header", tag("h1", report.of.name), tag("p", about, class_="faint")),
        headline(report),
        _tiles(report),
        *(tag("p", note, class_="note") for note in (*notes(report.of), *_interrupted(report))),
        tag("nav", tag("ul", *links), aria_label="Sections"),
        tag("main", *main),
        tag("script", Markup(resource("_page.js") + resource("_sliders.js"))),
    )
    head = tag(
        "head",
        Markup('<meta charset="utf-8">'),
        Markup('<meta name="viewport" content="width=device-width, initial-scale=1">'),
        Markup(f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'),
        Markup('<link rel="icon" href="data:,">'),
        tag("title", f"{report.of.name}: step time"),
        tag("style", Markup(resource("_page.css"))),
    )
    return f"<!DOCTYPE html>\n{tag('html', head, body, lang='en')}\n"


def _anchor(name: str) -> str:
    return name.lower().replace(" ", "-")


def _tiles(report: Report) -> Markup:
    law, found = report.law, report.throughput
    figures = {"mean step time": f"{law.mean:.5g} s"}
    figures |= {f"p{100 * q:g}": f"{law.quantile(q):.5g} s" for q in (0.5, 0.95, 0.99)}
    if found is not None:
        if found.mfu is not None:
            figures["MFU"] = f"{100 * found.mfu:.1f} %"
        figures["tokens per GPU"] = f"{found.tokens_per_s_per_gpu:,.0f} /s"
        figures["fullest GPU"] = f"{found.memory_bytes / 1e9:.1f} GB"
    return tiles(figures)


def _interrupted(report: Report) -> list[str]:
    law = report.law
    about = f"Interrupted after {law.num_samples:,} of {law.requested:,} steps"
    return [f"{about}; the law has only these steps."] * ("law" in report.missing)


def _origin(report: Report) -> Markup:
    """The command or the function, the samples and the seed of each figure; versions and date."""
    origin, law = report.origin, report.law
    how = f"{law.sampling} sampling, replicas: {law.replicas}"
    every, some = law.num_samples, origin.num_steps
    rows = [
        ("step time", "simulate", f"{counted(every, 'step')}; {how}"),
        ("throughput, breakdown", "simulate", "at the mean step time"),
        ("sliders", "analysis.sliders", f"{counted(some, 'step')} a point"),
        ("sensitivities", "sensitivity", counted(some, "step")),
        ("criticality", "criticality", counted(some, "step")),
        ("memory", "memory", "no steps; on the host"),
        ("one step", "sample_step", f"of {counted(some, 'step')}"),
        ("assumptions", "load_job", "no steps"),
    ]
    if report.job is None:
        rows = [row for row in rows if row[0] not in _OF_JOBS]
    by = {name: origin.commands.get(name, f"prism.{name}") for _, name, _ in rows}
    cells = [(figures, tag("code", by[name]), steps) for figures, name, steps in rows]
    about = (
        f"Seed: {origin.seed}. prism-jax {origin.version}, JAX {origin.jax}; {origin.machine}; "
        f"{origin.date}. Set-up of the law took {law.compile_s:.1f} s, its simulation "
        f"{law.run_s:.1f} s."
    )
    listed = Table(("figures", "command or function", "steps"), cells)
    return join([table(listed, title="How each figure was obtained"), tag("p", about)])
