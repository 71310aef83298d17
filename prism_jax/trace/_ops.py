"""The ops of traces: which run for each microbatch or once in a step, and on which workers."""

# Ops that a worker runs for each microbatch of each of its stages, and their letters in the tokens
# of schedules. A backward is one op, or two: of the input, on which the next stage waits, and of
# the weights.
LETTERS = {
    "forward-compute": "F",
    "backward-compute": "B",
    "backward-input": "I",
    "backward-weight": "W",
}
COMPUTE = tuple(LETTERS)
# Transfers between stages, with the distance of the other stage.
TRANSFERS = {
    "forward-send": 1,
    "forward-recv": -1,
    "backward-send": -1,
    "backward-recv": 1,
}
PIPELINED = (*COMPUTE, *TRANSFERS)
# Ops that a worker runs once in a step, and with whom: the other replicas of its stage, the last
# stage of its replica, all workers, or no worker whose op is in the trace.
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
