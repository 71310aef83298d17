"""Draws docs/measured.png, README's figure: predicted laws over measured steps (a minute).

    python benchmarks/figure.py

Left: GPT-3 175B on 6,144 H100, from a job that is calibrated to the logged steps of 4,096. Right:
the odd steps of a traced job with a slow worker, from a profile that is fitted to the even ones,
and from the same ops sampled one by one.
"""

import pathlib
import sys

import jax
import matplotlib
import matplotlib.pyplot as plt
import msgspec
import numpy as np


if __name__ == "__main__":
    sys.path[0] = str(pathlib.Path(__file__).resolve().parents[1])
import prism_jax as prism
from benchmarks._families import families
from benchmarks._rows import DATA, ROOT
from benchmarks._traces import independent


FAMILY = "A gpt3 H100 tp4pp8 mb16 (Eos-DFW v3.1)"


def main() -> None:
    matplotlib.use("Agg")
    figure, axes = plt.subplots(1, 2, figsize=(11, 3.6), layout="constrained")
    law, steps = scaled()
    prism.plot.histogram(law, steps, ax=axes[0])
    axes[0].set_title("GPT-3 175B, 4,096 to 6,144 GPUs", loc="left", y=1.22)
    law, other, steps = traced()
    prism.plot.cdf(law, steps, ax=axes[1])
    levels = np.linspace(0.0005, 0.9995, 1000)
    x = np.asarray(other.quantile(levels))
    axes[1].plot(x, levels, color="0.5", linestyle=":", label="ops sampled one by one")
    axes[1].legend()
    axes[1].set_title("a slow worker among 64 GPUs", loc="left")
    path = ROOT / "docs/measured.png"
    figure.savefig(path, dpi=80, pil_kwargs={"optimize": True})


def scaled():
    """The law of the larger system, and its measured steps."""
    small, large = families(DATA / "mlperf")[FAMILY]
    key = jax.random.key(0)
    found = prism.calibrate(small.job, small.runs, source=small.name, key=key).calibrated
    kernels = prism.data.apply_calibrated(large.job.kernels, found, "calibrated")
    job = msgspec.structs.replace(large.job, kernels=kernels)
    law = prism.simulate(prism.compile_job(job), num_samples=100_000, key=key)
    return law, np.concatenate(large.runs)


def traced():
    """The law of a fitted profile, that of its ops sampled one by one, and the other steps."""
    folder, key = DATA / "straggler_traces", jax.random.key(0)
    job = prism.load_job(folder / "slow_worker_job.toml")
    trace = prism.read_trace(folder / "slow_worker.parquet", job)
    profile = prism.fit_profile(trace[::2])
    law, other = (
        prism.simulate(prism.compile_profile(one), num_samples=50_000, key=key)
        for one in (profile, independent(trace[::2], profile))
    )
    return law, other, trace.step_times()[1::2]


if __name__ == "__main__":
    main()
