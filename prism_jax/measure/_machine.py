"""What is written of a measured machine: its device, its cluster, and their kernels."""

import dataclasses
import math
import os
import pathlib
from typing import Any

import jax
import numpy as np

from .._files import written_whole
from ..data import Constant, Source, Variation, save_source, write_csv, write_variations
from ._scatter import Scatter
from ._time import Timed


# What `save_machine` writes to a folder, besides the folder `network`.
FILES = ("cluster.toml", "device.toml", "calls.csv", "efficiency.csv", "variability.csv")
_MOST_LOGNORMAL = 0.3
_SHAPE = ("m", "n", "k", "batch", "sequence", "heads", "kv_heads", "head_dim")


@dataclasses.dataclass(frozen=True)
class Rate:
    """How fast the calls of a kernel of one size were.

    **Attributes:**

    - `kernel`, `dtype`, `size`: as in `Call`.
    - `seconds`: the mean latency of a call.
    - `calls`: how many different calls have this size.
    """

    kernel: str
    dtype: str
    size: float
    seconds: float
    calls: int

    @property
    def per_s(self) -> float:
        """Floating-point operations or bytes in a second."""
        return self.size / self.seconds


def rates_of(timed: Timed) -> list[Rate]:
    """The mean latency of each kernel and size. Means, because those of the kernels of a step add
    up to that of the step, whatever their laws are; medians do not.
    """
    means = timed.seconds.mean((0, 2))
    found: dict[tuple[str, str, float], list[float]] = {}
    for call, mean in zip(timed.calls, means, strict=True):
        found.setdefault((call.kernel, call.dtype, call.size), []).append(float(mean))
    return [Rate(*key, sum(each) / len(each), len(each)) for key, each in sorted(found.items())]


def kinds_of(timed: Timed) -> list[str]:
    """The kind of kernel of each call, which decides its variability."""
    return [call.kernel.removesuffix("_backward") for call in timed.calls]


def save_machine(
    folder: str | os.PathLike[str], timed: Timed, scatter: Scatter, command: str
) -> None:
    """Writes a measured machine as files that a job names: `cluster.toml` of one node, with
    `device.toml`, whose peaks are the best measured rates, and the kernels of both.

    Efficiencies are shares of these peaks. `calls.csv` has the shapes of products and attention,
    with their medians, for `prism-jax fit-kernels`.

    **Arguments:**

    - `folder`: is made if it is not there.
    - `timed`, `scatter`: what was measured.
    - `command`: with which command.
    """
    folder = pathlib.Path(folder)
    network = folder / "network"
    network.mkdir(parents=True, exist_ok=True)
    device = jax.tree.leaves(timed.calls[0].run())[0].devices().pop()
    rates = rates_of(timed)
    peaks: dict[str, float] = {}
    for rate in rates:
        peaks[rate.dtype] = max(peaks.get(rate.dtype, 0.0), rate.per_s)
    where = f"prism-jax measure: JAX {jax.__version__} on {device.device_kind}"
    source = _source(timed, scatter, where, command)
    save_source(folder, source)
    save_source(network, source)
    _write_hardware(folder, device, peaks, len(timed.seconds), where)
    rows = [(r.kernel, r.dtype, f"{r.size:.10g}", f"{r.per_s / peaks[r.dtype]:.4g}") for r in rates]
    write_csv(folder / "efficiency.csv", ("kernel", "dtype", "size", "efficiency"), rows)
    write_csv(
        network / "efficiency.csv",
        ("kernel", "link", "bytes", "efficiency"),
        [("collective", "devices", 1, 1)],
    )
    laws = [_law(kind, "residual", sigma, where) for kind, sigma in scatter.residual.items()]
    rank = [] if scatter.rank is None else [_law("", "rank", scatter.rank, where)]
    write_variations(folder / "variability.csv", [*rank, *laws])
    write_variations(network / "variability.csv", [_law("", "step", scatter.step, where)])
    medians = np.median(timed.seconds, axis=(0, 2))
    shaped = [
        (call.kernel, call.dtype, f"{median:.6g}", *(call.shape.get(name, "") for name in _SHAPE))
        for call, median in zip(timed.calls, medians, strict=True)
        if call.shape
    ]
    write_csv(folder / "calls.csv", ("kernel", "dtype", "latency_s", *_SHAPE), shaped)


def _law(kernel: str, component: str, sigma: float, source: str) -> Variation:
    """Log-normal; or gamma of the same coefficient of variation where that is so large, as on a
    machine that does other work, that the sum of a block's log-normal kernels would have a tail
    that no program takes.
    """
    if component != "residual" or sigma <= _MOST_LOGNORMAL:
        return Variation(kernel, component, "lognormal", {"sigma": _rounded(sigma)}, source)
    cv = math.sqrt(math.expm1(sigma**2))
    return Variation(kernel, component, "gamma", {"cv": _rounded(cv)}, source)


def _rounded(value: float) -> float:
    return float(f"{value:.4g}")


def _write_hardware(
    folder: pathlib.Path, device: Any, peaks: dict[str, float], number: int, source: str
) -> None:
    import tomli_w

    memory = (device.memory_stats() or {}).get("bytes_limit")
    if memory is None:  # A CPU, whose memory is that of the machine.
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    bandwidth = peaks[""]
    link = {"name": "devices", "group": number, "bandwidth_bytes_per_s": bandwidth}
    name = folder.resolve().name[:80]
    tables = {
        "device": {
            "name": name,
            "memory_bytes": float(memory),
            "memory_bandwidth_bytes_per_s": bandwidth,
            "kernels": ".",
            "peak_flop_per_s": {dtype: peak for dtype, peak in peaks.items() if dtype},
        },
        "cluster": {
            "name": name,
            "device": "device.toml",
            "num_nodes": 1,
            "devices_per_node": number,
            "kernels": "./network",
            "links": [link],
        },
    }
    for kind, table in tables.items():
        with written_whole(folder / f"{kind}.toml") as partial:
            text = tomli_w.dumps({"kind": kind, "source": source, **table})
            partial.write_text(text, encoding="utf-8")


def _source(timed: Timed, scatter: Scatter, where: str, command: str) -> Source:
    import datetime

    devices, calls, rounds = timed.seconds.shape
    constants = (
        Constant("command", command, "it measured everything here"),
        Constant(
            "dispatch",
            f"{timed.dispatch_s:.3g} s",
            f"an empty call takes as long, and it is subtracted; {timed.left_out} calls of less "
            "than 1.5 times as much are left out",
        ),
        Constant(
            "autocorrelation of steps",
            f"{scatter.autocorrelation:.2f}",
            "of what the calls of a round have in common, from one round to the next",
        ),
        Constant(
            "link",
            "the bandwidth of memory",
            "no collective was measured, so replace it before a job of several devices",
        ),
    )
    counts = {"devices": devices, "calls": calls, "rounds": rounds}
    today = datetime.date.today().isoformat()
    return Source("the owner of the machine", today, where, "not stated", counts, constants)
