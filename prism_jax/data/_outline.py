"""What a trace shows of the graph of a step."""

import msgspec

from ._types import Label, Name


class Call(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An op that workers run once in a step.

    **Attributes:**

    - `op`: the name of the op, as in traces.
    - `scope`: which workers run it together: `self` (the worker alone), or all workers with the op
        in the same `dp` group (the replicas of a stage), `pp` group (the stages of a replica) or
        `world`.
    - `waits_for`: for each `[dp_rank][stage]`, the workers whose earlier ops must have ended before
        the worker launches the op: a scope, or `last` (the worker and the last stages of all
        replicas, which share the loss), or empty for a worker without the op.
    """

    op: Name
    scope: Label
    waits_for: tuple[tuple[Label, ...], ...]


class Outline(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a trace shows of the graph of a step: the ops that workers run once in a step, before
    and after the pipeline, in their order; if there are two classes of links, the pairs of workers
    (`dp_rank * pp + stage`) with slow links, such as those between nodes; and the kinds of compute
    that start only when all replicas have reached them, such as those that gather parameters.
    """

    before: tuple[Call, ...] = ()
    after: tuple[Call, ...] = ()
    slow_links: tuple[tuple[int, int], ...] = ()
    gathered: tuple[Name, ...] = ()
