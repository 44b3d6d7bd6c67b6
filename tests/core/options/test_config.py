"""The options of the stages: batch arithmetic, and combinations that are refused."""

import pkgutil
import re
import tomllib
from importlib import import_module
from pathlib import Path
from typing import Any, get_origin

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from lmforge.core.errors import UserError
from lmforge.core.options.batch_plan import batch_plan, divisors
from lmforge.core.options.load import STAGES, config_class, parse_config
from lmforge.core.options.options import (
    Options,
    _is_list,
    _value_types,
    iter_options,
    read_recipe,
    to_toml,
    validate_options,
)
from lmforge.core.options.ranges import MODEL_RANGES, ROPE_SCALING_RANGES, Range
from lmforge.core.options.sections import COMFORTABLE_MICRO_BATCH_TOKENS, TrainOptions
from lmforge.core.options.stage import PretrainConfig
from lmforge.ops.options.running import PipelineOptions
from lmforge.post.options.align import AlignConfig
from lmforge.post.options.tuning import TunedConfig, TunedTrainOptions

RECIPES = sorted((Path(__file__).parents[3] / "recipes").glob("*.toml"))
PACKAGES = [
    import_module(f"lmforge.{wing}.options")
    for wing in ("core", "text", "serve", "post", "ops", "lab")
]
MODULES = [
    import_module(found.name)
    for package in PACKAGES
    for found in pkgutil.walk_packages(package.__path__, f"{package.__name__}.")
]
OPTION_CLASSES = [
    value
    for module in MODULES
    for value in vars(module).values()
    if isinstance(value, type)
    and issubclass(value, Options)
    and value.__module__ == module.__name__
    and value is not Options
]

counts = st.integers(1, 400)


def config(**sections: dict[str, Any]) -> PretrainConfig:
    return validate_options(PretrainConfig, sections, "a.toml")


@given(
    rows=counts,
    length=st.sampled_from([16, 100, 1024, 8192, 40_000]),
    ranks=st.integers(1, 16),
    data=st.data(),
)
def test_a_batch_plan_cuts_a_batch_that_ranks_divide_without_remainder(
    rows: int, length: int, ranks: int, data: st.DataObject
) -> None:
    assume(rows % ranks == 0)
    divisors = [size for size in range(1, rows // ranks + 1) if rows // ranks % size == 0]
    micro = data.draw(st.none() | st.sampled_from(divisors))
    plan = batch_plan(TrainOptions(global_batch_size=rows, micro_batch_size=micro), length, ranks)
    assert (
        plan.global_batch_size
        == rows
        == plan.data_parallel_size * plan.accumulation * plan.micro_batch_size
    )
    assert plan.data_parallel_size == ranks
    assert plan.tokens == rows * length
    if micro is not None:
        assert plan.micro_batch_size == micro
    else:
        comfortable = [size for size in divisors if size * length <= COMFORTABLE_MICRO_BATCH_TOKENS]
        assert plan.micro_batch_size == max(comfortable, default=1)


@given(rows=counts, ranks=st.integers(1, 16), data=st.data())
def test_every_rank_has_places_for_its_share_of_a_batch_and_no_micro_batch_is_larger(
    rows: int, ranks: int, data: st.DataObject
) -> None:
    assume(rows >= ranks)
    micro = data.draw(st.none() | st.sampled_from(divisors(rows)))
    plan = batch_plan(TrainOptions(global_batch_size=rows, micro_batch_size=micro), 64, ranks)
    largest_share = -(-rows // ranks)
    assert largest_share <= plan.local_batch_size < largest_share + plan.micro_batch_size
    assert plan.micro_batch_size <= min(micro or largest_share, largest_share)
    padding = ranks * plan.local_batch_size - rows
    assert str(plan).endswith(f", of which {padding} are padding") == (padding > 1)


@given(rows=counts, ranks=st.integers(1, 16), micro=st.integers(1, 20))
def test_micro_batches_that_do_not_divide_the_batch_are_refused_with_the_nearest_sizes_that_they_do(
    rows: int, ranks: int, micro: int
) -> None:
    train = TrainOptions(global_batch_size=rows, micro_batch_size=micro)
    assume(rows >= ranks and rows % micro)
    with pytest.raises(UserError, match=f"does not divide by micro-batches of {micro};") as caught:
        batch_plan(train, 64, ranks)
    named = [int(word) for word in str(caught.value).rpartition(": ")[2].split(" or ")]
    assert named == [
        size for size in (rows // micro * micro, rows // micro * micro + micro) if size
    ]
    for size in named:
        assert (
            batch_plan(
                train.model_copy(update={"global_batch_size": size}), 64, 1
            ).global_batch_size
            == size
        )


@given(rows=st.integers(1, 15), more=st.integers(1, 15))
def test_more_ranks_than_sequences_are_refused(rows: int, more: int) -> None:
    with pytest.raises(
        UserError,
        match=(
            rf"^{rows + more} ranks for a global batch of {rows} sequences: .*use at most {rows}"
            r" ranks$"
        ),
    ):
        batch_plan(TrainOptions(global_batch_size=rows), 64, rows + more)


@given(rows=counts, length=st.integers(1, 5000))
def test_a_batch_size_in_tokens_is_the_same_as_in_sequences(rows: int, length: int) -> None:
    in_tokens = config(
        train={"global_batch_tokens": rows * length}, data={"sequence_length": length}
    )
    assert batch_plan(in_tokens.train, length, 1) == batch_plan(
        TrainOptions(global_batch_size=rows), length, 1
    )


@pytest.mark.parametrize(
    ("tokens", "nearest"), [(1000, "768 or 1024"), (100, "256"), (257, "256 or 512")]
)
def test_a_batch_size_in_tokens_that_cuts_a_sequence_is_refused_with_the_nearest_that_do_not(
    tokens: int, nearest: str
) -> None:
    message = (
        f"a.toml: train.global_batch_tokens = {tokens} is not a multiple of data.sequence_length ="
        f" 256; nearest: {nearest}"
    )
    with pytest.raises(UserError, match=f"^{message}$"):
        config(train={"global_batch_tokens": tokens}, data={"sequence_length": 256})


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        (
            {"model": {"preset": "nano", "source": "x"}},
            "model.preset and model.source: give one of them, not both",
        ),
        (
            {"train": {"global_batch_size": 8, "global_batch_tokens": 8192}},
            "train.global_batch_size and train.global_batch_tokens: give one of them, not both",
        ),
        (
            {"train": {"steps": 99}},
            "schedule.warmup_steps = 100: more than train.steps = 99; lower them or train longer",
        ),
        (
            {
                "train": {"steps": 99},
                "schedule": {"name": "warmup-stable-decay", "warmup_steps": 50, "decay_steps": 50},
            },
            (
                "schedule.warmup_steps = 50 and schedule.decay_steps = 50: more than train.steps ="
                " 99; lower them or train longer"
            ),
        ),
    ],
)
def test_options_that_exclude_each_other_are_refused_with_the_way_out(
    sections: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError) as caught:
        config(**sections)
    assert str(caught.value) == f"a.toml: {message}"


def test_a_schedule_may_fill_the_whole_run() -> None:
    config(train={"steps": 100})
    config(
        train={"steps": 99},
        schedule={"name": "warmup-stable-decay", "warmup_steps": 49, "decay_steps": 50},
    )
    # A cosine has no decay of its own.
    config(train={"steps": 99}, schedule={"warmup_steps": 99, "decay_steps": 50})


@pytest.mark.parametrize(
    "options_class", OPTION_CLASSES, ids=lambda options_class: options_class.__name__
)
def test_every_option_has_a_meaning_in_one_line_and_a_default_that_its_own_rules_accept(
    options_class: type[Options],
) -> None:
    for path, field in iter_options(options_class):
        assert field.description, path
        assert "\n" not in field.description, path
    required = [
        (path[0], field.annotation)
        for path, field in iter_options(options_class)
        if field.is_required()
    ]
    given: dict[str, Any] = {
        name: ["x", "y"] if get_origin(kind) is tuple else "x" for name, kind in required
    }
    if options_class is PipelineOptions:
        given["stages"] = [{"verb": "x"}]
    # Epochs, by default, become steps before a recipe is recorded.
    if issubclass(options_class, TunedTrainOptions):
        given["steps"] = 5
    elif issubclass(options_class, TunedConfig):
        given["train"] = {"steps": 5}
    assert validate_options(options_class, given) == validate_options(
        options_class, validate_options(options_class, given).model_dump(mode="json")
    )


def is_numeric(field: FieldInfo) -> bool:
    return bool({int, float} & set(_value_types(field)))


@pytest.mark.parametrize(
    "options_class", OPTION_CLASSES, ids=lambda options_class: options_class.__name__
)
def test_every_number_has_an_upper_and_a_lower_bound(options_class: type[Options]) -> None:
    for path, field in iter_options(options_class):
        for extreme, words in ((10**40, "of at most|below"), (-(10**40), "of at least|above")):
            if not is_numeric(field):
                continue
            name = re.escape(".".join(path))
            table: dict[str, Any] = {path[-1]: [extreme] if _is_list(field) else extreme}
            for part in reversed(path[:-1]):
                table = {part: table}
            with pytest.raises(UserError, match=rf"^--{name}: expected a number ({words}) "):
                validate_options(options_class, table, "")


@pytest.mark.parametrize("bounds", [*MODEL_RANGES.values(), *ROPE_SCALING_RANGES.values()])
def test_every_number_of_a_model_config_has_an_upper_and_a_lower_bound(bounds: Range) -> None:
    assert bounds.keys() == {"gt", "le"}


def test_every_option_of_a_run_stands_in_a_section_with_a_meaning() -> None:
    for name, field in PretrainConfig.model_fields.items():
        assert field.description, name
        if name == "plugins":  # at the top of a recipe: what it names adds sections
            continue
        assert isinstance(field.annotation, type), name
        assert issubclass(field.annotation, BaseModel), name


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_every_recipe_of_the_repository_is_valid_and_reads_back_equal(recipe: Path) -> None:
    table = read_recipe(recipe)
    kind = config_class(table, str(recipe))
    read = validate_options(kind, table, str(recipe))
    batch_plan(read.train, read.data.sequence_length, read.launch.processes)
    assert read != kind()
    assert validate_options(kind, tomllib.loads(to_toml(read))) == read


@pytest.mark.parametrize(
    ("verb", "recorded", "typed", "expected"),
    [
        (
            "sft",
            {"train": {"steps": 9}},
            ["--schedule.warmup_steps", "5"],
            {"schedule.warmup_steps": 5, "schedule.warmup_ratio": None},
        ),
        (
            "sft",
            {"train": {"steps": 9}, "schedule": {"warmup_ratio": 0.3}},
            ["--schedule.warmup_steps", "5"],
            {"schedule.warmup_ratio": None},
        ),
        ("pretrain", {}, ["--schedule.warmup_ratio", "0.2"], {"schedule.warmup_ratio": 0.2}),
        ("sft", {"train": {"steps": 9}}, ["--train.epochs", "2"], {"train.epochs": 2.0}),
        ("sft", {}, ["--train.steps", "7"], {"train.epochs": None, "train.steps": 7}),
        (
            "pretrain",
            {"train": {"global_batch_size": 6}},
            ["--train.global_batch_tokens", "2048"],
            {"train.global_batch_size": None},
        ),
        (
            "pretrain",
            {"model": {"preset": "nano"}},
            ["--model.source", "x"],
            {"model.preset": None, "model.source": Path("x")},
        ),
    ],
)
def test_a_typed_option_replaces_its_alternative_in_the_recipe(
    verb: str, recorded: dict[str, Any], typed: list[str], expected: dict[str, Any], tmp_path: Path
) -> None:
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(
        to_toml(validate_options(config_class({"run": {"stage": verb}}, ""), recorded))
    )
    found = parse_config(STAGES[verb], [str(recipe), *typed])
    for name, value in expected.items():
        section, option = name.split(".")
        assert getattr(getattr(found, section), option) == value, name


def test_an_option_set_to_none_reads_back_as_none_where_its_default_is_a_value() -> None:
    read = validate_options(PretrainConfig, {"watch": {"timeout_seconds": "none"}})
    assert read.watch.timeout_seconds is None
    assert validate_options(PretrainConfig, tomllib.loads(to_toml(read))) == read


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [("SHARD_GRAD_OP", "grad-shard"), ("_HYBRID_SHARD_ZERO2", "hybrid-grad-shard")],
)
def test_sharding_takes_torchs_names(theirs: str, ours: str) -> None:
    assert config(parallel={"sharding": theirs}) == config(parallel={"sharding": ours})
    assert config(parallel={"sharding": theirs}).parallel.sharding == ours


@pytest.mark.parametrize(
    ("align", "message"),
    [
        (
            {"loss_type": "exo"},
            "align.loss_type = exo: needs align.label_smoothing above 0, such as 0.1",
        ),
        (
            {"loss_type": "ipo", "label_smoothing": 0.1},
            (
                "align.label_smoothing: not with align.loss_type = ipo; it is for sigmoid, robust"
                " and exo"
            ),
        ),
        (
            {"loss_type": "robust", "label_smoothing": 0.5},
            "align.label_smoothing: expected a number below 0.5, got 0.5",
        ),
        (
            {"method": "kto", "loss_type": "hinge"},
            "align.loss_type: kto does not read it; it is for dpo: leave it out",
        ),
    ],
)
def test_a_preference_loss_is_refused_options_that_it_cannot_use(
    align: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError) as caught:
        validate_options(AlignConfig, {"align": align}, "a.toml")
    assert str(caught.value) == f"a.toml: {message}"


def test_the_z_loss_is_refused_where_nothing_reads_it() -> None:
    with pytest.raises(
        UserError, match=r"train\.z_loss: alignment does not read it; it is for pretrain and sft"
    ):
        validate_options(AlignConfig, {"train": {"z_loss": 1e-4}}, "a.toml")


def test_a_run_takes_its_name_from_its_options_else_from_its_recipe() -> None:
    assert PretrainConfig().with_name("recipe").run.name == "recipe"
    assert config(run={"name": "mine"}).with_name("recipe").run.name == "mine"
    assert PretrainConfig().with_name("recipe").train == PretrainConfig().train


@pytest.mark.parametrize(
    ("steps", "asked", "every"), [(1000, None, 100), (5, None, 1), (1000, 7, 7)]
)
def test_a_checkpoint_is_saved_every_tenth_of_a_run_unless_asked_otherwise(
    steps: int, asked: int | None, every: int
) -> None:
    chosen = config(
        train={"steps": steps}, schedule={"warmup_steps": 0}, checkpoint={"every_steps": asked}
    )
    assert chosen.checkpoint_every_steps == every


@pytest.mark.parametrize("stage", ["pretraining", 5, "x" * 5000])
def test_a_stage_that_there_is_not_is_refused_in_a_short_line(stage: object) -> None:
    with pytest.raises(
        UserError,
        match=r"^r\.toml: run\.stage: expected one of pretrain, sft, distill, align, got .{1,120}$",
    ):
        config_class({"run": {"stage": stage}}, "r.toml")


def test_only_given_model_options_override_the_model_config() -> None:
    assert PretrainConfig().model.overrides() == {}
    chosen = config(
        model={"preset": "nano", "load_weights": False, "hidden_size": 64, "attention_bias": False}
    )
    assert chosen.model.overrides() == {"hidden_size": 64, "attention_bias": False}


@pytest.mark.parametrize(
    ("where", "way"), [({"engine": "fsdp1"}, "fsdp2"), ({"tensor_parallel_degree": 2}, "bf16")]
)
def test_states_in_8_bits_where_rows_are_cut_are_refused_with_what_works_there(
    where: dict[str, Any], way: str
) -> None:
    with pytest.raises(
        UserError, match=rf"state_dtype = 8bit: not with parallel\..* cuts rows; use {way}$"
    ):
        config(parallel=where, optimizer={"state_dtype": "8bit"})
