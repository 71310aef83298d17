from ._adaln import AdaLN as AdaLN
from ._attention import Attention as Attention
from ._base import AbstractModule as AbstractModule, Parameters as Parameters
from ._convolution import Convolution as Convolution, ResNetBlock as ResNetBlock
from ._embedding import Embedding as Embedding
from ._embedding_bags import EmbeddingBags as EmbeddingBags
from ._gather import norm_parameters as norm_parameters
from ._head import Head as Head
from ._mamba import Mamba as Mamba
from ._mla import MLA as MLA
from ._mlp import MLP as MLP
from ._moe import MoE as MoE
from ._patches import PatchEmbedding as PatchEmbedding, PatchHead as PatchHead
from ._projection import Projection as Projection
from ._registry import make_module as make_module, modules as modules
from ._streams import StreamBlock as StreamBlock
