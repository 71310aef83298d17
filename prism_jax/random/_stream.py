import enum


class Stream(enum.IntEnum):
    """The purposes of random numbers. Each has a key of its own, so that draws for one purpose are
    independent of those for another.

    The numbers define the meaning of a key: changing one changes results.
    """

    OPS = 0
    RANKS = 1
    MICROBATCHES = 2
    STALLS = 3
    LEAD = 5
    WORKER_STEPS = 6
    OTHER_GPUS = 7
    STEPS = 100
    UNLIKE = 200  # Replicas that are unlike the others.
