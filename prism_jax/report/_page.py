"""A self-contained HTML page, which needs no network and no other file."""

import importlib.resources
import os
from collections.abc import Iterable, Sequence

from .._files import written_whole
from .._misc import counted
from .._summary import Column, Table
from ..data import (
    Job,
    Variation,
    assumed_keys,
    law_table,
    layout_and_order,
    notes_of,
    toml_value,
)
from ..profile import Profile
from . import _sections, _sliders
from ._accuracy import expected_error
from ._figures import check_matplotlib
from ._html import Markup, join, table, tag
from ._report import Report


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
    sections = {
        "Sliders": _sliders.sliders(report),
        "Step time": _sections.law(report),
        **({"Diagnosis": found} if (found := _sections.diagnosis(report)) else {}),
        "Throughput": _sections.throughput(report),
        "Breakdown of the mean": _sections.breakdown(report),
        "Sensitivities": _sections.sensitivities(report),
        "Criticality": _sections.criticality(report),
        "Memory": _sections.memory(report),
        "One step": _sections.timeline(report),
        "Expected error": expected_error(report),
        "Assumptions": assumptions(report),
        "How each figure was obtained": _origin(report),
    }
    links = [tag("li", tag("a", name, href=f"#{_anchor(name)}")) for name in sections]
    main = [
        tag("section", tag("h2", name, id=f"h-{_anchor(name)}"), content, id=_anchor(name))
        for name, content in sections.items()
    ]
    order = layout_and_order(report.of.layout, report.of.schedule)
    about = f"{order}, {report.num_ops:,} ops a replica"
    body = tag(
        "body",
        tag("header", tag("h1", report.of.name), tag("p", about, class_="faint")),
        _sliders.headline(report),
        _tiles(report),
        *(tag("p", note, class_="note") for note in notes(report.of)),
        *_interrupted(report),
        tag("nav", tag("ul", *links), aria_label="Sections"),
        tag("main", *main),
        tag("script", Markup(_resource("_page.js") + _resource("_sliders.js"))),
    )
    head = tag(
        "head",
        Markup('<meta charset="utf-8">'),
        Markup('<meta name="viewport" content="width=device-width, initial-scale=1">'),
        Markup(f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'),
        Markup('<link rel="icon" href="data:,">'),
        tag("title", f"{report.of.name}: step time"),
        tag("style", Markup(_resource("_page.css"))),
    )
    return f"<!DOCTYPE html>\n{tag('html', head, body, lang='en')}\n"


def _resource(name: str) -> str:
    return importlib.resources.files("prism_jax.report").joinpath(name).read_text(encoding="utf-8")


def _anchor(name: str) -> str:
    return name.lower().replace(" ", "-")


def _tiles(report: Report) -> Markup:
    law, found = report.law, report.throughput
    tiles = {
        "mean step time": f"{law.mean:.5g} s",
        "p50": f"{law.quantile(0.5):.5g} s",
        "p95": f"{law.quantile(0.95):.5g} s",
        "p99": f"{law.quantile(0.99):.5g} s",
    }
    if found is not None:
        if found.mfu is not None:
            tiles["MFU"] = f"{100 * found.mfu:.1f} %"
        tiles["tokens per GPU"] = f"{found.tokens_per_s_per_gpu:,.0f} /s"
        tiles["fullest GPU"] = f"{found.memory_bytes / 1e9:.1f} GB"
    return tag(
        "dl", *(tag("div", tag("dt", k), tag("dd", v)) for k, v in tiles.items()), class_="tiles"
    )


def _interrupted(report: Report) -> list[Markup]:
    if "law" not in report.missing:
        return []
    law = report.law
    about = (
        f"Interrupted after {law.num_samples:,} of {law.requested:,} steps; the law has only "
        "these steps."
    )
    return [tag("p", about, class_="note")]


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


def assumptions(report: Report) -> Markup:
    """All assumptions."""
    of = report.of
    return join(_of_job(of) if isinstance(of, Job) else _of_profile(of))


def notes(of: Job | Profile) -> Sequence[str]:
    """Warnings to read before the figures."""
    return notes_of(of) if isinstance(of, Job) else of.fitted.notes


def _of_job(job: Job) -> Iterable[Markup]:
    if job.source:
        yield tag("p", "The job: ", job.source)
    columns = (
        Column("key", lambda key: tag("code", key.key)),
        Column("value", lambda key: _value(key.value)),
        "unit",
        Column("from", "origin"),
    )
    keys = [key for key in assumed_keys(job) if key.key not in ("source", "name")]
    yield table(Table(columns, keys, "Keys of the job"), "keys of the job")
    if job.calibrated is not None:
        about = job.calibrated
        yield tag("p", "Calibrated to: ", about.source)
        yield table(about.summary())
    if job.kernels is None:
        return
    yield tag("h3", "Efficiencies of kernels")
    for source in job.kernels.sources:
        name = f"{source.name}, in place of {source.stands_in_for}" * bool(source.stands_in_for)
        yield tag("p", tag("strong", name or source.name), f": {source.who}, {source.when}. ")
        yield tag("p", f"Software: {source.software}. Licence: {source.licence}.", class_="faint")
        if source.constants:
            columns = (Column("what was chosen", "name"), "value", "reason")
            chosen = Table(columns, source.constants, f"Constants of {source.name}")
            yield table(chosen, f"constants of {source.name}")
    yield from _laws(job.kernels.variability)


def _of_profile(profile: Profile) -> Iterable[Markup]:
    fitted = profile.fitted
    dropped = ", ".join(f"{number} {why}" for why, number in fitted.dropped.items()) or "none"
    about = f"Fitted to {fitted.num_steps:,} steps of a trace; steps left out: {dropped}."
    yield tag("p", about)
    if fitted.components:
        yield table(fitted.summary())
    yield from _laws(profile.variability)


def _value(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else toml_value(value)


def _laws(variability: Sequence[Variation]) -> Iterable[Markup]:
    yield tag("h3", "Laws")
    if variability:
        yield table(law_table(variability, "source", title="Laws of what varies"))
    else:
        yield tag("p", "Nothing varies.")
