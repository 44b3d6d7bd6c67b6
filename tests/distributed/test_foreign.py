"""Runs of wrapped models: parallelized, checkpointed, stopped and resumed like our own, and opened
without options.
"""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from lmforge.cli import run as lmforge_here
from lmforge.core.data.shards.folder import TokenFolder
from lmforge.core.model.init_weights import stored_buffers
from lmforge.core.records.runs import Run
from lmforge.hf.export import export_folder
from lmforge.serve.decoding.model_loading import load_model
from tests.core.model.foreign import theirs_of
from tests.distributed.conftest import assert_agree, losses, run_cases, weights
from tests.support.rounding import other_rounding

pytestmark = pytest.mark.slow
KINDS = ("gpt_neox", "mixtral", "apertus")
STEPS = 4
FULL = ["--parallel.activation_checkpointing", "full"]
# Command lines by the names of their runs; the first of each kind by this process alone, the others
# by two ranks.
SPREADS: dict[str, list[str]] = {
    "gpt_neox single": [],
    "mixtral single": [],
    "apertus single": [],
    "gpt_neox fsdp2": FULL,
    "mixtral fsdp2": FULL,
    "apertus fsdp2": FULL,
    "mixtral fsdp1": ["--parallel.engine", "fsdp1"],
    "apertus fsdp1": ["--parallel.engine", "fsdp1"],
    "apertus ddp": ["--parallel.engine", "ddp", "--train.micro_batch_size", "1"],
    "mixtral ddp": ["--parallel.engine", "ddp", "--train.micro_batch_size", "1"],
    "mixtral halved": [*FULL, "--train.steps", str(STEPS // 2)],
}


@pytest.fixture(scope="module")
def folders(tiny_tokens: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A model folder of each kind that fits the tokens; gpt_neox's without weights."""
    results = {kind: tmp_path_factory.mktemp(kind) for kind in KINDS}
    tokenizer = TokenFolder.open(tiny_tokens).tokenizer
    for kind, folder in results.items():
        theirs = theirs_of(kind, vocab_size=tokenizer.vocab_size)
        (theirs.config if kind == "gpt_neox" else theirs).save_pretrained(folder)
    return results


@pytest.fixture(scope="module")
def runs(
    folders: dict[str, Path], tiny_tokens: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Run]:
    """The finished runs by "KIND SPREAD"."""
    place = tmp_path_factory.mktemp("foreign")
    common = (
        f"--data.folder {tiny_tokens} --data.sequence_length 48 --train.steps {STEPS}"
        " --train.global_batch_size 4"
    )
    common += " --train.dtype fp32 --train.compile off --train.device cpu --train.threads 1"
    common += " --schedule.name constant --schedule.warmup_steps 2"
    # A larger epsilon than one trains with, so that AdamW does not make a step of what is zero but
    # for rounding.
    common += (
        " --optimizer.lr 1e-2 --optimizer.eps 1e-3 --log.every_steps 2 --checkpoint.every_steps 2"
        " --validation.sequences 4"
    )

    def line(name: str, *more: str) -> list[str]:
        source = [
            "--model.source",
            str(folders[name.split()[0]]),
            "--model.implementation",
            "transformers",
        ]
        if name.startswith("gpt_neox"):
            source += ["--model.load_weights", "false"]
        return [
            *common.split(),
            *source,
            "--run.folder",
            str(place),
            "--run.name",
            name,
            *SPREADS.get(name, []),
            *more,
        ]

    for kind in KINDS:
        assert lmforge_here(["pretrain", *line(f"{kind} single")]) == 0
        with other_rounding():
            assert lmforge_here(["pretrain", *line(f"{kind} single rounded")]) == 0
    spread = [line(name) for name in SPREADS if not name.endswith("single")]
    run_cases(2, [*spread, line("mixtral halved", "--train.steps", str(STEPS))], place)
    return {name: Run(place / name) for name in SPREADS}


@pytest.mark.parametrize(
    "name",
    [name for name in SPREADS if not name.endswith(("single", "halved"))],
)
def test_losses_and_weights_are_those_of_one_process(runs: dict[str, Run], name: str) -> None:
    assert_agree(runs[name], runs[f"{name.split()[0]} single"])


def test_a_run_that_was_stopped_and_continued_is_bit_for_bit_the_one_that_was_not(
    runs: dict[str, Run],
) -> None:
    unbroken, halved = runs["mixtral fsdp2"], runs["mixtral halved"]
    assert STEPS // 2 in halved.checkpoint_steps()
    assert losses(halved) == losses(unbroken)
    assert losses(halved, "val/loss")[STEPS] == losses(unbroken, "val/loss")[STEPS]
    theirs = weights(unbroken)
    assert all(torch.equal(value, theirs[name]) for name, value in weights(halved).items())


def test_it_begins_from_the_folders_weights_and_trains_every_tensor(
    runs: dict[str, Run], folders: dict[str, Path]
) -> None:
    """Experts that no token of a step went to included: they share a tensor with those that
    were.
    """
    begun = AutoModelForCausalLM.from_pretrained(folders["mixtral"], dtype=torch.float32)
    for name, value in weights(runs["mixtral fsdp2"]).items():
        assert 0 < (value - begun.get_parameter(name)).abs().max() < 0.2, name


@pytest.mark.parametrize("engine", ["single", "fsdp2", "fsdp1", "ddp"])
def test_what_is_not_trained_is_in_a_checkpoint_as_it_was_in_the_folder(
    runs: dict[str, Run], folders: dict[str, Path], engine: str
) -> None:
    begun = AutoModelForCausalLM.from_pretrained(folders["apertus"], dtype=torch.float32)
    run = load_model(runs[f"apertus {engine}"].path, torch.device("cpu"), torch.float32)
    kept = dict(stored_buffers(begun))
    assert len(kept) == 6
    for name, value in stored_buffers(run.model):
        assert torch.equal(value, kept[name]), name


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_is_opened_evaluated_shown_and_exported_without_options_for_its_kind(
    runs: dict[str, Run], kind: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run = runs[f"{kind} fsdp2"]
    opened = load_model(run.path, torch.device("cpu"), torch.float32)
    tokens = torch.randint(0, 96, (2, 17))
    place = torch.arange(17).expand(2, -1)
    with torch.no_grad():
        ours = opened.model.lm_head(opened.model(tokens, place, torch.zeros_like(tokens).int()))
        export_folder(opened.model, opened.config, tmp_path / "out", tokenizer_folder=opened.path)
        theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "out")(tokens).logits
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)
    for thing in (run.path, tmp_path / "out"):
        for words in (["show"], ["generate", "To be", "--max_tokens", "5"]):
            assert lmforge_here([words[0], str(thing), *words[1:]]) == 0, words
    printed = capfd.readouterr().out
    assert printed.count(f"{kind}: 3 layers, width 32") == 2
    assert "To be" in printed


def test_a_run_is_not_continued_by_the_other_implementation_or_another_folder(
    runs: dict[str, Run], folders: dict[str, Path], capfd: pytest.CaptureFixture[str]
) -> None:
    recipe = str(runs["gpt_neox single"].recipe_path)
    assert (
        lmforge_here(
            ["pretrain", recipe, "--model.source", str(folders["mixtral"]), "--train.steps", "9"]
        )
        == 2
    )
    assert "another model config (" in capfd.readouterr().err
    assert (
        lmforge_here(
            ["pretrain", recipe, "--model.implementation", "lmforge", "--train.steps", "9"]
        )
        == 2
    )
    assert (
        "; or let transformers compute it: --model.implementation transformers"
        in capfd.readouterr().err
    )
