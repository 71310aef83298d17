"""The first kernels of a stage, for a tensor that another pipeline rank sent."""

from collections.abc import Sequence

from ._block import Block
from ._costs import Costs
from ._parts import block, segment
from ._split import Stages


def received(costs: Costs, stages: Stages, stage: int, step: int) -> Block:
    """Gathers the tensor from the stage `step` ahead: if each of its ranks sent a part, the ranks
    of this stage gather the parts, as Megatron-LM does after receiving and before the layers run
    (Narayanan et al. 2021, arXiv:2104.04473, section 4.1).
    """
    sender = stage + step
    sent = 0 <= sender < len(stages.rank) and stages.rank[sender] != stages.rank[stage]
    if not (sent and costs.scatters_send_recv):
        return ()
    num_bytes = 2 * costs.norm_tokens * costs.model.hidden_size
    return block([([segment([], costs.collective("all_gather", num_bytes, costs.tp))], 1)])


def with_received(
    costs: Costs, stages: Stages, blocks: Sequence[Block], step: int
) -> tuple[Block, ...]:
    """The blocks of all stages, each after `received`. Equal stages still share a block."""
    joined: dict[tuple[Block, int], Block] = {}

    def of_stage(stage: int, one: Block) -> Block:
        first = received(costs, stages, stage, step)
        return joined.setdefault((first, id(one)), first + one) if first else one

    return tuple(of_stage(stage, one) for stage, one in enumerate(blocks))
