"""The sections of a page that show results."""

from .._misc import counted
from .._summary import Table
from ..law import about_noise, law_table
from ..prediction import parts_table
from . import _figures
from ._html import Markup, join, table, tag
from ._report import Report


_MOST_ROWS = 12  # Rows of a table that is not folded.


def law(report: Report) -> Markup:
    """The law of the step time, beside what was measured."""
    measured = report.job.measured if report.job is not None else None
    future = report.epistemic
    expected = None if future is None else future.intervals(report.levels)
    found = law_table(report.law, report.levels, measured and measured.figures, expected)
    parts = [_figures.histogram(report), table(found, title="The law of the step time")]
    if measured is not None:
        parts.append(tag("p", f"Measured: {measured.source}", class_="faint"))
    about = report.law.about_allocations()
    if future is not None and expected is not None:
        about.insert(0, f"90 % of such runs: {future.error}")
        about.append(about_noise(report.law, expected))
    return join([*parts, *(tag("p", f"{line[0].upper()}{line[1:]}.") for line in about)])


def diagnosis(report: Report) -> Markup | None:
    """Whether measured step times are normal, what explains them, and what to change; `None` if
    none were given.
    """
    found = report.diagnosis
    if found is None:
        why = report.missing.get("diagnosis")
        return None if why is None else _absent(why)
    tables = map(table, (found.summary(), *found.changes_tables()))
    return join([*(tag("p", f"{x[0].upper()}{x[1:]}.") for x in found.lines()), *tables])


def throughput(report: Report) -> Markup:
    """Tokens, FLOP/s and MFU at the mean step time."""
    found = report.throughput
    if found is None:
        return _absent("a profile has no model, so its work is not known")
    each, mfu = found.tokens_per_s_per_gpu, found.mfu
    rows = [
        ("GPUs", found.world_size, ""),
        ("tokens per GPU", f"{each:,.0f}", "tokens/s"),
        ("tokens", f"{each * found.world_size:,.0f}", "tokens/s"),
        ("model TFLOP/s per GPU", f"{found.flop_per_s_per_gpu / 1e12:,.1f}", "TFLOP/s"),
        ("model FLOP/s utilisation (MFU)", "unknown" if mfu is None else f"{100 * mfu:.1f}", "%"),
    ]
    about = (
        "At the mean step time. The FLOP of the model are those of one forward and one backward, "
        "without recomputation; fused causal attention counts half."
    )
    listed = table(Table(("figure", "value", "unit"), rows, "Throughput"))
    return join([listed, tag("p", about, class_="faint")])


def breakdown(report: Report) -> Markup:
    """The parts of the mean step time."""
    if report.throughput is None:
        return _absent("a profile has no model, so the parts of its mean are not known")
    parts = report.throughput.breakdown
    about = (
        "Bubble: waiting for other stages. Exposed: communication during which the rank computes "
        "nothing, by degree of parallelism. Variability: the mean step minus a step without "
        "variability. The other parts are those of a step without variability, on the average "
        "pipeline rank."
    )
    listed = table(parts_table(parts, "Breakdown of the mean step time"))
    return join([_figures.breakdown(parts), listed, tag("p", about, class_="faint")])


def sensitivities(report: Report) -> Markup:
    """What variability costs."""
    found = report.sensitivity
    if found is None:
        return _absent(report.missing["sensitivities"])
    unit, seconds = ("", "") if found.unit == "1" else (" s", " (both in seconds)")
    about = (
        f"By how much {found.objective}, {found.value}{unit}, would fall. Mean: if the part took "
        "no time, to first order. Spread: if it did not vary, to first order. Gain: if it did not "
        f"vary, simulated. Without any variability it would fall by {found.whole_gain}; the sum of "
        f"the gains of kernels, factors and stalls is {found.sum_of_gains}{seconds}."
    )
    parts, listed = [_figures.tornado(found), tag("p", about)], found.summary()
    if len(found.parts) > _MOST_ROWS:
        most = found.parts[:_MOST_ROWS]
        parts.append(table(listed, title="The parts that cost most", rows=most, notes=()))
    parts.append(table(listed, "parts", title="Sensitivities"))
    return join(parts)


def criticality(report: Report) -> Markup:
    """Where the critical path runs."""
    found = report.criticality
    if found is None:
        return _absent(report.missing["criticality"])
    title, what = "Criticality of pipeline", "of the pipeline"
    ranks = table(found.summary(), f"ranks {what}", title=f"{title} ranks", notes=())
    stages = table(found.summary("stages"), f"stages {what}", title=f"{title} stages")
    exposed = found.exposed_communication.mean(), found.exposed_data_parallel.mean()
    about = (
        f"Exposed communication takes {100 * exposed[0]:.2f} % of a step on average; that of data "
        f"parallelism takes {100 * exposed[1]:.2f} %. The figures are from "
        f"{counted(found.num_steps, 'step')}, decided by "
        f"{counted(round(found.num_replicas_seen), 'replica')}."
    )
    return join([_figures.heat_map(found), ranks, stages, tag("p", about)])


def memory(report: Report) -> Markup:
    """The memory of the GPUs of each pipeline rank."""
    found = report.memory
    if found is None:
        return _absent("a profile has no model, so its memory is not known")
    fits = "fits" if found.fits else "does not fit"
    about = (
        f"The fullest rank has {found.fullest.bytes / 1e9:.1f} GB and {fits} a device of "
        f"{found.device_bytes / 1e9:.1f} GB (1e9 bytes each)."
    )
    return join([_figures.memory(found), tag("p", about), table(found.summary())])


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
