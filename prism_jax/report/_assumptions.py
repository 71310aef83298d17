"""The assumptions behind a page's figures: keys of the job, tables of kernels, laws, and notes."""

from collections.abc import Iterable, Sequence

from ..data import Job, Variation, assumed_keys, notes_of, toml_value
from ..profile import Profile
from ._html import Markup, Number, folded, join, table, tag
from ._report import Report


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
    keys = assumed_keys(job)
    rows = [
        (tag("code", k.key), _value(k.value), k.unit, k.origin)
        for k in keys
        if k.key not in ("source", "name")
    ]
    listed = table("Keys of the job", ("key", "value", "unit", "from"), rows)
    yield folded(listed, "keys of the job", len(rows))
    if job.calibrated is not None:
        about = job.calibrated
        yield tag("p", "Calibrated to: ", about.source)
        factors = [
            (tag("code", name), Number(f"{value:.4g}", value), unit)
            for name, value, unit in (
                ("compute", about.compute, "factor"),
                ("network", about.network, "factor"),
                ("constant_s", about.constant_s, "s"),
                ("growth", about.growth, "exponent"),
            )
        ]
        yield table("What calibration changed", ("key", "value", "unit"), factors)
    if job.kernels is None:
        return
    yield tag("h3", "Efficiencies of kernels")
    for source in job.kernels.sources:
        name = f"{source.name}, in place of {source.stands_in_for}" * bool(source.stands_in_for)
        yield tag("p", tag("strong", name or source.name), f": {source.who}, {source.when}. ")
        yield tag("p", f"Software: {source.software}. Licence: {source.licence}.", class_="faint")
        if source.constants:
            chosen = [(c.name, c.value, c.reason) for c in source.constants]
            header = ("what was chosen", "value", "reason")
            listed = table(f"Constants of {source.name}", header, chosen)
            yield folded(listed, f"constants of {source.name}", len(chosen))
    yield from _laws(job.kernels.variability)


def _of_profile(profile: Profile) -> Iterable[Markup]:
    fitted = profile.fitted
    dropped = ", ".join(f"{number} {why}" for why, number in fitted.dropped.items()) or "none"
    about = f"Fitted to {fitted.num_steps:,} steps of a trace; steps left out: {dropped}."
    yield tag("p", about)
    rows = [
        (
            part.name,
            _number(part.value),
            _number(part.standard_error),
            part.note,
        )
        for part in fitted.components
    ]
    if rows:
        header = ("component", "value", "standard error", "note")
        yield table("Components of the variability", header, rows)
    yield from _laws(profile.variability)


def _value(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else toml_value(value)


def _number(value: float | None) -> Number:
    return Number("unknown" if value is None else f"{value:.4g}", value)


def _laws(variability: Sequence[Variation]) -> Iterable[Markup]:
    yield tag("h3", "Laws")
    rows = [
        (
            law.kernel or "all",
            law.component,
            law.family,
            ", ".join(f"{key} {value:.4g}" for key, value in law.parameters.items()),
            law.source,
        )
        for law in variability
    ]
    header = ("kernel", "component", "family", "parameters", "source")
    if rows:
        yield table("Laws of what varies", header, rows)
    else:
        yield tag("p", "Nothing varies.")
