"""How honest confidence intervals are: python benchmarks/intervals.py

Simulates the main job (`gpt3-175b-h100-4096`) with many keys. For each figure of the law it prints
how often the 95 % interval contains the truth. It also prints the mean width of the interval over
the width that the scatter of the estimates calls for. The truth is from a long run. Intervals that
say "unknown" are counted separately.
"""

import sys

import jax
import numpy as np


sys.path.insert(0, __file__.rpartition("/benchmarks/")[0])
from benchmarks._coverage import coverage, repeated
from benchmarks._tables import options
from prism_jax import compile_job, load_job, simulate
from prism_jax.law import figures


_WAYS = ("plain", "auto", "importance")
_JOB, _SEEDS, _TRUTH = "gpt3-175b-h100-4096", 200, 16_000_000


def main() -> None:
    ways = options(__doc__, sampling={"nargs": "+", "choices": _WAYS, "default": _WAYS}).sampling
    jax.config.update("jax_num_cpu_devices", 2)
    program = compile_job(load_job(_JOB))

    def found(seed, num_samples, sampling):
        key = jax.random.key(seed)
        law = simulate(program, num_samples=num_samples, key=key, sampling=sampling)
        return {name: (value, *interval) for name, (value, interval) in figures(law).items()}

    # Sampled as tells most in its time: the truth's own error must be small beside any scatter.
    truth = found(10**6, _TRUTH, "importance")
    print(f"{_JOB}, {_SEEDS} seeds, truth of {_TRUTH:,} steps")
    header = ("steps", "sampling", "figure", "unknown", "coverage", "width")
    print("{:>8} {:>11} {:>6} {:>8} {:>9} {:>6}".format(*header))
    for num_samples in (5_000, 100_000):
        for way in ways:
            runs = repeated(lambda seed, n=num_samples, way=way: found(seed, n, way), range(_SEEDS))
            for name, each in runs.items():
                held, unknown = coverage(each, truth[name][0])
                row = f"{num_samples:>8,} {way:>11} {name:>6} {unknown:>8.2f}"
                if unknown < 1:
                    half = np.nanmean(each[:, 2] - each[:, 1]) / 2
                    row += f" {held:>9.3f} {half / (1.96 * np.std(each[:, 0])):>6.2f}"
                print(row)


if __name__ == "__main__":
    main()
