"""A self-contained HTML page, which needs no network and no other file."""

import datetime
import importlib.metadata
import os
import platform
import tomllib
from collections import Counter
from collections.abc import Iterable, Sequence

import jax
import numpy as np

from .. import _devices
from .._files import resource, written_whole
from .._misc import plural
from .._summary import GIB, Column, Table
from ..data import Job, Variation, assumed_keys, job_warnings, toml_value, variation_table
from ..prediction import Throughput, expected_error
from ..profile import Profile
from ._gather import Report, headline
from ._html import Block, Markup, blocks, check_matplotlib, figure_tiles, table, tag
from ._sections import sections


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

    `OSError` if the file cannot be written; `ImportError` if matplotlib is not installed.
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

    `ImportError` if matplotlib is not installed.
    """
    check_matplotlib()
    of = report.of
    shown = {
        **sections(report),
        "Expected error": blocks(_expected_error(report.job)),
        "Assumptions": blocks(_of_job(of) if isinstance(of, Job) else _of_profile(of)),
        "How each figure was obtained": blocks(_origin(report)),
    }
    links = [tag("li", tag("a", name, href=f"#{_anchor(name)}")) for name in shown]
    main = [
        tag("section", tag("h2", name, id=f"h-{_anchor(name)}"), content, id=_anchor(name))
        for name, content in shown.items()
    ]
    header = of.header if isinstance(of, Job) else of.header(report.num_ops)
    title, _, details = header.partition(": ")
    body = tag(
        "body",
        tag("header", tag("h1", title), tag("p", details, class_="faint"), *_made(report)),
        tag("ol", *(tag("li", text) for text in headline(report)), class_="lead"),
        _tiles(report),
        *(tag("p", note, class_="note") for note in _notes(report)),
        tag("nav", tag("ul", *links), aria_label="Sections"),
        tag("main", *main),
        tag("script", Markup(resource("report/_page.js") + resource("report/_sliders.js"))),
    )
    head = tag(
        "head",
        Markup('<meta charset="utf-8">'),
        Markup('<meta name="viewport" content="width=device-width, initial-scale=1">'),
        Markup(f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'),
        Markup('<link rel="icon" href="data:,">'),
        tag("title", f"{title}: step time"),
        tag("style", Markup(resource("report/_page.css"))),
    )
    return f"<!DOCTYPE html>\n{tag('html', head, body, lang='en')}\n"


def _large(number: float) -> str:
    name, size = ("trillion", 1e12) if number >= 1e12 else ("billion", 1e9)
    return f"{number / size:.3g} {name}"


def _made(report: Report) -> Iterable[Markup]:
    """The software that the job trains with, and when the page was made."""
    job, today = report.job, datetime.datetime.now(datetime.UTC).date().isoformat()
    software = "" if job is None or job.training is None else job.training.software
    stack = f"software stack {software}; " if software else ""
    yield tag("p", f"{stack}predicted by prism-jax on {today}", class_="faint")


def _anchor(name: str) -> str:
    return name.lower().replace(" ", "-")


def _tiles(report: Report) -> Markup:
    law, throughput = report.law, report.throughput
    figures: dict[str, str] = {}
    if report.measured is not None:
        figures |= {
            f"measured p{p}": f"{np.percentile(report.measured, p):.5g} s" for p in (50, 95)
        }
    figures |= {"mean step time": f"{law.mean:.5g} s"}
    figures |= {f"p{100 * q:g}": f"{law.quantile(q):.5g} s" for q in (0.5, 0.95, 0.99)}
    if throughput is not None:
        if throughput.mfu is not None:
            figures["MFU"] = f"{100 * throughput.mfu:.1f} %"
        figures["each GPU"] = throughput.rate()
        figures["fullest GPU"] = f"{throughput.memory_bytes / GIB:.1f} GiB"
        if report.job is not None and report.job.unit == "token":
            figures |= _training(report, throughput)
    return figure_tiles(figures)


def _training(report: Report, throughput: Throughput) -> dict[str, str]:
    """How many tokens a day has; how long, and how dear, training on so many is."""
    per_day = 86_400 * throughput.world_size * throughput.tokens_per_s_per_gpu
    figures = {"tokens a day": _large(per_day)}
    if report.tokens is not None:
        days = report.tokens / per_day
        hours = 24 * days * throughput.world_size
        figures[f"{_large(report.tokens)} tokens"] = f"{days:,.4g} days"
        figures["GPU hours"] = f"{hours:,.0f}"
        if report.price is not None:
            figures["cost"] = f"{hours * report.price:,.0f}"
    return figures


def _origin(report: Report) -> Iterable[Block]:
    """The command or the function, the samples and the seed of each figure; versions and date."""
    law = report.law
    sampling = f"{law.sampling} sampling"
    num_samples, num_steps = law.num_samples, report.num_steps
    rows = [
        ("step time", "simulate", f"{plural(num_samples, 'step')}; {sampling}"),
        ("throughput, breakdown", "simulate", "at the mean step time"),
        ("sliders", "analysis.sliders", f"{plural(num_steps, 'step')} a point"),
        ("sensitivities", "sensitivity", plural(num_steps, "step")),
        ("criticality", "criticality", plural(num_steps, "step")),
        ("memory", "memory", "no steps; on the host"),
        ("one step", "sample_step", f"of {plural(num_steps, 'step')}"),
        ("assumptions", "load_job", "no steps"),
    ]
    if report.job is None:
        rows = [row for row in rows if row[0] not in _OF_JOBS]
    by = {name: report.commands.get(name, f"prism.{name}") for _, name, _ in rows}
    cells = [(figures, tag("code", by[name]), steps) for figures, name, steps in rows]
    kinds = Counter(device.device_kind for device in _devices.chosen())
    devices = ", ".join(f"{number} x {kind}" for kind, number in kinds.items())
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    versions = f"prism-jax {importlib.metadata.version('prism-jax')}, JAX {jax.__version__}"
    machine = f"{platform.system()} {platform.machine()}; devices of JAX: {devices}"
    note = (
        f"Seed: {report.seed}. {versions}; {machine}; {today}. Set-up of the law took "
        f"{law.compile_s:.1f} s, its simulation {law.run_s:.1f} s."
    )
    columns = ("figures", "command or function", "steps")
    return Table(columns, cells, "How each figure was obtained"), note


def _expected_error(job: Job | None) -> Iterable[Block]:
    """How far predictions of this kind were off, and for which runs."""
    accuracies = tomllib.loads(resource("report/_accuracy.toml"))
    yield (
        "The intervals on this page cover only the noise of the simulation: more samples make "
        "them narrower, but not the model more accurate. The commands that docs/accuracy.md "
        "names print how accurate predictions of this kind were."
    )
    if job is None:
        yield (
            "This is a profile of a trace. Two traced jobs (StragglerAnalysis, arXiv:2505.05713; "
            "64 GPUs with one slow worker, and 8 GPUs with a longer last stage) were fitted to "
            "every other step and scored on the steps in between: predicted over measured, minus "
            "one. The brackets hold the scatter of each figure, as only 11 or 16 steps were "
            "measured. The table does not apply to the steps of another run, or of other GPUs."
        )
        header = ("trace", "from and to", "mean", "p95", "std ratio")
        rows = [*map(tuple, accuracies["traces"])]
        yield Table(header, rows, "Steps of a trace from other steps")
        return
    if job.calibrated is not None:
        yield (
            "This job is calibrated to measured step times. Of families of MLPerf Training logs "
            "(GPT-3 175B and Llama 3.1 405B on H100 and GB200, 512 to 6,144 GPUs), jobs that were "
            "calibrated to some systems predicted another of the same family:"
        )
        yield tag("ul", *(tag("li", line) for line in accuracies["calibrated"]))
        return
    if job.model is not None:
        error = expected_error(job)
        low, high = (f"{100 * (factor - 1):+.0f} %" for factor in error.interval(0.9))
        yield (
            "Nine of ten measured means of such jobs are expected to differ by "
            f"{low} to {high} from what is predicted; {error.about_sites()}. Published steps of "
            f"the class of this job: {error.num_runs:,}."
        )
    yield (
        "This job is predicted from its configuration and from tables of kernels, without "
        "calibration. The table has the errors of such predictions for means of published steps: "
        "predicted over measured, minus one. The tables of kernels were chosen with knowledge of "
        "some of these runs, so a job unlike them may be further off."
    )
    header = ("published runs", "rows", "mean error", "mean absolute error", "worst")
    rows = [*map(tuple, accuracies["means"])]
    listed = table(Table(header, rows, "Means of published steps, from configuration alone"))
    yield tag("details", tag("summary", "Published steps of all classes"), listed)


def _notes(report: Report) -> Iterable[str]:
    """Warnings to read before the figures."""
    of, law = report.of, report.law
    yield from job_warnings(of) if isinstance(of, Job) else of.fitted.notes
    if "law" in report.missing:
        text = f"Interrupted after {law.num_samples:,} of {law.requested:,} steps"
        yield f"{text}; the law has only these steps."


def _of_job(job: Job) -> Iterable[Block]:
    """The assumptions of a job."""
    if job.source:
        yield f"The job: {job.source}"
    columns = (
        Column("key", lambda key: tag("code", key.key)),
        Column("value", lambda key: _value(key.value)),
        "unit",
        Column("from", "where_from"),
    )
    keys = [key for key in assumed_keys(job) if key.key not in ("source", "name")]
    yield table(Table(columns, keys, "Keys of the job"), "keys of the job")
    if job.calibrated is not None:
        yield f"Calibrated to: {job.calibrated.source}"
        yield job.calibrated.summary()
    if job.kernels is None:
        return
    yield tag("h3", "Efficiencies of kernels")
    for source in job.kernels.sources:
        name, replaced = source.name, source.stands_in_for
        name = tag("strong", f"{name}, in place of {replaced}" if replaced else name)
        yield tag("p", name, f": {source.who}, {source.when}. ")
        yield tag("p", f"Software: {source.software}. Licence: {source.licence}.", class_="faint")
        if source.constants:
            columns = (Column("what was chosen", "name"), "value", "reason")
            chosen = Table(columns, source.constants, f"Constants of {source.name}")
            yield table(chosen, f"constants of {source.name}")
    yield from _laws(job.kernels.variability)


def _of_profile(profile: Profile) -> Iterable[Block]:
    """The assumptions of a profile."""
    fitted = profile.fitted
    dropped = ", ".join(f"{number} {why}" for why, number in fitted.dropped.items()) or "none"
    yield f"Fitted to {plural(fitted.num_steps, 'step')} of a trace; steps left out: {dropped}."
    if fitted.components:
        yield fitted.summary()
    yield from _laws(profile.variability)


def _laws(variability: Sequence[Variation]) -> Iterable[Block]:
    yield tag("h3", "Laws")
    yield (
        variation_table(variability, "source", title="Laws of what varies")
        if variability
        else "Nothing varies."
    )


def _value(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else toml_value(value)
