"""The sections of a page that show results."""

import functools as ft
import itertools as it
import json
from collections.abc import Iterable
from typing import Any

import numpy as np

from .. import plot
from .._misc import plural
from .._summary import GIB, Table
from ..analysis import (
    LEVELS,
    AbstractSlider,
    Criticality,
    SampledStep,
    Sensitivity,
    Sliders,
)
from ..diagnosis import Diagnosis, Setting, StepPart, beside_table
from ..law import Law, about_noise, law_table
from ..prediction import Memory, Throughput, parts_table
from ._gather import Report
from ._html import Block, Markup, blocks, figure_tiles, join, svg_figure, table, tag


_MOST_ROWS = 12  # Rows of a table that is not folded.
# A step with more ops is drawn as pixels, because so many shapes make a page slow.
_MOST_SHAPES = 6_000
_MOVED = ("p50", "p95")
_SHARES = (0, 0.5, 1)
_TICKS = (("start", 60), ("middle", 430), ("end", 800))
_NO_MODEL = "a profile has no model, so {} not known"


def sections(report: Report) -> dict[str, Markup]:
    """The sections by their headings. Of what a report lacks, a section says why."""
    work, missing = report.throughput, report.missing
    sections = {
        "Sliders": (ft.partial(_sliders, report), report.sliders, missing.get("sliders")),
        "Step time": (ft.partial(_law, report), report.law, None),
        "Diagnosis": (_diagnosis, report.diagnosis, missing.get("diagnosis")),
        "Measured beside predicted": (
            ft.partial(_beside, report),
            report.beside,
            missing.get("parts of a profile"),
        ),
        "Throughput": (_throughput, work, _NO_MODEL.format("its work is")),
        "Breakdown of the mean": (_breakdown, work, _NO_MODEL.format("the parts of its mean are")),
        "Sensitivities": (_sensitivities, report.sensitivity, missing.get("sensitivities")),
        "Criticality": (_criticality, report.criticality, missing.get("criticality")),
        "Memory": (_memory, report.memory, _NO_MODEL.format("its memory is")),
        "One step": (_timeline, report.step, missing.get("timeline")),
    }
    shown = {}
    for name, (show, result, reason) in sections.items():
        if result is not None:
            shown[name] = blocks(show(result))
        elif reason is not None:  # Without measured steps there is no diagnosis.
            shown[name] = tag("p", f"Missing: {reason.rstrip('.')}.", class_="note")
    return shown


def _sentences(lines: str) -> Iterable[str]:
    return (f"{line[0].upper()}{line[1:]}." for line in lines.splitlines())


def _sliders(report: Report, sliders: Sliders) -> Iterable[Block]:
    """A slider for each parameter, and the law, which the page's script moves."""
    data = {"levels": LEVELS, "law": report.law.quantile(LEVELS)}
    data["factors"] = [[*setting.factors.values()] for setting in report.settings]
    data["changes"] = [[s.change(x).round(7) for x in s.positions()] for s in sliders.sliders]
    check = sliders.check
    labels = {slider.name: slider.label for slider in sliders.sliders}
    together = " and ".join(f"{name} at {labels[name](x)}" for name, x in check.values.items())
    text = (
        "Move a slider, with the mouse or the arrow keys: p50, p95 and the law follow. What can be "
        "set comes first: it multiplies all of a step as it does one without variability. Other "
        "parameters follow three simulated points and the derivative, and what several change is "
        f"added. For how exact this is, {together} were simulated again: p95 is "
        f"{check.simulated:.5g} s, and {check.p95:.5g} s by the sliders, "
        f"{100 * abs(check.p95 / check.simulated - 1):.2g} % off."
    )
    caption = (
        "Share of steps that are done by a time: as the job is (grey), and as set (dark); dots are "
        "at p95."
    )
    axes = [
        tag("path", d="M60 5V210H800", style="stroke: var(--ink); stroke-width: 1"),
        *(tag("path", d="", class_=name) for name in ("own", "moved")),
        *(tag("circle", r=6, cy=20, class_=name) for name in ("own", "moved")),
        *(tag("text", "", text_anchor=a, x=x, class_="tick", y=238) for a, x in _TICKS),
        *(tag("text", f"{100 * y:.0f} %", class_="tick", x=0, y=214 - 200 * y) for y in _SHARES),
    ]
    drawn = tag("svg", *axes, viewBox="0 0 810 250", role="img", aria_label=caption)
    moved = {f"{name} step time": tag("output", "") for name in _MOVED}
    yield tag(
        "div",
        tag("p", text),
        *it.starmap(_slider, enumerate([*report.settings, *sliders.sliders])),
        tag("p", tag("button", "as the job is", type="button")),
        figure_tiles(moved, aria_live="polite"),
        tag("figure", drawn, tag("figcaption", caption)),
        class_="sliders",
        data_law=json.dumps(data, separators=(",", ":"), default=np.ndarray.tolist),
    )


def _slider(number: int, of: Setting | AbstractSlider) -> Markup:
    places = [*of.factors] if isinstance(of, Setting) else of.positions()
    names = [*map(of.label, places)]
    own_place = places.index(of.own)
    range_of = {"type": "range", "min": 0, "max": len(places) - 1, "step": 1, "value": own_place}
    shown = {"id": f"slider-{number}", "data_names": json.dumps(names), "autocomplete": "off"}
    label = tag("label", of.name, for_=f"slider-{number}")
    entry = Markup(tag("input", **range_of, **shown).removesuffix("</input>"))
    low, high = (tag("span", name, class_="faint") for name in (names[0], names[-1]))
    now = tag("output", names[own_place], for_=f"slider-{number}")
    return tag("p", join([label, tag("span", join([low, entry, high, now]), class_="range")]))


def _law(report: Report, law: Law) -> Iterable[Block]:
    """The law of the step time, beside what was measured."""
    name = "Histogram of the step time"
    caption = (
        f"{name}, with its quantiles, of {plural(law.num_samples, 'simulated step')}. "
        "Each bar is the share of steps in its bin; the further p95 is from p50, the more they "
        "vary."
    )
    measured = report.job.measured if report.job is not None else None
    future = report.epistemic
    expected = None if future is None else future.intervals(report.levels)
    rows = law_table(law, report.levels, measured and measured.figures, expected)
    steps = None if report.measured is None or len(report.measured) == 1 else report.measured
    yield svg_figure("law", caption, 3.4, lambda ax: plot.histogram(law, steps, ax=ax))
    yield table(rows, title="The law of the step time")
    if measured is not None:
        yield tag("p", f"Measured: {measured.source}", class_="faint")
    notes = law.about_allocations()
    if future is not None and expected is not None:
        notes.insert(0, f"90 % of such runs: {future.error}")
        notes.append(about_noise(law, expected))
    yield from _sentences("\n".join(notes))


def _diagnosis(diagnosis: Diagnosis) -> Iterable[Block]:
    """Whether measured step times are normal, what explains them, and what to change."""
    yield from _sentences(diagnosis.headline())
    yield from (diagnosis.summary(), *diagnosis.changes_tables())


def _beside(report: Report, parts: tuple[StepPart, ...]) -> Iterable[Block]:
    """The parts of a profiled step beside those predicted."""
    assert report.job is not None
    yield beside_table(report.job, parts)


def _throughput(throughput: Throughput) -> Iterable[Block]:
    """Tokens or samples, FLOP/s and MFU at the mean step time."""
    mfu, (per_gpu, unit) = throughput.mfu, throughput.rate().split()
    total, _ = throughput.rate(throughput.world_size).split()
    noun = unit.removesuffix("/s")
    rows = [
        ("GPUs", throughput.world_size, ""),
        (f"{noun} per GPU", per_gpu, unit),
        (noun, total, unit),
        ("model TFLOP/s per GPU", f"{throughput.flop_per_s_per_gpu / 1e12:,.1f}", "TFLOP/s"),
        ("model FLOP/s utilisation (MFU)", "unknown" if mfu is None else f"{100 * mfu:.1f}", "%"),
    ]
    note = (
        "At the mean step time. The FLOP of the model are those of one forward and one backward, "
        "without recomputation; causal attention counts half."
    )
    yield Table(("figure", "value", "unit"), rows, "Throughput")
    yield tag("p", note, class_="faint")


def _breakdown(throughput: Throughput) -> Iterable[Block]:
    """The parts of the mean step time."""
    parts = throughput.breakdown
    caption = (
        "What the mean step time is made of, and the share of each part: all but compute is time "
        "that another layout or schedule may save."
    )
    note = (
        "Bubble: waiting for other stages. Exposed: communication during which the rank computes "
        "nothing, by degree of parallelism. Variability: the mean step minus a step without "
        "variability. The other parts are those of a step without variability, on the average "
        "pipeline rank."
    )
    height = 0.9 + 0.3 * len(parts)
    yield svg_figure("breakdown", caption, height, lambda ax: plot.breakdown(parts, ax=ax))
    yield parts_table(parts, "Breakdown of the mean step time")
    yield tag("p", note, class_="faint")


def _sensitivities(sensitivity: Sensitivity) -> Iterable[Block]:
    """What variability costs."""
    caption = (
        f"By how much {sensitivity.objective} would fall without the variability of each part: "
        "simulated (bars, with 95 % intervals) and to first order (diamonds). The longest of up to "
        "ten bars is the part to make steadier first."
    )
    unit = "" if sensitivity.unit == "1" else " s"
    height = 1.0 + 0.32 * min(len(sensitivity.parts), 10)
    yield svg_figure("sensitivities", caption, height, lambda ax: plot.tornado(sensitivity, ax=ax))
    yield (
        f"{sensitivity.objective} is {sensitivity.value}{unit}. Mean: its slope in the part's "
        "latency. Spread: its slope in the part's variability. Gain: by how much it would fall if "
        "the part did not vary, simulated. Gains:"
    )
    yield from _sentences(sensitivity.headline())
    listed = sensitivity.summary()
    if len(sensitivity.parts) > _MOST_ROWS:
        most = sensitivity.parts[:_MOST_ROWS]
        yield table(listed, title="The parts that cost most", rows=most, notes=())
    yield table(listed, "parts", title="Sensitivities")


def _criticality(criticality: Criticality) -> Iterable[Block]:
    """Where the critical path runs."""
    caption = (
        "How likely the compute of each stage and microbatch is on the critical path: light is "
        "unlikely, dark is likely. Only what is dark shortens a step when it becomes faster."
    )
    yield svg_figure("criticality", caption, 3.4, lambda ax: plot.heat_map(criticality, ax=ax))
    title, scope = "Criticality of pipeline", "of the pipeline"
    yield table(criticality.summary(), f"ranks {scope}", title=f"{title} ranks", notes=())
    yield table(criticality.summary("stages"), f"stages {scope}", title=f"{title} stages")
    yield from _sentences(criticality.headline())


def _memory(memory: Memory) -> Iterable[Block]:
    """The memory of the GPUs of each pipeline rank."""
    caption = (
        "The peak memory of each pipeline rank, by part; what is left to the dashed line, the "
        "usable memory of a device, is free."
    )
    height = 1.6 + 0.24 * min(len(memory.ranks), 32)
    yield svg_figure("memory", caption, height, lambda ax: plot.memory(memory, ax=ax))
    fits = "fits" if memory.fits else "does not fit"
    yield (
        f"The fullest rank has {memory.fullest.bytes / GIB:.1f} GiB and {fits} a device of "
        f"{memory.device_bytes / GIB:.1f} GiB, of which {memory.usable_bytes / GIB:.1f} are usable."
    )
    yield memory.summary()


def _timeline(step: SampledStep) -> Iterable[Block]:
    """One simulated step, op by op."""
    what, text = _sentences(step.headline())
    caption = (
        f"{what} The ops of each pipeline rank over time, and the critical path. Gaps are waits."
    )
    perfetto = tag("code", "prism-jax timeline"), " writes such a step for Perfetto."

    def draw(ax: Any) -> None:
        plot.gantt(step, ax=ax)
        for shapes in ax.collections if len(step.receivers) > _MOST_SHAPES else ():
            shapes.set_rasterized(True)

    yield svg_figure("timeline", caption, 1.6 + 0.3 * min(step.num_ranks, 32), draw)
    yield tag("p", f"{text} ", *perfetto)
