"""How honest confidence intervals are: python benchmarks/intervals.py

Simulates the main job (`gpt3-175b-h100-4096`) with many keys. For each figure of the law it prints
how often the 95 % interval contains the truth. It also prints the mean width of the interval over
the width that the scatter of the estimates calls for. The truth is from a long run. Intervals that
say "unknown" are counted separately.
"""

import argparse

import jax
import numpy as np

from prism_jax import compile_job, load_job, simulate
from prism_jax.law import figures


_FIGURES = ("mean", "std", "p5", "p50", "p95", "p99")
_WAYS = ("plain", "auto", "importance")
_JOB, _SEEDS, _TRUTH = "gpt3-175b-h100-4096", 200, 16_000_000


def main() -> None:
    parser = argparse.ArgumentParser(description="Coverage and width of intervals.")
    parser.add_argument("--sampling", nargs="+", choices=_WAYS, default=_WAYS)
    ways = parser.parse_args().sampling
    jax.config.update("jax_num_cpu_devices", 2)
    program = compile_job(load_job(_JOB))

    def found(num_samples, seed, sampling):
        key = jax.random.key(seed)
        law = simulate(program, num_samples=num_samples, key=key, sampling=sampling)
        return [(value, *interval) for value, interval in figures(law).values()]

    # Sampled as tells most in its time: the truth's own error must be small beside any scatter.
    truth = np.array(found(_TRUTH, 10**6, "importance"))[:, 0]
    print(f"{_JOB}, {_SEEDS} seeds, truth of {_TRUTH:,} steps")
    header = ("steps", "sampling", "figure", "unknown", "coverage", "width")
    print("{:>8} {:>11} {:>6} {:>8} {:>9} {:>6}".format(*header))
    for num_samples in (5_000, 100_000):
        for sampling in ways:
            runs = np.array([found(num_samples, seed, sampling) for seed in range(_SEEDS)])
            for i, name in enumerate(_FIGURES):
                value, low, high = runs[:, i].T
                known = ~np.isnan(low)
                row = f"{num_samples:>8,} {sampling:>11} {name:>6} {np.mean(~known):>8.2f}"
                if known.any():
                    holds = (low <= truth[i]) & (truth[i] <= high)
                    half = np.mean(high[known] - low[known]) / 2
                    row += f" {np.mean(holds[known]):>9.3f} {half / (1.96 * np.std(value)):>6.2f}"
                print(row)


if __name__ == "__main__":
    main()
