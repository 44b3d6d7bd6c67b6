"""How first values, learning rates, weight decay and epsilon of a model follow from those of a
narrower, shallower base model: settings which were found with the base model are then right for it.

`mup` is the maximal update parametrization for AdamW (Yang et al., arXiv 2203.03466); with
`completep` depth transfers too (Dey et al., arXiv 2505.01618). Both are usually written with
multipliers of activations: 1/width before the head, 1/depth before the residual stream. AdamW and
Muon take the same steps where a tensor's first value and its learning rate have the multiplier
instead, and epsilon has the gradient's scale. That form is used here: the forward pass, checkpoints
and exported folders are those of a plain model, and there is nothing to fold.

All that grows with a model (hidden and feed-forward sizes, numbers of heads, latents) is taken to
grow as its hidden size does.
"""

import math
import re
from dataclasses import dataclass
from typing import Literal, NamedTuple

from lmforge.core.errors import UserError
from lmforge.core.model.config import ModelConfig
from lmforge.core.options.sections import ModelOptions

Place = Literal["embedding", "block", "final norm", "head"]


class TensorScale(NamedTuple):
    """A tensor's kind, and its factors: of its first value (loc and scale), of learning rates under
    AdamW and Muon, and of epsilon. A matrix decays by as much in a step whatever its learning rate:
    the factor of its weight decay is 1 / lr.
    """

    kind: Literal["input", "hidden", "output", "vector"]
    init: float = 1.0
    lr: float = 1.0
    muon_lr: float = 1.0
    eps: float = 1.0


@dataclass(frozen=True)
class Parametrization:
    """The size of a model relative to its base model, from which the factors of each tensor follow.

    width, depth: of the model, relative to the base model. head_dim: of the base model's heads,
    relative to this one's.
    """

    width: float
    depth: float = 1.0
    head_dim: float = 1.0

    def scale(
        self, name: str, shape: tuple[int, ...], place: Place, config: ModelConfig
    ) -> TensorScale:
        """The factors of the tensor `name`, of this full shape, relative to a model in the standard
        parametrization.
        """
        width = self.width
        tied = config.tie_word_embeddings
        # Some families multiply embeddings by the root of the width, which would make them grow.
        root = math.sqrt(width) if config.family.scaled_embeddings else 1.0
        if place == "embedding":
            return TensorScale("input", 1 / root, 1 / root, 1 / root, root / width)
        if place == "head":
            return (
                TensorScale("vector")
                if len(shape) == 1
                else TensorScale("output", 1 / width, 1 / width, 1 / width)
            )
        if place == "final norm":  # a tied embedding has no first value of its own for the head
            factor = root / width if tied else 1.0
            return TensorScale("vector", factor, factor, factor, 1.0 if tied else 1 / width)
        return self._scale_in_block(name, shape, config)

    def _scale_in_block(
        self, name: str, shape: tuple[int, ...], config: ModelConfig
    ) -> TensorScale:
        width = self.width
        depth = self.depth
        module = re.sub(r"(\.lora_[AB])?[._](weight|bias)$", "", name)
        residual = module.endswith(config.residual_linears)
        # What a block adds to the residual stream is divided by the depth in the last tensor that
        # it passes.
        branches = (branch for block in config.block_kinds for branch in block.branches)
        norms_of_outputs = tuple(branch.after for branch in branches if branch.after)
        last = module.endswith(norms_of_outputs) if norms_of_outputs else residual
        branch, inside = (1 / depth, 1.0) if last else (1.0, 1 / depth)
        attention = self._attention_factor(module, config)
        factor = branch * attention
        eps = inside / width / attention
        if name.endswith(".lora_B.weight"):  # its inputs do not grow
            return TensorScale("input", factor, factor, factor, eps)
        if name.endswith(".lora_A.weight"):  # whose first value already follows from its inputs
            return TensorScale("hidden", 1.0, 1 / width, 1 / math.sqrt(width), eps)
        if len(shape) == 1 or config.vector(name):
            return TensorScale("vector", factor, factor, factor, eps)
        # A router scores experts, whose number does not grow; so does what shared ones are given.
        if module.endswith(config.scoring_linears):
            return TensorScale("output", 1 / width, 1 / width, 1 / width, inside)
        # The standard first value of these has the root of the depth, which the base model has of
        # its own depth.
        init = factor / math.sqrt(width) * (math.sqrt(depth) if residual else 1.0)
        return TensorScale("hidden", init, factor / width, factor / math.sqrt(width), eps)

    def _attention_factor(self, module: str, config: ModelConfig) -> float:
        """The factor of attention's scores, which is that of one module's output: heads divide them
        by the root of their width, or by a number that does not grow.
        """
        mixers = (mixer for block in config.block_kinds for mixer in block.mixers)
        attention = next((each for each in mixers if each.mixes_tokens and not each.states), None)
        if attention is None:
            return 1.0
        name = attention.linears[0].name
        if config.qk_norm:
            name = attention.norms[0].name
        elif config.q_lora_rank:
            name = attention.linears[1].name
        if self.head_dim == 1.0 or not module.endswith(name):
            return 1.0
        divides_by_root = config.query_pre_attn_scalar in (None, config.head_dim)
        if divides_by_root and config.multipliers is None:
            return math.sqrt(self.head_dim)
        return self.head_dim


# All factors of a model that is its own base model are 1.
STANDARD = Parametrization(1.0)
UNSCALED = TensorScale("hidden")


def relative_to_base(options: ModelOptions, config: ModelConfig) -> Parametrization:
    """The parametrization that a recipe's options say, of its model.

    Raises UserError where the model has none.
    """
    kind = options.parametrization
    if kind == "standard":
        return STANDARD
    assert options.base_width is not None, "which the options need"
    if config.implementation == "transformers":
        raise UserError(
            f"model.parametrization = {kind}: not with model.implementation = transformers; use"
            " standard"
        )
    own_head_dim = config.qk_head_dim if config.family.latent_attention else config.head_dim
    head_dim = 1.0 if options.base_head_dim is None else options.base_head_dim / own_head_dim
    if head_dim != 1.0 and not (config.family.grouped_heads or config.family.latent_attention):
        way = "keep the width of heads, and add heads"
        raise UserError(
            f"model.base_head_dim: {config.model_type} has queries and keys in one matrix; {way}"
        )
    depth = config.num_hidden_layers / options.base_depth if options.base_depth else 1.0
    return Parametrization(config.hidden_size / options.base_width, depth, head_dim)
