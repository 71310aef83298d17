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
# And those that it has with another stage: how far this one is away.
TRANSFERS = {
    "forward-send": 1,
    "forward-recv": -1,
    "backward-send": -1,
    "backward-recv": 1,
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
