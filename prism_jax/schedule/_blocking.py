import numpy as np

from ._needs import Needs
from ._nodes import Nodes
from ._ops import Ops


def blocking_nodes(ops: Ops, needs: Needs) -> Nodes:
    """The graph in which a send_recv is a rendezvous that blocks both ranks.

    A rank is a sequence of compute ops and batches of transfers. Each item waits for the whole item
    before it; a transfer waits on both of its ranks.
    """
    _check(ops)
    phase = ops.phase.tolist()
    sends = [[] for _ in phase]
    receives = [[] for _ in phase]
    ends = zip(needs.producer.tolist(), needs.consumer.tolist(), strict=True)
    for node, (producer, consumer) in enumerate(ends, len(phase)):
        sends[producer].append(node)
        receives[consumer].append(node)
    waits = []
    last = []
    for span in ops.orders:
        done = []
        before = None
        for op in span:
            if before is None:
                batches = [receives[op]]
            elif phase[before] == phase[op]:
                batches = [sends[before], receives[op]]
            else:
                batches = [sends[before] + receives[op]]
            for batch in [*batches, [op]]:
                done = _follow(waits, batch, done)
            before = op
        if before is not None:
            done = _follow(waits, sends[before], done)
        last.append(done)
    before, after = np.array(waits, np.int64).reshape(-1, 2).T
    return Nodes(before, after, last)


# The nodes of a batch wait for the last nodes of the rank, and then become its last nodes.
def _follow(waits: list[tuple[int, int]], batch: list[int], done: list[int]) -> list[int]:
    waits += [(other, node) for node in batch for other in done]
    return batch or done


def _check(ops: Ops) -> None:
    for rank, span in enumerate(ops.orders):
        stages = np.unique(ops.stage[span.start : span.stop]).tolist()
        phases = sorted({*ops.phase[span.start : span.stop].tolist()} - {"F", "B"})
        if len(stages) > 1 or phases:
            given = f"stages {stages}" if len(stages) > 1 else f"ops of phase {phases}"
            raise ValueError(
                "Blocking send_recv is only for schedules with one stage per rank and whole "
                f"backwards, such as 1F1B and GPipe, but rank {rank} runs {given}; use "
                "`blocking=False`."
            )
