"""`lmforge export`: transformers opens the model that was trained."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer

from lmforge.cli import run as command
from lmforge.core.data.batch import Batch
from lmforge.core.data.shards.folder import TokenFolder
from lmforge.core.data.tokenizer import Tokenizer
from lmforge.core.model.layers import LanguageModel
from lmforge.serve.decoding.model_loading import load_model
from tests.conftest import Command
from tests.core.model.foreign import theirs_of


def test_an_export_has_the_logits_tokens_and_ends_of_the_run_in_transformers(
    tiny_run: Path, tmp_path: Path, tiny_model_and_tokenizer: tuple[LanguageModel, Tokenizer]
) -> None:
    ours, tokenizer = tiny_model_and_tokenizer
    assert command(["export", str(tiny_run), str(tmp_path / "out")]) == 0
    theirs, words = (
        AutoModelForCausalLM.from_pretrained(tmp_path / "out"),
        AutoTokenizer.from_pretrained(tmp_path / "out"),
    )
    text = "First Citizen: we are accounted poor citizens; the patricians good."
    ids = words(text)["input_ids"]
    assert ids == tokenizer.encode(text)
    assert words.decode(ids) == text
    tokens = torch.tensor([ids])
    batch = Batch(
        tokens, tokens, torch.arange(len(ids))[None], torch.zeros_like(tokens, dtype=torch.int32)
    )
    with torch.no_grad():
        expected = ours.lm_head(ours(batch.tokens, batch.positions, batch.document_ids))
        torch.testing.assert_close(theirs(tokens).logits, expected, atol=1e-4, rtol=0)
    end = theirs.generation_config.eos_token_id
    assert end == words.eos_token_id == tokenizer.eos_token_id
    # And back: the folder opens here too, and ends texts where the run does.
    opened = load_model(tmp_path / "out", torch.device("cpu"), torch.float32)
    assert opened.stop_token_ids == {end}
    for name, tensor in opened.model.state_dict().items():
        assert torch.equal(tensor, ours.state_dict()[name]), name


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_an_export_has_the_requested_dtype(tiny_run: Path, tmp_path: Path, dtype: str) -> None:
    assert command(["export", str(tiny_run), str(tmp_path / "out"), "--dtype", dtype]) == 0
    expected = {"bf16": torch.bfloat16, "fp16": torch.float16}[dtype]
    with safe_open(tmp_path / "out" / "model.safetensors", framework="pt") as file:
        assert {file.get_tensor(name).dtype for name in file.keys()} == {expected}  # noqa: SIM118 - not a dict
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto").dtype == expected


def test_nothing_is_overwritten_without_overwrite(
    tiny_run: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter.txt").write_text("years of work")
    for more in ([], ["--overwrite"]):
        assert command(["export", str(tiny_run), str(tmp_path / "thesis"), *more]) == 2
        assert len(capfd.readouterr().err.splitlines()) == 1
    assert command(["export", str(tiny_run), str(tmp_path / "out")]) == 0
    assert command(["export", str(tiny_run), str(tmp_path / "out")]) == 2
    assert command(["export", str(tiny_run), str(tmp_path / "out"), "--overwrite"]) == 0
    assert command(["export", str(tmp_path / "nothing"), str(tmp_path / "b")]) == 2
    assert not (tmp_path / "b").exists()


def test_where_a_link_is_overwritten_what_it_leads_to_is_replaced_and_nothing_is_left(
    tiny_run: Path, tmp_path: Path
) -> None:
    assert command(["export", str(tiny_run), str(tmp_path / "out")]) == 0
    (tmp_path / "link").symlink_to("out")
    (tmp_path / "out" / "README.md").write_text("of the model before")
    assert command(["export", str(tiny_run), str(tmp_path / "link"), "--overwrite"]) == 0
    assert {path.name for path in tmp_path.iterdir()} == {"out", "link"}
    assert (tmp_path / "link").is_symlink()
    assert not (tmp_path / "out" / "README.md").exists()


@pytest.mark.parametrize(
    "of_a_model", [True, False], ids=["beside a model", "beside a config.json"]
)
def test_a_folder_with_files_of_somebody_else_is_not_overwritten(
    tiny_run: Path, tmp_path: Path, of_a_model: bool
) -> None:
    if of_a_model:
        assert command(["export", str(tiny_run), str(tmp_path / "out")]) == 0
    else:
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / "config.json").write_text('{"name": "mine"}')
    (tmp_path / "out" / "thesis.tex").write_text("years")
    assert command(["export", str(tiny_run), str(tmp_path / "out"), "--overwrite"]) == 2
    assert (tmp_path / "out" / "thesis.tex").read_text() == "years"


# Llama is exported above too; each of the others in `make test` has something of its own.
IN_BRIEF = ["qwen3", "gpt2", "mixtral"]
FAMILIES = [
    *IN_BRIEF,
    *(
        pytest.param(family, marks=pytest.mark.slow)
        for family in ("llama", "mistral", "qwen2", "olmo2", "gemma3_text")
    ),
]


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_goes_to_transformers_and_comes_back_with_equal_tensors(
    family: str, tiny_tokens: Path, tiny_options: list[str], tmp_path: Path
) -> None:
    shutil.copytree(tiny_tokens, tmp_path / "tokens")
    (tmp_path / "tokens" / "tokenizer" / "chat_template.jinja").write_text(
        "{{ messages[0].content }}!"
    )
    given = dict(zip(tiny_options[::2], tiny_options[1::2], strict=True))
    options = {name: value for name, value in given.items() if not name.startswith("--model.")}
    if family == "mixtral":  # as transformers computes them
        vocabulary = TokenFolder.open(tiny_tokens).tokenizer.vocab_size
        theirs_of(family, vocab_size=vocabulary).save_pretrained(tmp_path / "source")
        options |= {
            "--model.source": str(tmp_path / "source"),
            "--model.implementation": "transformers",
        }
    else:
        sizes = {name: value for name, value in given.items() if name.startswith("--model.")}
        if family == "gemma3_text":
            sizes["--model.sliding_window"] = "7"
        if family == "gpt2":
            sizes["--model.num_key_value_heads"] = sizes["--model.num_attention_heads"]
        options |= {**sizes, "--model.model_type": family}
    options |= {
        "--data.folder": str(tmp_path / "tokens"),
        "--train.steps": "1",
        "--schedule.warmup_steps": "0",
    }
    options |= {"--run.folder": str(tmp_path), "--run.name": "run", "--validation.sequences": "1"}
    assert command(["pretrain", *(word for pair in options.items() for word in pair)]) == 0
    assert command(["export", str(tmp_path / "run"), str(tmp_path / "out")]) == 0

    ours = load_model(tmp_path / "run", torch.device("cpu"), torch.float32).model
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    tokens = torch.randint(0, theirs.config.vocab_size, (2, 23))
    places, documents = torch.arange(23).expand(2, 23), torch.zeros(2, 23, dtype=torch.int32)
    with torch.no_grad():
        torch.testing.assert_close(
            theirs(tokens).logits,
            ours.lm_head(ours(tokens, places, documents)),
            atol=1e-5,
            rtol=1e-5,
        )
    words = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert (
        words.apply_chat_template([{"role": "user", "content": "hear me"}], tokenize=False)
        == "hear me!"
    )

    theirs.save_pretrained(tmp_path / "theirs")
    words.save_pretrained(tmp_path / "theirs")
    back = load_model(tmp_path / "theirs", torch.device("cpu"), torch.float32).model
    assert back.state_dict().keys() == ours.state_dict().keys()
    for name, tensor in back.state_dict().items():
        assert torch.equal(tensor, ours.state_dict()[name]), name


@pytest.mark.slow
@pytest.mark.parametrize("layers", [4, 9])
def test_exporting_needs_the_memory_of_one_tensor_not_of_the_model(
    tmp_path: Path, lmforge: Command, tiny_tokens: Path, layers: int
) -> None:
    """Matrices of 8 MiB at most, of which there are many."""
    sizes = [
        "--model.hidden_size",
        "512",
        "--model.intermediate_size",
        "4096",
        "--model.num_hidden_layers",
        layers,
    ]
    heads = ["--model.num_attention_heads", "8", "--model.num_key_value_heads", "8"]
    few = [
        "--train.steps",
        "1",
        "--train.global_batch_size",
        "1",
        "--data.sequence_length",
        "16",
        "--validation.sequences",
        "1",
    ]
    where = [
        "--data.folder",
        tiny_tokens,
        "--run.folder",
        tmp_path,
        "--run.name",
        "a",
        "--train.dtype",
        "fp32",
    ]
    where += ["--optimizer.state_dtype", "8bit"]  # little state to be written
    words = [
        *sizes,
        *heads,
        *few,
        *where,
        "--schedule.warmup_steps",
        "0",
        "--train.device",
        "cpu",
        "--train.compile",
        "off",
    ]
    assert lmforge("pretrain", *words).returncode == 0
    program = (
        "import resource, sys\n"
        "from lmforge.cli import run\n"
        "import lmforge.ops.verbs.export, torch\n"
        "lmforge_only = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "assert run(['export', sys.argv[1], sys.argv[2]]) == 0\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - lmforge_only)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, tmp_path / "a", tmp_path / "out"],
        capture_output=True,
        text=True,
        check=True,
    )
    model = (tmp_path / "out" / "model.safetensors").stat().st_size
    assert model > 28 * layers * 2**20
    assert int(done.stdout.splitlines()[-1]) * 1024 < model / 2
    assert json.loads((tmp_path / "out" / "config.json").read_text())["hidden_size"] == 512
