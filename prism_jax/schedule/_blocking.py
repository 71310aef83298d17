from ._nodes import Nodes, find_transfers
from ._ops import Ops


def blocking_nodes(ops: Ops) -> Nodes:
    """The graph in which a send_recv is a rendezvous that blocks both ranks.

    A rank is a sequence of compute ops and of batches of transfers. Each waits for all of the one
    before it; a transfer does so on both of its ranks.
    """
    _check(ops)
    transfers, ends = find_transfers(ops)
    sends = [[] for _ in ops.actions]
    receives = [[] for _ in ops.actions]
    for node, (producer, consumer) in enumerate(ends, len(ops.actions)):
        sends[producer].append(node)
        receives[consumer].append(node)
    waits = [[] for _ in range(len(ops.actions) + len(transfers))]
    last = []
    for span in ops.orders:
        done = []
        before = None
        for op in span:
            if before is None:
                batches = [receives[op]]
            elif ops.actions[before].phase == ops.actions[op].phase:
                batches = [sends[before], receives[op]]
            else:
                batches = [sends[before] + receives[op]]
            for batch in [*batches, [op]]:
                done = _follow(waits, batch, done)
            before = op
        if before is not None:
            done = _follow(waits, sends[before], done)
        last.append(done)
    return Nodes(transfers, waits, last)


# The nodes of a batch wait for what the rank has done; then they are what it has done.
def _follow(waits: list[list[int]], batch: list[int], done: list[int]) -> list[int]:
    for node in batch:
        waits[node] += done
    return batch or done


def _check(ops: Ops) -> None:
    for rank, span in enumerate(ops.orders):
        kinds = {(action.stage, action.phase) for action in ops.actions[span.start : span.stop]}
        stages = sorted({stage for stage, _ in kinds})
        phases = sorted({phase for _, phase in kinds} - {"F", "B"})
        if len(stages) > 1 or phases:
            given = f"stages {stages}" if len(stages) > 1 else f"ops of phase {phases}"
            raise ValueError(
                "Blocking send_recv is only for schedules with one stage per rank and whole "
                f"backwards, such as 1F1B and GPipe, but rank {rank} runs {given}; use "
                "`blocking=False`."
            )
