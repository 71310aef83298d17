"""The ops of a trace: which run once for each microbatch or step, on which workers, with whom."""

import numpy as np
from jaxtyping import Bool


# Ops that a worker runs once for each microbatch.
COMPUTE = ("forward-compute", "backward-compute")
# And those of which the first or the last stage has none.
TRANSFERS = {
    "forward-send": slice(None, -1),
    "forward-recv": slice(1, None),
    "backward-send": slice(1, None),
    "backward-recv": slice(None, -1),
}
PIPELINED = (*COMPUTE, *TRANSFERS)
# Ops that it runs once in a step, and with whom: the other replicas of its stage, the last stage
# of its replica, everyone, or nobody whose op is in the trace.
SCOPES = {
    "load-data": "self",
    "params-all-gather": "dp",
    "grads-reduce-scatter": "dp",
    "embedding-grads-all-reduce": "pp",
    "optimizer-clip-main-grad": "world",
    "layernorm-grads-all-reduce": "self",
    "optimizer": "self",
    "gc": "self",
}


def expected_calls(
    op: str, there: Bool[np.ndarray, "steps dp pp calls"]
) -> Bool[np.ndarray, "dp pp calls"]:
    """Which calls every step should have: what the pipeline needs, or what most steps have."""
    if op not in PIPELINED:
        return np.mean(there, axis=0) >= 0.5
    expected = np.zeros(there.shape[1:], bool)
    expected[:, TRANSFERS.get(op, slice(None))] = True
    return expected
