"""Complete runs of fine-tuning and alignment: the same on any ranks, stopped and resumed, with
adapters, from run to run.

All runs begin from one small model that was pretrained a little; cases of as many ranks share their
processes.
"""

import json
import random
import re
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from lmforge.core.data.tokenizer import Tokenizer
from lmforge.core.model.init_weights import LORA_SUFFIXES
from lmforge.core.model.quantization.blocks import dequantize, quantize
from lmforge.core.model.quantization.formats import BlockFormat
from lmforge.core.records.runs import Run
from lmforge.lab.bench.bounds import FP32
from lmforge.post.rl.scoring import RewardModelScorer
from lmforge.serve.decoding.model_loading import load_model
from lmforge.text.chat.examples import ExampleFolder, example_dataset
from lmforge.text.chat.preferences import encode_completions
from tests.conftest import Command, Refusal
from tests.distributed.conftest import Recipe, losses, newest_checkpoint, run_cases
from tests.support.grids import parametrize

THINGS = ("apple", "bread", "chair", "door", "engine", "flute", "garden")
STEPS = 4
REWARDS = """
def short(prompts, completions, **columns):
    return [len(set(text)) / 10 for text in completions]
"""


@dataclass(frozen=True)
class World:
    """Where everything is: the model that all begin from, files of examples, and runs by name."""

    folder: Path
    slow: dict[int, list[list[str]]] = field(default_factory=dict)

    def run(self, name: str) -> Run:
        """A finished run; those of slow tests are made when the first of them is used."""
        if not (self.folder / name).exists():
            for ranks, lines in self.slow.items():
                run_cases(ranks, lines, self.folder)
        return Run(self.folder / name)

    def words(
        self, verb: str, name: str, *more: object, source: str = "base", steps: int = STEPS
    ) -> list[str]:
        chosen = {
            "model.source": self.folder / source,
            "run.folder": self.folder,
            "run.name": name,
            "data.folder": self.folder / "examples",
            "data.sequence_length": 64,
            "train.steps": steps,
            "train.global_batch_size": 12,
            "train.dtype": "fp32",
            "train.compile": "off",
            "train.device": "cpu",
            "train.threads": 1,
            "train.seed": 5,
            "optimizer.lr": 2e-3,
            # A step that follows the size of the gradient: see the recipe fixture.
            "optimizer.eps": 1e-3,
            "schedule.name": "constant",
            "log.every_steps": 1,
            "checkpoint.every_steps": 3,
            "validation.sequences": 4,
        }
        files = {"sft": "chats.jsonl", "align": "pairs.jsonl"}
        if "--data.files" not in more:
            chosen["data.files"] = self.folder / files[verb]
        return [
            verb,
            *(str(word) for pair in chosen.items() for word in (f"--{pair[0]}", pair[1])),
            *map(str, more),
        ]

    def grpo(
        self, name: str, *more: object, steps: int = STEPS, reward: str = "rewards.py:short"
    ) -> list[str]:
        options = [
            "--method",
            "grpo",
            "--data.files",
            self.folder / "prompts.jsonl",
            "--rollout.max_completion_length",
            12,
        ]
        options += [
            "--rollout.reward_functions",
            self.folder / reward,
            "--rollout.num_generations",
            4,
            "--rollout.num_iterations",
            2,
        ]
        options += [
            "--data.validation_files",
            self.folder / "prompts-val.jsonl",
            "--validation.at_start",
            "--validation.every_steps",
            3,
        ]
        return self.words("align", name, *options, *more, steps=steps)


@pytest.fixture(scope="module")
def world(recipe: Recipe, tmp_path_factory: pytest.TempPathFactory) -> World:
    folder = tmp_path_factory.mktemp("tuning")
    chance = random.Random(1)

    def asked() -> tuple[str, str, str]:
        one, other = chance.sample(THINGS, 2)
        return f"Which is first, {one} or {other}?", min(one, other), max(one, other)

    def write(name: str, records: list[dict[str, object]]) -> None:
        (folder / name).write_text("".join(json.dumps(record) + "\n" for record in records))

    def turn(role: str, content: str) -> dict[str, str]:
        return {"role": role, "content": content}

    triples = [asked() for _ in range(160)]
    write(
        "chats.jsonl",
        [{"messages": [turn("user", q), turn("assistant", good)]} for q, good, _ in triples],
    )
    pairs = [
        {
            "prompt": [turn("user", q)],
            "chosen": [turn("assistant", g)],
            "rejected": [turn("assistant", b)],
        }
        for q, g, b in triples
    ]
    write("pairs.jsonl", pairs)
    judged = [
        {"prompt": [turn("user", q)], "completion": [turn("assistant", a)], "label": a == g}
        for q, g, b in triples
        for a in (g, b)
    ]
    write("judged.jsonl", judged)
    write(
        "prompts.jsonl",
        [{"prompt": [turn("user", q)], "answer": good} for q, good, _ in triples[8:]],
    )
    write(
        "prompts-val.jsonl",
        [{"prompt": [turn("user", q)], "answer": good} for q, good, _ in triples[:8]],
    )
    (folder / "rewards.py").write_text(REWARDS)
    world = World(folder)
    chosen = ["--schedule.name", "constant"]
    # Long enough for several answers in a row, each with another one to the same prompt.
    judging = [
        "--method",
        "kto",
        "--data.files",
        folder / "judged.jsonl",
        "--data.sequence_length",
        192,
    ]
    whole = {
        "sft": world.words("sft", "sft"),
        "dpo": world.words("align", "dpo"),
        "grpo": world.grpo("grpo"),
    }
    stages = ["--parallel.pipeline_parallel_degree", 2, "--train.micro_batch_size", 3]
    four_bits = ["--lora.rank", 4, "--lora.base_dtype", "nf4", "--lora.double_quant"]
    whole["sft qlora"] = world.words("sft", "sft qlora", *four_bits)
    whole["reward"] = world.words("align", "reward", "--method", "reward", "--validation.at_start")
    alone = [
        recipe(folder, "base", *chosen),
        *whole.values(),
        # Noise hides what the first few steps gain.
        world.words(
            "sft",
            "sft lora",
            "--lora.rank",
            4,
            "--lora.dropout",
            0.1,
            "--model.neftune_noise_alpha",
            5,
            steps=6,
        ),
        world.words("align", "dpo computed", "--align.reference", "precomputed"),
        *(world.words("align", method, "--method", method) for method in ("orpo", "simpo")),
        world.words("align", "kto", *judging),
        world.grpo("rloo", "--rollout.loss_type", "rloo", steps=2),
    ]
    # Stopped after three steps, which for rollouts is amid a set of answers, and continued.
    resumed = {}
    for name, words in whole.items():
        place = words.index("--run.name") + 1
        begun = [*words[:place], f"{name} resumed", *words[place + 1 :]]
        resumed[name] = [[*begun, "--train.steps", "3"], begun]
    run_cases(1, [*alone, *resumed.pop("sft"), *resumed.pop("grpo")], folder)
    two = [
        world.words("sft", "sft fsdp2"),
        world.words("sft", "sft qlora fsdp2", *four_bits),
        world.words("align", "dpo ddp", "--parallel.engine", "ddp"),
        world.words("align", "kto context", *judging, "--parallel.context_parallel_degree", 2),
        world.words("align", "dpo tensor", "--parallel.tensor_parallel_degree", 2),
        world.words("align", "reward fsdp2", "--method", "reward"),
        # Three groups of completions: two on the first rank, one on the second.
        world.grpo("grpo on 2", steps=2),
    ]
    run_cases(2, two, folder)
    eight_bits = ["--lora.rank", 4, "--lora.base_dtype", "int8"]
    world.slow[1] = [
        *(words for both in resumed.values() for words in both),
        world.words("align", "dpo from lora", source="sft lora"),
        world.words("align", "dpo qlora", *eight_bits, source="sft qlora"),
        world.words("align", "dpo lora", "--lora.rank", 4),
        world.words("align", "dpo lora copy", "--lora.rank", 4, "--align.reference", "copy"),
        world.words("align", "ipo", "--align.loss_type", "ipo"),
        world.words("align", "reward lora", "--method", "reward", "--lora.rank", 4),
        world.words("align", "reward again", "--method", "reward", source="reward", steps=1),
        world.grpo("grpo qlora", *four_bits, steps=2),
        world.grpo("grpo lora", "--lora.rank", 4, steps=2),
        world.grpo("grpo judged", reward="reward", steps=2),
        world.grpo("grpo few at once", "--rollout.decode_batch_size", 5, steps=2),
        world.grpo("grpo begun without kl", "--rollout.kl_estimator", "none", "--train.steps", 1),
        world.grpo("grpo begun without kl", "--rollout.kl_estimator", "k3", steps=3),
        *(
            world.grpo(preset, "--rollout.loss_type", preset, steps=2)
            for preset in ("dr_grpo", "gspo")
        ),
        # Hardly any answer of so small a model ends, and dapo learns nothing from those that do
        # not.
        world.grpo(
            "dapo",
            "--rollout.loss_type",
            "dapo",
            "--rollout.mask_truncated_completions",
            "false",
            steps=2,
        ),
    ]
    computed = ["--align.reference", "precomputed"]
    context, tensor = ([f"--parallel.{kind}_parallel_degree", 2] for kind in ("context", "tensor"))
    world.slow[2] = [
        world.words("sft", "sft ddp", "--parallel.engine", "ddp"),
        world.words(
            "align", "dpo qlora ddp", *eight_bits, "--parallel.engine", "ddp", source="sft qlora"
        ),
        world.words("align", "dpo fsdp2"),
        world.words("align", "dpo lora fsdp2", "--lora.rank", 4),
        world.words("align", "kto fsdp2", *judging),
        world.words("align", "dpo computed fsdp2", *computed),
        world.words("align", "dpo computed context", *computed, *context),
        world.words("align", "reward ddp", "--method", "reward", "--parallel.engine", "ddp"),
        world.words("align", "kto tensor", *judging, *tensor),
        world.words("align", "dpo context", *context),
        world.words("align", "dpo pipeline", *stages),
        world.words("align", "dpo computed pipeline", *computed, *stages),
        world.words("align", "dpo lora pipeline", "--lora.rank", 4, *stages),
        world.words("align", "kto pipeline", *judging, *stages),
    ]
    world.slow[3] = [
        world.grpo("grpo on 3"),
        world.grpo("grpo ddp on 3", "--parallel.engine", "ddp", steps=2),
    ]
    # On four ranks context × tensor, and one of them × two that shard.
    world.slow[4] = [
        world.words("align", "dpo both", *context, *tensor),
        world.words("align", "dpo context pipeline", *stages, *context),
        world.words("align", "dpo computed tensor", *computed, *tensor),
        *(
            world.words("align", f"{method} context", "--method", method, *context)
            for method in ("orpo", "simpo")
        ),
    ]
    return world


def weights_of(run: Run) -> dict[str, torch.Tensor]:
    opened = load_model(
        run.path,
        torch.device("cpu"),
        torch.float32,
        reward_model=run.path.name.startswith("reward"),
    )
    return {name: parameter.detach() for name, parameter in opened.model.named_parameters()}


def test_a_damaged_file_of_a_precomputed_reference_is_named(world: World, refused: Refusal) -> None:
    path, *_ = sorted((world.folder / "examples").glob("**/reference-*/*.npy"))
    content = path.read_bytes()
    path.write_bytes(content[:1000] + bytes([content[1000] ^ 1]) + content[1001:])
    try:
        said = refused(*world.words("align", "damaged", "--align.reference", "precomputed"))
    finally:
        path.write_bytes(content)
    assert (
        said
        == f"{path}: does not hold what was written (its checksum differs); delete it, and it is"
        " computed again"
    )


@parametrize("name", ["sft", "grpo", "sft qlora", "dpo", "reward"], fast=(0, 1))
def test_stopped_and_continued_a_run_ends_in_the_same_bits(world: World, name: str) -> None:
    assert losses(world.run(f"{name} resumed")) == losses(world.run(name))
    theirs = weights_of(world.run(name))
    for tensor, value in weights_of(world.run(f"{name} resumed")).items():
        assert torch.equal(value, theirs[tensor]), tensor


@parametrize(
    ("name", "elsewhere"),
    [
        ("sft", "sft fsdp2"),
        ("sft qlora", "sft qlora fsdp2"),
        ("dpo", "dpo ddp"),
        ("dpo", "dpo computed"),
        ("dpo", "dpo tensor"),
        ("kto", "kto context"),
        ("reward", "reward fsdp2"),
        ("sft", "sft ddp"),
        ("dpo qlora", "dpo qlora ddp"),
        ("dpo", "dpo fsdp2"),
        ("dpo", "dpo computed fsdp2"),
        ("dpo lora", "dpo lora fsdp2"),
        ("dpo lora", "dpo lora copy"),
        ("kto", "kto fsdp2"),
        ("dpo", "dpo computed context"),
        ("kto", "kto tensor"),
        ("dpo", "dpo context"),
        ("dpo", "dpo both"),
        ("dpo", "dpo pipeline"),
        ("dpo", "dpo computed pipeline"),
        ("dpo", "dpo context pipeline"),
        ("dpo lora", "dpo lora pipeline"),
        ("kto", "kto pipeline"),
        ("dpo", "dpo computed tensor"),
        ("orpo", "orpo context"),
        ("simpo", "simpo context"),
        ("reward", "reward ddp"),
    ],
    fast=range(7),
)
def test_ranks_strategies_and_where_the_reference_comes_from_do_not_show_in_the_losses(
    world: World, name: str, elsewhere: str
) -> None:
    ours, theirs = losses(world.run(name)), losses(world.run(elsewhere))
    assert ours.keys() == theirs.keys() == set(range(1, STEPS + 1))
    for step, loss in ours.items():
        assert theirs[step] == pytest.approx(loss, rel=FP32.loss), step


@parametrize(
    "name",
    ["dpo", "dpo computed", "dpo lora", "dpo qlora", "dpo fsdp2", "dpo from lora"],
    fast=(0, 1),
)
def test_the_loss_of_dpo_begins_at_ln_2(world: World, name: str) -> None:
    run = world.run(name)
    said = (run.path / "logs" / "attempt-1" / "rank-0.log").read_text()
    assert "agrees with the policy before the first update (loss 0.6931)" in said
    assert losses(run)[1] == pytest.approx(0.693147, abs=1e-5)


def test_what_a_greedy_answer_to_held_out_prompts_earns_is_measured(world: World) -> None:
    run = world.run("grpo")
    assert set(losses(run, "val/reward")) == set(losses(run, "val/pass@1")) == {0, 3, STEPS}
    assert losses(run, "no_reward")[1] == 0
    assert sorted((run.path / "completions").glob("step-*-validation-rank-0.jsonl"))


@parametrize(
    ("name", "has_margins"),
    [
        ("sft", False),
        ("sft lora", False),
        ("sft qlora", False),
        ("dpo", True),
        ("orpo", True),
        ("simpo", True),
        ("reward", True),
        ("dpo lora", True),
        ("dpo qlora", False),
        ("ipo", True),
        ("reward lora", True),
    ],
    fast=range(7),
)
def test_what_is_taught_is_learnt(world: World, name: str, has_margins: bool) -> None:
    run = losses(world.run(name))
    assert run[max(run)] < run[1]
    if has_margins:
        margins = losses(world.run(name), "rewards/margin")
        assert margins[STEPS] > margins[1]


def test_held_out_data_is_measured_at_the_end(world: World) -> None:
    assert set(losses(world.run("sft"), "val/loss")) == {STEPS}
    assert set(losses(world.run("dpo"), "val/rewards/accuracy")) == {STEPS}


def test_evaluation_finds_what_a_tuned_run_itself_measured(world: World, lmforge: Command) -> None:
    measured = {}
    for data in ([], ["--data", world.folder / "chats.jsonl"]):
        done = lmforge("evaluate", world.folder / "sft", *data, "--output", "json")
        assert done.returncode == 0, done.stderr
        measured[bool(data)] = json.loads(done.stdout)
    assert measured[False]["loss"] == pytest.approx(
        losses(world.run("sft"), "val/loss")[STEPS], rel=1e-5
    )
    assert (measured[False]["split"], measured[True]["split"]) == ("validation", "all")
    assert measured[True]["tokens"] > 10 * measured[False]["tokens"]


@pytest.mark.parametrize("name", ["dpo", "grpo"])
def test_what_a_run_of_pairs_or_prompts_has_is_no_text_to_be_measured(
    world: World, refused: Refusal, name: str
) -> None:
    assert "--data" in refused("evaluate", world.folder / name)


def test_adapters_leave_the_base_as_it_was_and_open_merged(world: World) -> None:
    from lmforge.hf.stored_model import StoredModel

    folder, manifest = newest_checkpoint(world.run("sft lora").path)
    stored, base = StoredModel(folder, manifest), weights_of(world.run("base"))
    assert stored.lora
    merged = weights_of(world.run("sft lora"))
    changed = set()
    for name, before in base.items():
        down, up = (stored.adapters.get(name.replace(".weight", each)) for each in LORA_SUFFIXES)
        if down is None:
            assert torch.equal(merged[name], before), name
        else:
            changed.add(name.split(".")[-2])
            assert torch.equal(merged[name], before + stored.lora.scaling * (up @ down)), name
            assert not torch.equal(merged[name], before), name
    assert changed == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}


def test_adapters_beside_four_bits_are_merged_into_what_they_were_trained_with(
    world: World, lmforge: Command, tmp_path: Path
) -> None:
    from lmforge.hf.stored_model import StoredModel

    folder, manifest = newest_checkpoint(world.run("sft qlora").path)
    stored, base = StoredModel(folder, manifest), weights_of(world.run("base"))
    merged, four_bits = weights_of(world.run("sft qlora")), BlockFormat("nf4", double_quant=True)
    for name, before in base.items():
        if name in stored.quantized:
            down, up = (stored.adapters[name.replace(".weight", each)] for each in LORA_SUFFIXES)
            before = dequantize(quantize(before, four_bits), four_bits, before.shape, torch.float32)
            before = before + stored.lora.scaling * (up @ down)
        assert torch.equal(merged[name], before), name
    assert len(stored.quantized) == len(stored.adapters) // 2 > 0
    done = lmforge("export", world.folder / "sft qlora", tmp_path / "out", "--dtype", "bf16")
    assert "dequantized from nf4 with scales in 8 bits; the sums are rounded to bf16" in done.stdout
    for name, value in load_file(tmp_path / "out" / "model.safetensors").items():
        assert torch.equal(value, merged[name].bfloat16()), name
    said = (world.run("sft qlora").path / "logs" / "attempt-1" / "rank-0.log").read_text()
    assert re.search(
        r"base +[\d,]+ frozen weights in nf4 with scales in 8 bits: .* more than in fp32", said
    )


def test_an_export_of_adapters_merges_them_and_names_how_it_chats(
    world: World, lmforge: Command, tmp_path: Path
) -> None:
    done = lmforge("export", world.folder / "sft lora", tmp_path / "out")
    assert done.returncode == 0, done.stderr
    stored, ours = (
        load_file(tmp_path / "out" / "model.safetensors"),
        weights_of(world.run("sft lora")),
    )
    assert stored.keys() == ours.keys()
    for name, value in ours.items():
        assert torch.equal(stored[name], value), name
    described = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    assert len(described["eos_token_id"]) == 2
    assert "<|assistant|>" in (tmp_path / "out" / "chat_template.jinja").read_text()


@parametrize("name", ["grpo", "grpo on 2", "grpo on 3", "grpo lora", "grpo qlora"], fast=(0, 1))
def test_at_the_first_update_on_a_set_of_answers_the_ratio_is_one(world: World, name: str) -> None:
    """What was recorded while sampling is what the policy's own forward pass gives."""
    run = world.run(name)
    assert losses(run, "ratio")[1] == pytest.approx(1, abs=2e-5)
    assert losses(run, "clip/low")[1] == losses(run, "clip/high")[1] == 0
    assert losses(run, "kl")[1] == pytest.approx(0, abs=1e-6)


@parametrize("elsewhere", ["grpo on 2", "grpo on 3", "grpo ddp on 3"], fast=(0,))
def test_answers_are_the_same_on_any_ranks_while_weights_are(world: World, elsewhere: str) -> None:
    """Those of the first set: sums in another order change a weight's last bit, and may change a
    later answer.
    """

    def answers(name: str) -> list[str]:
        files = sorted((world.run(name).path / "completions").glob("set-000000-rank-*.jsonl"))
        return sorted(line for file in files for line in file.read_text().splitlines())

    assert answers("grpo") == answers(elsewhere)
    assert len(answers("grpo")) == 24
    record = json.loads(answers("grpo")[0])
    assert record.keys() == {"prompt", "completion", "reward", "parts", "tokens", "ended"}
    assert losses(world.run(elsewhere), "reward")[1] == pytest.approx(
        losses(world.run("grpo"), "reward")[1]
    )


def test_two_ranks_learn_from_three_groups_of_answers_as_one_rank_does(world: World) -> None:
    """In the two steps on the first set, whose answers are the same."""
    run, reference = world.run("grpo on 2"), world.run("grpo")
    for name in (
        "loss",
        "grad_norm",
        "reward",
        "completion_tokens",
        "truncated",
        "entropy",
        "ratio",
        "kl",
        "pass@2",
    ):
        expected = {step: value for step, value in losses(reference, name).items() if step <= 2}
        assert losses(run, name) == pytest.approx(expected, rel=1e-5, abs=1e-7), name
    counts = [len(read_records_of(run, rank)) for rank in range(2)]
    assert counts == [16, 8]


def read_records_of(run: Run, rank: int) -> list[str]:
    return (run.path / "completions" / f"set-000000-rank-{rank}.jsonl").read_text().splitlines()


@parametrize("name", ["rloo", "dr_grpo", "dapo", "gspo"], fast=(0,))
def test_every_preset_trains(world: World, name: str) -> None:
    run = world.run(name)
    assert set(losses(run, "reward")) == {1, 2}
    assert losses(run, "grad_norm")[1] > 0
    # A mean over completions, of advantages that add up to nothing in each group.
    if name in ("gspo", "rloo"):
        assert losses(run)[1] == pytest.approx(0, abs=1e-3)


@pytest.mark.slow
def test_the_decoding_batch_size_does_not_change_results(world: World) -> None:
    for name in ("loss", "reward", "completion_tokens"):
        assert losses(world.run("grpo few at once"), name) == pytest.approx(
            {step: value for step, value in losses(world.run("grpo"), name).items() if step <= 2},
            abs=1e-5,
        )


@pytest.mark.slow
def test_a_set_of_completions_saved_with_other_options_is_sampled_again(world: World) -> None:
    run = world.run("grpo begun without kl")
    assert set(losses(run)) == {1, 2, 3}
    assert set(losses(run, "kl")) == {2, 3}
    said = "".join(file.read_text() for file in (run.path / "logs" / "attempt-2").glob("*.log"))
    assert "the completions of this set are sampled again" in said


def test_a_divergence_that_lessens_rewards_is_a_metric_too(world: World) -> None:
    assert losses(world.run("rloo"), "kl")[1] == pytest.approx(0, abs=1e-5)
    assert losses(world.run("rloo"), "kl")[2] != losses(world.run("rloo"), "kl")[1]


def test_padding_is_no_token_of_the_tokens_a_second(world: World) -> None:
    for name in ("sft", "dpo", "dpo ddp", "grpo on 2"):
        run, places = world.run(name), 12 * 64
        for step, rate in losses(run, "tokens_per_second").items():
            tokens = rate * losses(run, "step_seconds")[step]
            assert tokens == pytest.approx(round(tokens), abs=1e-3)
            assert places / 4 < tokens < places, name
    base = [losses(world.run("base"), name)[1] for name in ("tokens_per_second", "step_seconds")]
    assert base[0] * base[1] == pytest.approx(12 * 48)  # there is no padding


def test_held_out_examples_are_not_trained_on_and_rows_hold_whole_examples(world: World) -> None:
    for folder in (world.folder / "examples").iterdir():
        opened = ExampleFolder.open(folder)
        train, held_out = opened.split("train"), opened.split("validation")

        def contents(examples: object) -> set[bytes]:
            return {
                b"".join(part.tokens.tobytes() for part in examples.sequences(n))
                for n in range(len(examples))
            }  # type: ignore[attr-defined]

        assert len(held_out) >= 1
        rows = example_dataset(opened, "train", sequence_length=192, pack=True, shuffle=False)
        placed = [
            int(n)
            for index in range(rows.sequences_per_epoch)
            for n in rows.packing.example_indices(index)
        ]  # type: ignore[attr-defined]
        assert sorted(placed) == list(range(len(train)))
        assert not contents(train) & contents(held_out)


@pytest.mark.slow
def test_a_reward_model_learns_to_tell_the_better_answer_and_continues_from_its_own_head(
    world: World,
) -> None:
    accuracy = losses(world.run("reward"), "val/rewards/accuracy")
    assert set(accuracy) == {0, STEPS}
    # Its new head gives small rewards at first: neither side is preferred by much.
    assert losses(world.run("reward"))[1] == pytest.approx(0.693, abs=0.05)
    assert losses(world.run("reward again"))[1] < losses(world.run("reward"))[STEPS - 1]
    before, after = weights_of(world.run("base")), weights_of(world.run("reward"))
    assert after["lm_head.weight"].shape == (1, before["lm_head.weight"].shape[1])
    adapted = weights_of(world.run("reward lora"))
    assert not torch.equal(
        adapted["lm_head.weight"], weights_of(world.run("reward again"))["lm_head.weight"]
    )
    assert torch.equal(adapted["model.embed_tokens.weight"], before["model.embed_tokens.weight"])


def test_an_exported_reward_model_gives_in_transformers_what_it_gives_here(
    world: World, lmforge: Command, tmp_path: Path
) -> None:
    from transformers import AutoModelForSequenceClassification

    done = lmforge("export", world.folder / "reward", tmp_path / "out")
    assert done.returncode == 0, done.stderr
    prompts = [
        [{"role": "user", "content": f"Which is first, apple or {each}?"}] for each in THINGS
    ]
    job = {"prompts": prompts, "completions": list(THINGS), "columns": {}}
    both = [
        RewardModelScorer(str(spec), torch.device("cpu"), torch.float32)
        for spec in (world.folder / "reward", tmp_path / "out")
    ]
    ours, opened = (
        judge.score(job, 60.0)[name].rewards for judge in both for name in judge.required_columns
    )
    theirs = AutoModelForSequenceClassification.from_pretrained(
        tmp_path / "out", dtype=torch.float32
    )
    assert theirs.num_labels == 1
    tokenizer = Tokenizer.open(tmp_path / "out")
    with torch.no_grad():
        rows = [torch.tensor([ids]) for ids in encode_completions(tokenizer, prompts, THINGS)]
        expected = [theirs(row).logits.item() for row in rows]
    assert ours == opened
    assert ours == pytest.approx(expected, abs=1e-5)
    assert len(set(ours)) == len(THINGS)


@pytest.mark.slow
def test_a_reward_model_judges_rollouts(world: World) -> None:
    [file] = (world.run("grpo judged").path / "completions").glob("set-000000-rank-0.jsonl")
    records = [json.loads(line) for line in file.read_text().splitlines()]
    [spec] = records[0]["parts"]
    assert Path(spec).is_relative_to(world.folder / "reward")
    job: dict[str, object] = {
        name: [record[name[:-1]] for record in records] for name in ("prompts", "completions")
    }
    job["columns"] = {}
    [given] = (
        scores.rewards
        for scores in (
            RewardModelScorer(spec, torch.device("cpu"), torch.float32).score(job, 60.0).values()
        )
    )
    assert [record["parts"][spec] for record in records] == pytest.approx(given, abs=1e-5)
    assert [record["reward"] for record in records] == pytest.approx(given, abs=1e-5)


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["generate", "{}/reward", "--prompts", "Hm"], "a reward model, which generates no text"),
        (["evaluate", "{}/reward"], "a reward model, which generates no text"),
        (
            ["sft", "--model.source", "{}/reward", "--data.files", "{}/chats.jsonl"],
            "only align.method = reward can start from",
        ),
    ],
)
def test_a_reward_model_is_not_taken_for_one_that_writes(
    world: World, refused: Refusal, words: list[str], line: str
) -> None:
    assert line in refused(*(word.format(world.folder) for word in words))


@pytest.mark.slow
def test_the_adapters_of_a_reward_model_are_not_exported_without_its_head(
    world: World, refused: Refusal, tmp_path: Path
) -> None:
    line = refused("export", world.run("reward lora").path, tmp_path / "out", "--adapters")
    assert "a reward model: its head is new and is not part of the" in line


def test_a_model_that_writes_is_not_taken_for_a_judge(world: World, refused: Refusal) -> None:
    line = refused(*world.grpo("mistaken", reward="dpo"))
    assert "not a reward model" in line
