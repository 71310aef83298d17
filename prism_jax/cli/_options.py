"""Options that several commands share."""

from ._command import Argument, argument, flag, repeated
from ._values import count, quantiles, seed, steps


JOB = argument(
    "job", "JOB", "a shipped job (`prism-jax jobs`), a .toml file, or the folder of a profile"
)
# Of commands that take no profile.
NO_PROFILE = argument("job", "JOB", "a shipped job (`prism-jax jobs`), or a .toml file")
SEED = argument("--seed", "S", "random seed (0)", seed, 0)
SET = repeated(
    "--set",
    "KEY=VALUE",
    "change a key of the job, such as layout.dp=64; can be repeated",
    dest="overrides",
)
ALLOW_OOM = flag("--allow-oom", "continue if the job does not fit in memory")
PROGRESS = flag(
    "--progress", "report progress on stderr (the default on a terminal without --json)"
)
STEPS = argument(
    "--steps",
    "A:B[:S]",
    "use only these of the sorted steps, a Python slice such as ::2 (all)",
    steps,
    slice(None),
)
OBJECTIVE = argument(
    "--objective",
    "FIGURE",
    "mean, std, p95, cvar95, or over1.7: the probability of more than 1.7 s (p95)",
    default="p95",
)
TOP = argument("--top", "N", "how many rows to print (10)", count, 10)


def over(**more: bool) -> Argument:
    return repeated(
        "--over",
        "KEY=VALUES",
        "values of a key: layout.dp=16,32,64 or kernels.all_gather.sigma=0.01:0.2:20 (from, to, "
        "how many); can be repeated, for all combinations",
        **more,
    )


def simulated(samples: int = 65_536) -> tuple[Argument, ...]:
    """Which job to simulate, with which changes, and for how many steps."""
    steps = argument("--samples", "N", f"steps to simulate ({samples})", count, samples)
    return JOB, steps, SEED, SET, ALLOW_OOM, PROGRESS


SIMULATED = simulated()
LAW = (
    *SIMULATED,
    argument(
        "--sampling",
        None,
        "how samples of a replica are drawn: importance for tails, sobol for means (auto)",
        default="auto",
        choices=("auto", "plain", "importance", "sobol"),
    ),
    argument(
        "--allocations",
        "K",
        "divide the steps among K sets of GPUs, and print how much they differ (by default, GPUs "
        "are drawn anew for each step)",
        count,
    ),
    flag(
        "--epistemic",
        "also print the law with the uncertainty of the model: of the level and the spread of a "
        "run, from its calibration or from the errors of earlier predictions",
    ),
    argument(
        "--quantiles",
        "Q,Q",
        "further quantiles, such as 0.999 (0.05, 0.5, 0.95 and 0.99 are always printed)",
        quantiles,
        {},
    ),
)
