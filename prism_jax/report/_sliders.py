"""What to expect, what makes it slow or wide, what to change; and sliders that the law follows."""

import json
from collections.abc import Mapping

import numpy as np

from ..analysis import LEVELS, SHARED, AbstractSlider, Rare, Sliders
from ._gather import Report
from ._html import Markup, join, tag


_SHOWN = ("p50", "p95")
_SHARES = (0, 0.5, 1)
_TICKS = (("start", 60), ("middle", 430), ("end", 800))


def headline(report: Report) -> Markup:
    """Three sentences: what to expect, what makes it slow or wide, what to change first."""
    sentences = (_expected(report), _slow(report), _first(report))
    return tag("ol", *(tag("li", sentence) for sentence in sentences), class_="lead")


def _expected(report: Report) -> str:
    law, future = report.law, report.epistemic
    sure = ""
    if future is not None:
        low, high = future.intervals({"p95": 0.95})["p95"]
        sure = f"; p95 of nine in ten such runs lies within {low:.4g} to {high:.4g} s"
    return (
        f"Expect a step of {law.quantile(0.5):.4g} s (p50), and one in twenty that takes more than "
        f"{law.quantile(0.95):.4g} s (p95){sure}."
    )


def _slow(report: Report) -> str:
    parts = [] if report.throughput is None else [*report.throughput.breakdown.items()]
    parts = sorted((-seconds, name) for name, seconds in parts if name != "compute")
    share = f"{-100 * parts[0][0] / report.law.mean:.3g} %" if parts else ""
    slow = f"Besides compute, {parts[0][1]} takes most: {share} of the mean" if parts else ""
    found = report.sensitivity
    gains = [(p.gain.value, p.name) for p in found.parts if p.gain] if found else []
    if not found or not gains:
        return f"{slow or 'What makes steps slow is not known'}."
    gain, name = max(gains)
    unit = "s" if found.unit == "s" else ""
    what = SHARED.get(name, f"variability of {name}")
    wide = f"without the {what}, {found.objective} would fall by {gain:.2g} {unit}"
    return f"{slow}; {wide.strip()}." if slow else f"{wide[0].upper()}{wide[1:].strip()}."


def _first(report: Report) -> str:
    p95 = report.law.quantile(0.95)
    if report.quickest is not None:
        change, share = report.quickest
        keys = " ".join(f"--set {text}" for text in change)
        return (
            f"Change first: {keys}, which needs no other hardware and makes steps "
            f"{100 * share:.2g} % shorter, about {share * p95:.2g} s at p95 (if p95 falls as a "
            "step without variability does)."
        )
    best = _best_slower(report.sliders)
    tried = ""
    if report.memory is not None and "first change" not in report.missing:
        tried = "No setting by itself makes steps 0.2 % shorter"
    if best is None:
        return f"{tried or 'What to change first is not known'}."
    name, gain = best
    least = f"lower the {name} by a tenth first, which is worth {gain:.2g} s at p95"
    return f"{tried}; {least}." if tried else f"Change first: {least}."


def _best_slower(found: Sliders | None) -> tuple[str, float] | None:
    """Which parameter to lower by a tenth for the most at p95, and by how many seconds."""
    at = LEVELS.tolist().index(0.95)
    gains = [
        (-float(one.change(0.9 * one.own)[at]), one.name)
        for one in (found.sliders if found else ())
        if one.own
    ]
    gain, name = max(gains, default=(0.0, ""))
    return (name, gain) if gain > 0 else None


def sliders(report: Report, found: Sliders) -> Markup:
    """A slider for each parameter, and the law, which the page's script moves."""
    own = report.law.quantile(LEVELS)
    rows = [[one.change(v).round(7).tolist() for v in one.positions()] for one in found.sliders]
    data = {"levels": LEVELS.tolist(), "law": np.asarray(own, float).tolist(), "rows": rows}
    check = found.check
    together = " and ".join(f"{name} at {value:g}" for name, value in check.values.items())
    about = (
        "Move a slider, with the mouse or the arrow keys: p50, p95 and the law follow, between "
        "three simulated points of each parameter and from its derivative. What several change is "
        f"added. For how exact this is, {together} were simulated again: p95 is "
        f"{check.simulated:.5g} s, and {check.p95:.5g} s by the sliders, "
        f"{100 * abs(check.p95 / check.simulated - 1):.2g} % off."
    )
    caption = "Share of steps that are done by a time: as the job is (grey), and as set (dark)."
    axes = [
        tag("path", d="M60 5V210H800", style="stroke: var(--ink); stroke-width: 1"),
        *(tag("path", d="", class_=name) for name in ("own", "moved")),
        *(tag("text", "", text_anchor=a, x=x, class_="tick", y=238) for a, x in _TICKS),
        *(tag("text", f"{100 * y:.0f} %", class_="tick", x=0, y=214 - 200 * y) for y in _SHARES),
    ]
    drawn = tag("svg", *axes, viewBox="0 0 810 250", role="img", aria_label=caption)
    moved = {f"{name} step time": tag("output", "") for name in _SHOWN}
    return tag(
        "div",
        tag("p", about),
        *(_slider(number, one) for number, one in enumerate(found.sliders)),
        tag("p", tag("button", "as the job is", type="button")),
        tiles(moved, aria_live="polite"),
        tag("figure", drawn, tag("figcaption", caption)),
        class_="sliders",
        data_law=json.dumps(data, separators=(",", ":")),
    )


def tiles(figures: Mapping[str, object], **attributes: str) -> Markup:
    """Figures by their names."""
    listed = (tag("div", tag("dt", name), tag("dd", value)) for name, value in figures.items())
    return tag("dl", *listed, class_="tiles", **attributes)


def _slider(number: int, of: AbstractSlider) -> Markup:
    places = of.positions()
    names = [f"{v:.3g} expected" if isinstance(of, Rare) else f"x {v:.3g}" for v in places]
    own = places.index(of.own)
    given = {"type": "range", "min": 0, "max": len(places) - 1, "step": 1, "value": own}
    shown = {"id": f"slider-{number}", "data_names": json.dumps(names), "autocomplete": "off"}
    label = tag("label", of.name, for_=f"slider-{number}")
    entry = Markup(tag("input", **given, **shown).removesuffix("</input>"))
    return tag("p", join([label, entry, tag("output", names[own], for_=f"slider-{number}")]))
