"""DeepSeek-V3 from a folder as it is published, through tuning whose experts are split, to the
server.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from lmforge.core.model.config_json import to_config_json
from lmforge.core.records.runs import Run
from lmforge.lab.bench.bounds import FP32, MUON
from lmforge.lab.bench.parity import weights_difference
from tests.conftest import Command
from tests.core.model.conftest import quantized
from tests.distributed.conftest import Recipe, losses, weights
from tests.distributed.shapes import SHAPES
from tests.distributed.test_balance import without_model
from tests.serve.conftest import Server, serving  # noqa: F401 - a fixture

pytestmark = pytest.mark.slow
SAID = "dequantized from float8, without layer 4, which predicts further tokens"
PARAMETERS = ["experts.gate_up_proj", "experts.down_proj", "gate.weight"]
TUNED = ["sft", "lora", "dpo"]
QUESTION = [{"role": "user", "content": "What is 2 and 3?"}]


def answer(content: str) -> list[dict[str, str]]:
    return [{"role": "assistant", "content": content}]


@pytest.fixture(scope="module")
def folder(recipe: Recipe, lmforge: Command, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`published`: in float8, with a layer that predicts further tokens; and runs that begin with
    it, on one rank and two.
    """
    folder = tmp_path_factory.mktemp("deepseek")
    content: dict[str, Any] = to_config_json(SHAPES["latent experts"]) | {"vocab_size": 512}
    (folder / "shape").mkdir()
    (folder / "shape" / "config.json").write_text(json.dumps(content))
    source = ["--model.source", str(folder / "shape"), "--model.load_weights", "false"]
    run(lmforge, "pretrain", *without_model(recipe(folder, "base", *source)))
    run(lmforge, "export", folder / "base", folder / "published")
    quantized(folder / "published", (16, 8))
    tensors = load_file(folder / "published" / "model.safetensors")
    save_file(
        {**tensors, "model.layers.4.eh_proj.weight": torch.zeros(3)},
        folder / "published" / "model.safetensors",
    )
    config = json.loads((folder / "published" / "config.json").read_text())
    (folder / "published" / "config.json").write_text(
        json.dumps(config | {"num_nextn_predict_layers": 1})
    )
    chats = [{"messages": QUESTION + answer(str(number))} for number in range(24)]
    pairs = [
        {"prompt": QUESTION, "chosen": answer(str(number)), "rejected": answer("none")}
        for number in range(24)
    ]
    for name, records in (("chats", chats), ("pairs", pairs)):
        (folder / f"{name}.jsonl").write_text(
            "".join(json.dumps(record) + "\n" for record in records)
        )
    lora = ["--lora.rank", 3, "--lora.target_parameters", *PARAMETERS]
    for ranks, split in ((1, []), (2, ["--parallel.expert_parallel_degree", 2])):
        said = tune(
            lmforge,
            folder,
            "sft",
            f"sft {ranks}",
            ranks,
            "published",
            "--optimizer.name",
            "muon",
            *split,
        )
        assert f"{folder}/published, {SAID}" in said
        tune(lmforge, folder, "sft", f"lora {ranks}", ranks, "published", *lora, *split)
        tune(lmforge, folder, "align", f"dpo {ranks}", ranks, "sft 1", *split)
    return folder


def run(lmforge: Command, *words: object, ranks: int = 1) -> str:
    done = lmforge(*words, ranks=ranks)
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def tune(
    lmforge: Command, folder: Path, verb: str, name: str, ranks: int, source: str, *more: object
) -> str:
    words: dict[str, object] = {
        "model.source": folder / source,
        "model.router_aux_loss_scope": "global_batch",
        "data.files": folder / ("chats.jsonl" if verb == "sft" else "pairs.jsonl"),
        "data.folder": folder / "examples",
        "data.sequence_length": 48,
        "run.folder": folder,
        "run.name": name,
        "train.steps": 4,
        "train.global_batch_size": 8,
        "train.dtype": "fp32",
        "train.compile": "off",
        "train.device": "cpu",
        "train.threads": 1,
        "optimizer.lr": 2e-3,
        "optimizer.eps": 1e-3,
        "schedule.name": "constant",
        "log.every_steps": 1,
    }
    return run(
        lmforge,
        verb,
        *(word for name, value in words.items() for word in (f"--{name}", value)),
        *more,
        ranks=ranks,
    )


@pytest.mark.parametrize("name", TUNED)
def test_tuning_with_experts_split_over_ranks_is_that_of_one_process(
    name: str, folder: Path
) -> None:
    whole, split = Run(folder / f"{name} 1"), Run(folder / f"{name} 2")
    assert losses(whole)[4] < losses(whole)[1]
    assert losses(split) == pytest.approx(losses(whole), rel=2 * FP32.loss)
    found = weights(split)
    for tensor_name, tensor in weights(whole).items():
        assert weights_difference(tensor_name, found[tensor_name], tensor) <= MUON.weights, (
            tensor_name
        )


def test_each_verb_says_once_what_was_dequantized_and_what_is_left_unread(
    folder: Path, lmforge: Command
) -> None:
    for words in (
        ["generate", folder / "published", "a"],
        ["evaluate", folder / "published", "--data", folder / "chats.jsonl"],
    ):
        said = lmforge(*words)
        assert said.returncode == 0, said.stderr
        assert said.stderr.count(f"weights of {folder}/published, {SAID}") == 1
        assert "dequantized" not in said.stdout


def test_the_server_decodes_a_tuned_model_as_generate_does(
    folder: Path,
    lmforge: Command,
    serving: Callable[..., Server],  # noqa: F811 - its fixture
) -> None:
    greedy = ["--temperature", 0, "--max_tokens", 12]
    texts = {name: run_text(lmforge, folder / name, *greedy) for name in ("dpo 2", "lora 2")}
    server = serving(*(folder / name for name in texts))
    for model, text in texts.items():
        body = {"model": model, "prompt": "What", "temperature": 0, "max_tokens": 12}
        status, said = server.ask("/v1/completions", body)
        assert status == 200
        assert f"What{said['choices'][0]['text']}" == text


def run_text(lmforge: Command, model: Path, *more: object) -> str:
    done = lmforge("generate", model, "What", "--dtype", "fp32", *more)
    assert done.returncode == 0, done.stderr
    return done.stdout.removesuffix("\n")
