"""Draws docs/plots.png, the pictures of docs/plots.md (about a minute on two cores).

python docs/figures.py
"""

import pathlib

import jax
import matplotlib
import numpy as np

import prism_jax as prism


# Eight of the job's 64 microbatches, so that single ops can be seen.
JOB, CHANGES = "megatron-175b-a100-64", ["schedule.num_microbatches=8"]
STEPS = 3_200


def main() -> None:
    matplotlib.use("Agg")
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
    figure.savefig(
        pathlib.Path(__file__).with_name("plots.png"), dpi=70, pil_kwargs={"optimize": True}
    )


if __name__ == "__main__":
    main()
