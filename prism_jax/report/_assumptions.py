"""What the figures of a page rest on: errors of such predictions so far, keys, tables and laws."""

import tomllib
from collections.abc import Iterable, Sequence
from typing import Any

from .._summary import Column, Table
from ..data import Job, Variation, assumed_keys, law_table, notes_of, toml_value
from ..prediction import expected_error as predicted_error
from ..profile import Profile
from ._gather import Report
from ._html import Markup, join, resource, table, tag


def expected_error(report: Report) -> Markup:
    """How far predictions of this kind were off, and for which runs."""
    return join(_errors(report.job, tomllib.loads(resource("_accuracy.toml"))))


def _errors(job: Job | None, known: dict[str, Any]) -> Iterable[Markup]:
    yield tag(
        "p",
        "The intervals on this page cover only the noise of the simulation: more samples make "
        "them narrower, but not the model more accurate. The commands that docs/accuracy.md "
        "names print how accurate predictions of this kind were.",
    )
    if job is None:
        yield tag(
            "p",
            "This is a profile of a trace. Two traced jobs (StragglerAnalysis, arXiv:2505.05713; "
            "64 GPUs with one slow worker, and 8 GPUs with a longer last stage) were fitted to "
            "every other step and scored on the steps in between: predicted over measured, minus "
            "one. The brackets hold the scatter of each figure, as only 11 or 16 steps were "
            "measured. The table does not apply to the steps of another run, or of other GPUs.",
        )
        header = ("trace", "from and to", "mean", "p95", "std ratio")
        rows = [*map(tuple, known["traces"])]
        yield table(Table(header, rows, "Steps of a trace from other steps"))
        return
    if job.calibrated is not None:
        yield tag(
            "p",
            "This job is calibrated to measured step times. Of families of MLPerf Training logs "
            "(GPT-3 175B and Llama 3.1 405B on H100 and GB200, 512 to 6,144 GPUs), jobs that were "
            "calibrated to some systems predicted another of the same family:",
        )
        yield tag("ul", *(tag("li", line) for line in known["calibrated"]))
        return
    if job.model is not None:
        found = predicted_error(job)
        low, high = (f"{100 * (factor - 1):+.0f} %" for factor in found.interval(0.9))
        yield tag(
            "p",
            "Nine of ten measured means of such jobs are expected to differ by "
            f"{low} to {high} from what is predicted. Published steps of the class of this job: "
            f"{found.num_runs:,}.",
        )
    yield tag(
        "p",
        "This job is predicted from its configuration and from tables of kernels, without "
        "calibration. The table has the errors of such predictions for means of published steps: "
        "predicted over measured, minus one. The tables of kernels were chosen with knowledge of "
        "some of these runs, so a job unlike them may be further off.",
    )
    header = ("published runs", "rows", "mean error", "mean absolute error", "worst")
    rows = [*map(tuple, known["means"])]
    yield table(Table(header, rows, "Means of published steps, from configuration alone"))


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
