"""Whether a command uses an accelerator, which begins late and then does more a second, or the
CPU beside it: by the time that both are reckoned to take.
"""

# From so many op evaluations on, an accelerator is used where there is one.
MANY = 10**10
# Seconds of a command on an H200, and on two CPU cores, where nothing is compiled yet, of
# gpt3-175b-h100-4096: docs/accelerators.md. Other commands are taken to begin like `simulate`.
_COLD_S = {"simulate": (6.1, 4.5), "sensitivity": (25.7, 15.7)}
# Op evaluations a second of `simulate`, end to end: of the H200 (docs/accelerators.md), and of a
# CPU core (docs/speed.md).
_OF_ACCELERATOR, _OF_CORE = 2.7e9, 3.8e8


def reckoned_s(command: str, evaluations: int, cores: int) -> tuple[float, float]:
    """The seconds of a command on an accelerator, and on the cores of a CPU.

    `evaluations` are those of ops: steps x ops of a replica x programs that are simulated.
    """
    accelerator, cpu = _COLD_S.get(command, _COLD_S["simulate"])
    return accelerator + evaluations / _OF_ACCELERATOR, cpu + evaluations / (_OF_CORE * cores)


def rather_on_cpu(command: str, evaluations: int, cores: int) -> bool:
    """Whether a CPU is done no later than an accelerator; with many op evaluations, never."""
    accelerator, cpu = reckoned_s(command, evaluations, cores)
    return evaluations < MANY and cpu <= accelerator
