"""The units of a rank's model that FSDP gathers and reduces, and the parameters of each.

They are the embedding, blocks, the head, and a root with the rest. Without FSDP they are parts of
the model only.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from lmforge.core.model.blocks import Block
from lmforge.lab.plan.prediction.rates import Group, make_group
from lmforge.lab.plan.prediction.step_config import StepConfig
from lmforge.lab.plan.traces import ModelShapes, Shapes, model_shapes


@dataclass(frozen=True)
class Stage:
    """The part of the model on a rank: all of it, or a pipeline's.

    `in_flight` micro-batches wait for their backward pass.
    """

    blocks: int
    has_embedding: bool = True
    has_head: bool = True
    in_flight: int = 1


@dataclass(frozen=True)
class Unit:
    """A module of the rank's model that FSDP gathers and reduces at once.

    parameters: before sharding; `padded` with the rows that FSDP2 adds so that tensors divide by
    the ranks; `trained` and `padded_trained` those that are trained. group: the ranks that it is
    sharded over.
    quantized: the padded bytes of matrices in 4 or 8 bits, which are not among the parameters.
    """

    name: str
    parameters: int
    padded: int
    trained: int
    padded_trained: int
    group: Group
    quantized: int = 0


@dataclass(frozen=True)
class Units:
    """The units of a rank.

    experts: of a block by its name, where expert parallelism splits them: a unit of their own.
    tied: the head is the embedding. in_root: the embedding is gathered with the last norm for the
    whole step, as it is no unit of its own. widest: the parameters of the largest matrix in 4 or 8
    bits.
    """

    root: Unit
    embedding: Unit
    head: Unit
    blocks: tuple[Unit, ...]
    experts: dict[str, Unit]
    tied: bool
    in_root: bool
    head_parameters: int
    widest: int

    @property
    def all(self) -> tuple[Unit, ...]:
        return (self.embedding, *self.blocks, *self.experts.values(), self.head, self.root)

    def with_experts(self, block: Unit) -> list[Unit]:
        if block.name not in self.experts:
            return [block]
        return [block, self.experts[block.name]]


def rank_units(step_config: StepConfig, stage: Stage, layers: Sequence[Block]) -> Units:
    """The units of a rank with this stage, whose layers are these."""
    shards = step_config.shards
    group = make_group(step_config.shards, step_config.tensor, step_config.gpus_per_host)
    # FSDP1 puts the tensors of a unit into a flat one, which needs no padding.
    multiple = 1 if step_config.options.engine == "fsdp1" else shards

    def unit(name: str, trained: Shapes, frozen: Shapes = (), quantized: Shapes = ()) -> Unit:
        count, padded = _counts(trained, multiple)
        others, padded_others = _counts(frozen, multiple)
        stored = _counts(quantized, multiple)[1]
        return Unit(name, count + others, padded + padded_others, count, padded, group, stored)

    def outer(name: str, shapes: Shapes) -> Unit:
        """A unit outside of the blocks, which is frozen beside adapters."""
        return unit(name, shapes) if step_config.trains_all else unit(name, (), shapes)

    of_blocks = {
        block: model_shapes(step_config.traced_model(block)) for block in dict.fromkeys(layers)
    }
    shapes = next(iter(of_blocks.values()))  # which differ in their blocks alone
    tied = step_config.model.tie_word_embeddings and stage.has_embedding and stage.has_head
    in_root = tied or (stage.has_embedding and not step_config.options.wrap_embedding)
    own_head = shapes.head if stage.has_head and not tied else ()
    blocks = {
        block: unit("", each.trained, each.frozen, each.quantized)
        for block, each in of_blocks.items()
    }
    experts: dict[Block, Unit] = {}
    for block, shapes_of_block in of_blocks.items():
        if step_config.expert > 1 and block.mixture:
            others, experts[block] = _split_experts(step_config, shapes_of_block)
            blocks[block] = unit("", *others)
    names = [(f"block {number}", block) for number, block in enumerate(layers, start=1)]
    in_embedding: Shapes = ()
    rest = shapes.rest
    if in_root:
        rest = (*shapes.tables, *rest)
    elif stage.has_embedding:
        in_embedding = shapes.tables
    return Units(
        root=outer("root", rest),
        embedding=outer("embedding", in_embedding),
        head=unit("head", own_head) if step_config.trains_head else outer("head", own_head),
        blocks=tuple(replace(blocks[block], name=name) for name, block in names),
        experts={
            name: replace(experts[block], name=f"experts of {name}")
            for name, block in names
            if block in experts
        },
        tied=tied,
        in_root=in_root,
        head_parameters=_counts(shapes.head, 1)[0],
        widest=max(each.widest for each in of_blocks.values()),
    )


def _counts(shapes: Shapes, multiple: int) -> tuple[int, int]:
    """The numbers in tensors of these (rows, columns), as they are and with padded rows."""
    padded = sum(-(-rows // multiple) * multiple * columns for rows, columns in shapes)
    return sum(rows * columns for rows, columns in shapes), padded


def _split_experts(
    step_config: StepConfig, shapes: ModelShapes
) -> tuple[tuple[Shapes, Shapes], Unit]:
    """The trained and the frozen tensors of a sparse block without its experts, and their unit.

    FSDP shards each expert by rows, which rarely need padding.
    """
    ranks = step_config.expert

    def part(of_block: Shapes, experts: Shapes) -> tuple[Shapes, int]:
        others = [*of_block]
        for each in experts:
            others.remove(each)
        return tuple(others), sum(rows * columns for rows, columns in experts) // ranks

    others, trained = part(shapes.trained, shapes.experts)
    frozen, kept = part(shapes.frozen, shapes.frozen_experts)
    group = make_group(
        step_config.shards * step_config.tensor // ranks, ranks, step_config.gpus_per_host
    )
    return (others, frozen), Unit("", trained + kept, trained + kept, trained, trained, group)
