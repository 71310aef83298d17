"""What a stage does with what another pipeline rank sent, before anything else."""

from collections.abc import Sequence

from ._block import Block
from ._costs import Costs
from ._parts import block, segment
from ._split import Stages


def received(costs: Costs, stages: Stages, stage: int, step: int) -> Block:
    """Makes whole what came from the stage `step` ahead: where its ranks each sent a part, those of
    this stage gather them, as Megatron-LM does when the part has come and before the layers run
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
    """The blocks of all stages, each after `received`. Stages that were alike still share one."""
    joined: dict[tuple[Block, int], Block] = {}

    def of_stage(stage: int, one: Block) -> Block:
        first = received(costs, stages, stage, step)
        return joined.setdefault((first, id(one)), first + one) if first else one

    return tuple(of_stage(stage, one) for stage, one in enumerate(blocks))
