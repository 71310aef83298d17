"""Finds settings that make a step much longer than a neighbouring one would."""

import msgspec

from ..data import Job
from ._predict import predict


# What is worth a line: a step longer by this share.
_MUCH = 0.05


def costly_keys(job: Job) -> tuple[str, ...]:
    """A sentence for each key of a job that makes its step much longer, with what to set instead.

    With sharded gradients beside a pipeline, each microbatch reduces all gradients of a stage,
    unless they are summed first, as in Megatron-LM.
    """
    how = job.training
    if job.model is None or how is None or how.zero < 2 or how.accumulate_gradients:
        return ()
    if job.layout.pp == 1 or job.layout.dp * job.layout.cp == 1:
        return ()
    instead = {
        "accumulate_gradients = true": {"accumulate_gradients": True},
        "zero = 1": {"zero": 1},
    }
    for said, changes in instead.items():
        other = msgspec.structs.replace(job, training=msgspec.structs.replace(how, **changes))
        try:
            longer = predict(job).mean / predict(other).mean - 1
        except ValueError:  # Its gradients cannot be summed.
            continue
        if longer < _MUCH:
            return ()
        return (
            f"with `training.zero = {how.zero}` beside a pipeline, each microbatch reduces its "
            f"gradients, which makes the step {100 * longer:.0f} % longer than `training.{said}` "
            "would.",
        )
    return ()
