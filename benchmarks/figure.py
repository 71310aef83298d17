"""Draws docs/measured.png, README's figure: predicted laws over measured steps (a minute).

    python benchmarks/figure.py

Left: GPT-3 175B on 6,144 H100, from a job that is calibrated to the logged steps of 4,096. Right:
the odd steps of a traced job with a slow worker, from a profile that is fitted to the even ones,
and from the same ops sampled one by one.
"""

import sys

import jax
import matplotlib
import matplotlib.pyplot as plt
import numpy as np


sys.path.insert(0, __file__.rpartition("/benchmarks/")[0])
import prism_jax as prism
from benchmarks.own_traces import independent
from validation.families import calibrated_to, families
from validation.rows import DATA, ROOT
from validation.tables import options


FAMILY = "A gpt3 H100 tp4pp8 mb16 (Eos-DFW v3.1)"


def main() -> None:
    options(__doc__)
    matplotlib.use("Agg")
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 3.6), layout="constrained")
    small, large = families(DATA / "mlperf")[FAMILY]
    (job,) = calibrated_to([small], [large], source=small.name)
    prism.plot.histogram(_law(prism.compile_job(job), 100_000), np.concatenate(large.runs), ax=left)
    left.set_title("GPT-3 175B, 4,096 to 6,144 GPUs", loc="left", y=1.22)
    folder = DATA / "straggler_traces"
    job = prism.load_job(folder / "slow_worker_job.toml")
    trace = prism.read_trace(folder / "slow_worker.parquet", job)
    profile = prism.fit_profile(trace[::2])
    laws = (profile, independent(trace[::2], profile))
    law, other = (_law(prism.compile_profile(one), 50_000) for one in laws)
    prism.plot.cdf(law, trace.step_times()[1::2], ax=right)
    levels = np.linspace(0.0005, 0.9995, 1000)
    x = np.asarray(other.quantile(levels))
    right.plot(x, levels, color="0.5", linestyle=":", label="ops sampled one by one")
    right.legend()
    right.set_title("a slow worker among 64 GPUs", loc="left")
    figure.savefig(ROOT / "docs/measured.png", dpi=80, pil_kwargs={"optimize": True})


def _law(program, num_samples: int):
    return prism.simulate(program, num_samples=num_samples, key=jax.random.key(0))


if __name__ == "__main__":
    main()
