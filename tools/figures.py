"""Draws the pictures of docs/gallery.md (about a minute on two cores), and docs/profile.png, a step
of examples/gpu_profile.json.gz.

python tools/figures.py
"""

import gzip
import json
import pathlib
from collections.abc import Callable, Iterator

import jax
import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

import prism_jax as prism
from prism_jax import plot


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
    save(figure, DOCS / "profile.png")


def gallery() -> Iterator[tuple[str, Callable[[Axes], object]]]:
    """The pictures of `docs/gallery.md` by name, each as a function that draws on axes."""
    key = jax.random.key(0)
    job = prism.load_job(JOB, CHANGES)
    program = prism.compile_job(job)
    law = prism.simulate(program, num_samples=20_000, key=key)
    # Steps of another run of the same program stand in for measured ones.
    other = prism.simulate(program, num_samples=2_000, key=jax.random.key(1))
    steps = np.asarray(other.quantile(np.random.default_rng(0).uniform(0.001, 0.999, 100)))
    yield "histogram", lambda axes: plot.histogram(law, steps, ax=axes)
    yield "cdf", lambda axes: plot.cdf(law, steps, ax=axes)
    yield "qq", lambda axes: plot.qq(law, steps, ax=axes)
    step = prism.sample_step(program, quantile=0.99, num_samples=STEPS, key=key)
    yield "gantt", lambda axes: plot.gantt(step, ax=axes)
    path = prism.criticality(program, num_samples=STEPS, key=key)
    yield "heat_map", lambda axes: plot.heat_map(path, ax=axes)
    parts = prism.sensitivity(program, prism.Quantile(0.95), num_samples=STEPS, key=key)
    yield "tornado", lambda axes: plot.tornado(parts, top=8, ax=axes)
    run = prism.training_run(program, num_steps=100_000, key=key, num_runs=20_000)
    deadline = run.quantile(0.8)
    yield "training_run", lambda axes: plot.training_run(run, deadline_days=deadline, ax=axes)
    breakdown = prism.predict(job).breakdown
    yield "breakdown", lambda axes: plot.breakdown(breakdown, ax=axes)
    memory = prism.memory(job)
    yield "memory", lambda axes: plot.memory(memory, ax=axes)
    rows = []
    for replicas in (1, 2, 4, 8, 16):
        of_size = prism.load_job(JOB, [*CHANGES, f"world_size={64 * replicas}"])
        steps_of_size = prism.simulate(prism.compile_job(of_size), num_samples=20_000, key=key)
        figures = {"mean_s": steps_of_size.mean, "p95_s": steps_of_size.quantile(0.95)}
        rows.append({"replicas": replicas, **figures})
    yield "scale", lambda axes: plot.scale(rows, "replicas", ax=axes)


def main() -> None:
    matplotlib.use("Agg")
    profile()
    import matplotlib.pyplot as plt

    for name, draw in gallery():
        figure, axes = plt.subplots(figsize=(6.5, 3.4), layout="constrained")
        draw(axes)
        save(figure, DOCS / "gallery" / f"{name}.png")


def save(figure: Figure, path: pathlib.Path) -> None:
    path.parent.mkdir(exist_ok=True)
    figure.savefig(path, dpi=100, pil_kwargs={"optimize": True})


if __name__ == "__main__":
    main()
