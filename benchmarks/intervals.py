"""How honest confidence intervals are: python benchmarks/intervals.py

Simulates the main job (`gpt3-175b-h100-4096`) with many keys. For each figure of the law it prints
how often the 95 % interval contains the truth. It also prints the mean width of the interval over
the width that the scatter of the estimates calls for. The truth is from a long run. Intervals that
say "unknown" are counted separately.
"""

import argparse

import numpy as np


_FIGURES = ("mean", "std", "p5", "p50", "p95", "p99")


def main() -> None:
    parser = argparse.ArgumentParser(description="Coverage and width of intervals.")
    parser.add_argument("--job", default="gpt3-175b-h100-4096")
    parser.add_argument("--seeds", type=int, default=200)
    parser.add_argument("--samples", type=int, nargs="+", default=[5_000, 100_000])
    parser.add_argument("--truth", type=int, default=16_000_000)
    parser.add_argument("--first-seed", type=int, default=0)
    ways = ("plain", "auto", "importance")
    parser.add_argument("--sampling", nargs="+", choices=ways, default=ways)
    arguments = parser.parse_args()

    import jax

    from prism_jax import compile_job, load_job, simulate
    from prism_jax.law import figures

    jax.config.update("jax_num_cpu_devices", 2)
    program = compile_job(load_job(arguments.job))

    def found(num_samples, seed, sampling):
        key = jax.random.key(seed)
        law = simulate(program, num_samples=num_samples, key=key, sampling=sampling)
        return [(value, *interval) for value, interval in figures(law).values()]

    # Sampled as tells most in its time: the truth's own error must be small beside any scatter.
    truth = np.array(found(arguments.truth, 10**6, "importance"))[:, 0]
    print(f"{arguments.job}, {arguments.seeds} seeds, truth of {arguments.truth:,} steps")
    print(
        f"{'steps':>8} {'sampling':>11} {'figure':>6} {'unknown':>8} {'coverage':>9} {'width':>6}"
    )
    for num_samples in arguments.samples:
        for sampling in arguments.sampling:
            seeds = range(arguments.first_seed, arguments.first_seed + arguments.seeds)
            runs = np.array([found(num_samples, seed, sampling) for seed in seeds])
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
