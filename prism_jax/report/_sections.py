"""The sections of a page that show results."""

import math

from .._estimate import Estimate
from .._misc import counted, unit_of_seconds
from ..law import figures
from . import _figures
from ._html import Markup, Number, folded, join, table, tag
from ._report import Report


_MOST_ROWS = 12  # Rows of a table that is not folded.


def law(report: Report) -> Markup:
    """The law of the step time, beside what was measured."""
    found = figures(report.law, quantiles=report.levels)
    job = report.job
    measured = job.measured if job is not None else None
    rows, unknown = [], []
    for name, (value, (low, high)) in found.items():
        known = low == low
        row = [name, _seconds(value), _seconds(low), _seconds(high)]
        if measured is not None:
            told = getattr(measured, f"{name}_s", None)
            error = None if told is None else 100 * (value / told - 1)
            row += [_plain(told, "#.5g", "-"), _plain(error, "+.2f", "-")]
        rows.append(row)
        if not known:
            why = report.law.why_unknown(report.levels.get(name))
            unknown.append(tag("p", f"The interval of {name} is not known: {why}.", class_="note"))
    header = ["figure", "predicted (s)", "95 % from (s)", "to (s)"]
    if measured is not None:
        header += ["measured (s)", "error (%)"]
    parts = [_figures.histogram(report), table("The law of the step time", header, rows), *unknown]
    if measured is not None:
        parts.append(tag("p", f"Measured: {measured.source}", class_="faint"))
    if report.epistemic is not None:
        parts.append(_epistemic(report))
    between = report.law.allocations
    if between is not None and len(between.means) > 1:
        about = (
            f"{len(between.means)} sets of GPUs: on one set, the standard deviation of steps is "
            f"{between.std:.3g} s; between sets, that of the mean of 10,000 independent steps is "
            f"{report.law.run_mean_std(10_000):.3g} s."
        )
        parts.append(tag("p", about))
    return join(parts)


def _epistemic(report: Report) -> Markup:
    assert report.epistemic is not None
    found = report.epistemic
    low, high = found.interval(0.95)
    return tag(
        "p",
        f"With the uncertainty of the model, 90 % of steps take {found.quantile(0.05):.5g} to "
        f"{found.quantile(0.95):.5g} s. The p50 of a run has a standard deviation of "
        f"{100 * found.level:.2g} %, and the 90 % interval of its p95 is {low:.5g} to "
        f"{high:.5g} s.",
    )


def throughput(report: Report) -> Markup:
    """Tokens, FLOP/s and MFU at the mean step time."""
    found = report.throughput
    if found is None:
        return _absent("a profile has no model, so its work is not known")
    rows = [
        ("GPUs", Number(f"{found.world_size:,}", found.world_size), ""),
        ("tokens per GPU", _plain(found.tokens_per_s_per_gpu, ",.0f"), "tokens/s"),
        ("tokens", _plain(found.tokens_per_s_per_gpu * found.world_size, ",.0f"), "tokens/s"),
        ("model TFLOP/s per GPU", _plain(found.flop_per_s_per_gpu / 1e12, ",.1f"), "TFLOP/s"),
        ("model FLOP/s utilisation (MFU)", _plain(found.mfu and 100 * found.mfu, ".1f"), "%"),
    ]
    about = (
        "At the mean step time. The FLOP of the model are those of one forward and one backward, "
        "without recomputation; fused causal attention counts half."
    )
    listed = table("Throughput", ("figure", "value", "unit"), rows)
    return join([listed, tag("p", about, class_="faint")])


def breakdown(report: Report) -> Markup:
    """The parts of the mean step time."""
    if report.throughput is None:
        return _absent("a profile has no model, so the parts of its mean are not known")
    parts = report.throughput.breakdown
    total = sum(parts.values())
    rows = [
        (name, _seconds(s), _plain(100 * s / total if total else None, ".2f"))
        for name, s in parts.items()
    ]
    about = (
        "Bubble: waiting for other stages. Exposed: communication during which the rank computes "
        "nothing, by degree of parallelism. Variability: the mean step minus a step without "
        "variability. The other parts are those of a step without variability, on the average "
        "pipeline rank."
    )
    header = ("part", "time (s)", "share (%)")
    listed = table("Breakdown of the mean step time", header, rows)
    return join([_figures.breakdown(parts), listed, tag("p", about, class_="faint")])


def sensitivities(report: Report) -> Markup:
    """What variability costs."""
    found = report.sensitivity
    if found is None:
        return _absent(report.missing["sensitivities"])
    probability = found.unit == "1"
    scale, unit = 1.0, "probability"
    if not probability:
        told = [x.value for p in found.parts for x in (p.spread, p.gain) if x is not None]
        scale, unit = unit_of_seconds(told)
    rows = [
        (
            part.group,
            part.name,
            _estimate(part.mean, scale),
            *(f(x, scale) for x in (part.spread, part.gain) for f in (_estimate, _error)),
        )
        for part in found.parts
    ]
    names = ("mean", "spread", "spread +-", "gain", "gain +-")
    header = ("group", "part", *(f"{name} ({unit})" for name in names))
    about = (
        f"By how much {found.objective}, {found.value}{'' if probability else ' s'}, would fall. "
        "Mean: if the part took no time, to first order. Spread: if it did not vary, to first "
        "order. Gain: if it did not vary, simulated (+- one standard error). Without any "
        f"variability it would fall by {found.whole_gain}; the sum of the gains of kernels, "
        f"factors and stalls is {found.sum_of_gains}{'' if probability else ' (both in seconds)'}."
    )
    parts = [_figures.tornado(found), tag("p", about)]
    if len(rows) > _MOST_ROWS:
        parts.append(table("The parts that cost most", header, rows[:_MOST_ROWS]))
    parts.append(folded(table("Sensitivities", header, rows), "parts", len(rows)))
    return join([*parts, *_notes(found.notes)])


def criticality(report: Report) -> Markup:
    """Where the critical path runs."""
    found = report.criticality
    if found is None:
        return _absent(report.missing["criticality"])
    columns = ("probability", "standard_error", "share")
    parts = [_figures.heat_map(found)]
    for of, label in (("ranks", "rank"), ("stages", "stage")):
        rows = [
            (
                Number(str(number), number),
                *(Number(f"{100 * x:.2f}", x) for x in values),
            )
            for number, *values in zip(
                getattr(found, of)[label].tolist(),
                *(getattr(found, of)[name].tolist() for name in columns),
                strict=True,
            )
        ]
        header = (label, "on the critical path (%)", "+- (%)", "share of the step (%)")
        listed = table(f"Criticality of pipeline {of}", header, rows)
        parts.append(folded(listed, f"{of} of the pipeline", len(rows)))
    exposed = found.exposed_communication.mean(), found.exposed_data_parallel.mean()
    about = (
        f"Exposed communication takes {100 * exposed[0]:.2f} % of a step on average; that of data "
        f"parallelism takes {100 * exposed[1]:.2f} %. The figures are from "
        f"{counted(found.num_steps, 'step')}, decided by "
        f"{counted(round(found.num_replicas_seen), 'replica')}."
    )
    return join([*parts, tag("p", about), *_notes(found.notes)])


def memory(report: Report) -> Markup:
    """The memory of the GPUs of each pipeline rank."""
    found = report.memory
    if found is None:
        return _absent("a profile has no model, so its memory is not known")
    names = list(dict.fromkeys(name for rank in found.ranks for name in rank.parts))
    rows = [
        (
            Number(str(rank.rank), rank.rank),
            *(_plain(rank.parts.get(name, 0) / 1e9, ".2f") for name in names),
            _plain(rank.bytes / 1e9, ".2f"),
        )
        for rank in found.ranks
    ]
    header = ("rank", *names, "all")
    fits = "fits" if found.fits else "does not fit"
    about = (
        f"The fullest rank has {found.fullest.bytes / 1e9:.1f} GB and {fits} a device of "
        f"{found.device_bytes / 1e9:.1f} GB (1e9 bytes each)."
    )
    listed = table("Memory of each pipeline rank at its fullest, in GB", header, rows)
    return join([_figures.memory(found), tag("p", about), listed])


def timeline(report: Report) -> Markup:
    """One simulated step, op by op."""
    step = report.step
    if step is None:
        return _absent(report.missing["timeline"])
    of = f", of the slowest of {step.num_replicas:,} replicas" if step.num_replicas > 1 else ""
    about = (
        f"{len(step.receivers):,} ops on {counted(step.num_ranks, 'pipeline rank')}{of}; "
        f"{len(step.path):,} of them are on the critical path, which ends on rank "
        f"{step.last_rank}. "
    )
    perfetto = tag("code", "prism-jax timeline"), " writes such a step for Perfetto."
    return join([_figures.gantt(step), tag("p", about, *perfetto)])


def _absent(why: str) -> Markup:
    return tag("p", f"Missing: {why.rstrip('.')}.", class_="note")


def _notes(notes) -> list[Markup]:
    return [tag("p", note, class_="note") for note in notes]


def _plain(value: float | None, form: str, unknown: str = "unknown") -> Number:
    if value is None or not math.isfinite(value):
        return Number(unknown, None)
    return Number(format(value, form), value)


def _seconds(value: float | None) -> Number:
    return _plain(value, "#.5g")


def _estimate(figure: Estimate | None, scale: float) -> Number:
    if figure is None:
        return Number("-", None)
    value = scale * figure.value
    return _plain(value, ",.0f" if abs(value) >= 1000 else ".4g")


def _error(figure: Estimate | None, scale: float) -> Number:
    return Number("-", None) if figure is None else _plain(scale * figure.standard_error, ".1g")
