"""Draws docs/plots.png, the pictures of docs/plots.md (about a minute on two cores), and
docs/profile.png, a step of examples/gpu_profile.json.gz.

python tools/figures.py
"""

import gzip
import json
import pathlib

import jax
import matplotlib
import numpy as np

import prism_jax as prism


# Eight of the job's 64 microbatches, so that single ops can be seen.
JOB, CHANGES = "megatron-175b-a100-64", ["schedule.num_microbatches=8"]
STEPS = 3_200
DOCS = pathlib.Path(__file__).parents[1] / "docs"


def profile() -> None:
    """The third step of a profile: what the host waits in, and what the device runs meanwhile."""
    import matplotlib.pyplot as plt

    folder = DOCS
    text = gzip.decompress((folder.parent / "examples/gpu_profile.json.gz").read_bytes())
    begin, length = 40_000, 20_000
    figure, axis = plt.subplots(figsize=(11, 2.6), layout="constrained")
    colors = {"forward": "C0", "flash": "C0", "backward": "C4", "adam": "C2", "nccl": "C1"}
    for event in json.loads(text)["traceEvents"]:
        name, start = event["name"], event["ts"] - begin
        host = {"enumerate(DataLoader)": "waits for data", "cudaFree": "cudaFree"}
        waits = next((label for key, label in host.items() if name.startswith(key)), "")
        if not 0 <= start < length or not (waits or event["cat"] == "kernel"):
            continue
        row = 2 if waits else 1 if event["tid"] == 7 else 0
        color = "0.6" if waits else next(c for key, c in colors.items() if key in name)
        axis.barh(row, event["dur"] / 1e3, left=start / 1e3, color=color, edgecolor="white")
        label = waits or {"ncclDevKernel_A": "all_gather", "ncclDevKernel_R": "reduce_scatter"}.get(
            name[:15], ""
        )
        axis.text(
            (start + event["dur"] / 2) / 1e3, row, label, ha="center", va="center", fontsize=8
        )
    for middle, label in ((7.5, "forward"), (14.8, "backward"), (19.45, "optimizer")):
        axis.text(middle, 1, label, ha="center", va="center", fontsize=8)
    for start, end, label in (
        (0, 3, "idle: input"),
        (10, 11, "idle:\ncudaFree"),
        (3, 5, "exposed"),
    ):
        axis.axvspan(start, end, color="C3", alpha=0.12, lw=0)
        axis.text((start + end) / 2, 2.55, label, ha="center", va="bottom", fontsize=8)
    axis.set(yticks=range(3), yticklabels=["communication", "compute", "host"], xlim=(0, 20))
    axis.set(xlabel="ms", ylim=(-0.5, 3.1))
    figure.savefig(folder / "profile.png", dpi=70, pil_kwargs={"optimize": True})


def main() -> None:
    matplotlib.use("Agg")
    profile()
    import matplotlib.pyplot as plt

    key = jax.random.key(0)
    program = prism.compile_job(prism.load_job(JOB, CHANGES))
    law = prism.simulate(program, num_samples=20_000, key=key)
    figure, axes = plt.subplots(3, 2, figsize=(11, 9), layout="constrained")
    # Steps of another run of the same program stand in for measured ones.
    other = prism.simulate(program, num_samples=2_000, key=jax.random.key(1))
    steps = np.asarray(other.quantile(np.random.default_rng(0).uniform(0.001, 0.999, 100)))
    prism.plot.histogram(law, steps, ax=axes[0, 0])
    prism.plot.qq(law, steps, ax=axes[0, 1])
    step = prism.sample_step(program, quantile=0.99, num_samples=STEPS, key=key)
    prism.plot.gantt(step, ax=axes[1, 0])
    found = prism.criticality(program, num_samples=STEPS, key=key)
    prism.plot.heat_map(found, ax=axes[1, 1])
    objective = prism.Quantile(0.95)
    found = prism.sensitivity(program, objective, num_samples=STEPS, key=key)
    prism.plot.tornado(found, top=8, ax=axes[2, 0])
    run = prism.training_run(program, num_steps=100_000, key=key, num_runs=20_000)
    prism.plot.training_run(run, deadline_days=run.quantile(0.8), ax=axes[2, 1])
    figure.savefig(DOCS / "plots.png", dpi=70, pil_kwargs={"optimize": True})


if __name__ == "__main__":
    main()
