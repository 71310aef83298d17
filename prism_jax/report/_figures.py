"""Figures as SVG within a page: their colours are those of its style, light or dark."""

import io
import re
from collections.abc import Callable, Mapping
from typing import Any

from .. import plot
from .._misc import counted
from ._html import Markup, markup, tag
from ._report import Report


# Colours of `plot`, and their variables in the page's style.
_COLOURS = {
    "#000000": "--ink",
    "#ffffff": "--paper",
    "#c9d8ee": "--light",
    "#7c9fd0": "--medium",
    "#17335f": "--dark",
    "#b5301c": "--accent",
    "#d9d9d9": "--grey",
}
_WIDTH = 9.0  # In inches, of 100 pixels.
# A step with more ops is drawn as pixels, because so many shapes make a page slow.
_MOST_SHAPES = 6_000


def check_matplotlib() -> None:
    """Raises a `ValueError` if matplotlib is not installed; called before the simulation."""
    try:
        # What figures need, so that a page is written at once after Ctrl-C.
        from matplotlib.figure import Figure as Figure
    except ImportError:
        raise ValueError(
            "A report needs matplotlib, which is not installed; run `pip install "
            "'prism-jax[plot]'`."
        ) from None


def histogram(report: Report) -> Markup:
    name = "Histogram of the step time"
    about = (
        f"{name}, with its quantiles, of {counted(report.law.num_samples, 'simulated step')}. "
        "Each bar is the share of steps in its bin; the further p95 is from p50, the more they "
        "vary."
    )
    return _figure("law", about, 3.4, lambda ax: plot.histogram(report.law, ax=ax))


def breakdown(parts: Mapping[str, float]) -> Markup:
    about = (
        "What the mean step time is made of, and the share of each part: all but compute is time "
        "that another layout or schedule may save."
    )
    height = 0.9 + 0.3 * len(parts)
    return _figure("breakdown", about, height, lambda ax: plot.breakdown(parts, ax=ax))


def tornado(found: Any) -> Markup:
    about = (
        f"By how much {found.objective} would fall without the variability of each part: simulated "
        "(bars, with 95 % intervals) and to first order (diamonds). The longest of up to ten bars "
        "is the part to make steadier first."
    )
    height = 1.0 + 0.32 * min(len(found.parts), 10)
    return _figure("sensitivities", about, height, lambda ax: plot.tornado(found, ax=ax))


def heat_map(found: Any) -> Markup:
    about = (
        "How likely the compute of each stage and microbatch is on the critical path: light is "
        "unlikely, dark is likely. Only what is dark shortens a step when it becomes faster."
    )
    return _figure("criticality", about, 3.4, lambda ax: plot.heat_map(found, ax=ax))


def memory(found: Any) -> Markup:
    about = (
        "The peak memory of each pipeline rank, by part; what is left to the dashed line, the "
        "memory of a device, is free."
    )
    height = 1.6 + 0.24 * min(len(found.ranks), 32)
    return _figure("memory", about, height, lambda ax: plot.memory(found, ax=ax))


def gantt(step: Any) -> Markup:
    about = (
        f"One simulated step of {step.step_s:.5g} s, the p{100 * step.quantile:g} of the step "
        "time: the ops of each pipeline rank over time, and the critical path. Gaps are waits."
    )
    many = len(step.receivers) > _MOST_SHAPES

    def draw(ax: Any) -> None:
        plot.gantt(step, ax=ax)
        for shapes in ax.collections if many else ():
            shapes.set_rasterized(True)

    return _figure("timeline", about, 1.6 + 0.3 * min(step.num_ranks, 32), draw)


def _figure(name: str, about: str, height: float, draw: Callable[[Any], Any]) -> Markup:
    """A figure with a caption, which also describes it to readers who cannot see it."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    figure = Figure(figsize=(_WIDTH, height), layout="constrained")
    written = io.StringIO()
    # Without a salt, the ids within the file would differ each time.
    with rc_context({"svg.hashsalt": name, "svg.fonttype": "path"}):
        draw(figure.subplots())
        nothing = {"Date": None, "Creator": None, "Format": None, "Type": None}
        figure.savefig(written, format="svg", transparent=True, dpi=200, metadata=nothing)
    return tag("figure", _inline(written.getvalue(), name, about), tag("figcaption", about))


def _inline(svg: str, name: str, about: str) -> Markup:
    """An SVG file as part of a page, in which no other figure has its ids."""
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg[svg.index("<svg") :], flags=re.S)
    svg = re.sub(r'\b(id="|href="#|url\(#)', rf"\g<1>{name}-", svg)
    svg = re.sub(r'\bfill="(#\w+)"', r'style="fill: \1"', svg)  # Only styles know variables.
    for colour, variable in _COLOURS.items():
        svg = svg.replace(f" {colour}", f" var({variable})")
    svg = re.sub(r' (width|height)="[\d.]+pt"', "", svg, count=2)
    return Markup(svg.replace("<svg", f'<svg role="img" aria-label="{markup(about)}"', 1))
