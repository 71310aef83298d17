"""What is written of a measured machine: its device, its cluster, and the kernels of both."""

import dataclasses
import datetime
import math
import os
import pathlib
from typing import Any

import jax
import numpy as np

from ..data import Constant, Source, Variation, save_source, write_csv, write_toml, write_variations
from ._time import Scatter, Timed
from ._torch import Torch


# What is written.
_OF_KERNELS = ("efficiency.csv", "variability.csv", "source.toml")
FILES = ("cluster.toml", "device.toml", *_OF_KERNELS, "calls.csv")
FILES += tuple(f"network/{name}" for name in _OF_KERNELS)
_MOST_LOGNORMAL = 0.3
_SHAPE = ("m", "n", "k", "batch", "sequence", "heads", "kv_heads", "head_dim", "causal", "window")


@dataclasses.dataclass(frozen=True)
class Rate:
    """How fast a kernel of one size is: `kernel`, `dtype` and `size` are those of its calls, and
    `seconds` is their mean latency.
    """

    kernel: str
    dtype: str
    size: float
    seconds: float

    @property
    def per_s(self) -> float:
        """Floating-point operations or bytes in a second."""
        return self.size / self.seconds


def rates_of(timed: Timed) -> list[Rate]:
    """The mean latency of each kernel and size. Means, because those of the kernels of a step add
    up to that of the step, whatever their laws are; medians do not.
    """
    means_of: dict[tuple[str, str, float], list[float]] = {}
    for call, mean in zip(timed.calls, timed.seconds.mean((0, 2)).tolist(), strict=True):
        means_of.setdefault((call.kernel, call.dtype, call.size), []).append(mean)
    return [Rate(*key, sum(means) / len(means)) for key, means in sorted(means_of.items())]


def save_machine(
    folder: str | os.PathLike[str],
    timed: Timed,
    scatter: Scatter,
    command: str,
    torch: Torch | None = None,
) -> None:
    """Writes a measured machine as files that a job names: `cluster.toml` of one node, with
    `device.toml`, whose peaks are the best measured rates, and the kernels of both.

    Efficiencies are shares of these peaks. `calls.csv` has the shapes of products and attention,
    with their medians, for `prism-jax fit-kernels`.

    **Arguments:**

    - `folder`: is made if it is not there.
    - `timed`, `scatter`: what was measured.
    - `command`: with which command.
    - `torch`: what measured it, if that is not JAX.
    """
    if torch is None:
        device = jax.tree.leaves(timed.calls[0].run())[0].devices().pop()
        where = f"prism-jax measure: JAX {jax.__version__} on {device.device_kind}"
        memory = (device.memory_stats() or {}).get("bytes_limit")
    else:
        where, memory = f"prism-jax measure: {torch.where}", torch.memory_bytes
    folder, rates = pathlib.Path(folder), rates_of(timed)
    network = folder / "network"
    network.mkdir(parents=True, exist_ok=True)
    # The cluster goes first and comes last: what it names is then whole.
    (folder / "cluster.toml").unlink(missing_ok=True)
    peaks = {rate.dtype: max(r.per_s for r in rates if r.dtype == rate.dtype) for rate in rates}
    rows = [(r.kernel, r.dtype, f"{r.size:.10g}", f"{r.per_s / peaks[r.dtype]:.4g}") for r in rates]
    write_csv(folder / "efficiency.csv", ("kernel", "dtype", "size", "efficiency"), rows)
    header = ("kernel", "link", "bytes", "efficiency")
    write_csv(network / "efficiency.csv", header, [("collective", "devices", 1, 1)])
    sigmas = {("rank", ""): scatter.rank} if scatter.rank is not None else {}
    sigmas |= {("residual", kind): sigma for kind, sigma in scatter.residual.items()}
    laws = [_law(*labels, sigma, where) for labels, sigma in sigmas.items()]
    write_variations(folder / "variability.csv", laws)
    write_variations(network / "variability.csv", [_law("step", "", scatter.step, where)])
    medians = np.median(timed.seconds, axis=(0, 2))
    shaped = [
        (call.kernel, call.dtype, f"{median:.6g}", *(call.shape.get(name, "") for name in _SHAPE))
        for call, median in zip(timed.calls, medians, strict=True)
        if call.shape
    ]
    write_csv(folder / "calls.csv", ("kernel", "dtype", "latency_s", *_SHAPE), shaped)
    for inner in (folder, network):
        save_source(inner, _source(timed, scatter, where, command))
    for name, table in _hardware(folder.resolve().name, memory, peaks, len(timed.seconds)).items():
        write_toml(folder / f"{name}.toml", name, {"source": where, **table})


def _law(component: str, kernel: str, sigma: float, source: str) -> Variation:
    """Log-normal; or gamma of the same coefficient of variation where that is so large, as on a
    machine that does other work, that a log-normal tail would be longer than what is seen, and than
    what the sum of a block's kernels may have.
    """
    family, name, value = "lognormal", "sigma", sigma
    if sigma > _MOST_LOGNORMAL:
        family, name, value = "gamma", "cv", math.sqrt(math.expm1(sigma**2))
    return Variation(kernel, component, family, {name: float(f"{value:.4g}")}, source)


def _hardware(
    name: str, memory: float | None, peaks: dict[str, float], number: int
) -> dict[str, Any]:
    """The tables of the device and of the cluster."""
    if not memory:  # A CPU, whose memory is that of the machine.
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    link = {"name": "devices", "group": number, "bandwidth_bytes_per_s": peaks[""]}
    of_device = {"memory_bytes": float(memory), "memory_bandwidth_bytes_per_s": peaks[""]}
    peak = {dtype: per_s for dtype, per_s in peaks.items() if dtype}
    of_device |= {"name": name[:80], "kernels": ".", "peak_flop_per_s": peak}
    of_cluster = {"name": name[:80], "kernels": "./network", "device": "device.toml"}
    of_cluster |= {"num_nodes": 1, "devices_per_node": number, "links": [link]}
    return {"device": of_device, "cluster": of_cluster}


def _source(timed: Timed, scatter: Scatter, where: str, command: str) -> Source:
    devices, calls, rounds = timed.seconds.shape
    counts = {"devices": devices, "calls": calls, "rounds": rounds}
    note = f"of an empty call, subtracted; {timed.left_out} calls of less than 1.5"
    texts = (
        ("command", command, "it measured everything here"),
        ("dispatch", f"{timed.dispatch_s:.3g} s", f"{note} times as much are left out"),
        ("autocorrelation", f"{scatter.autocorrelation:.2f}", "of consecutive rounds (`step`)"),
        ("link", "as fast as memory", "no collective was measured; give its own for more devices"),
    )
    constants = tuple(Constant(*text) for text in texts)
    today = datetime.date.today().isoformat()
    return Source("the owner of the machine", today, where, "not stated", counts, constants)
