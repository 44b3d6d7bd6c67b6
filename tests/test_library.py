"""`import lmforge` for programs: its names, their signatures, and that each is what the command
line uses.
"""

import ast
import inspect
import json
import os
import pkgutil
import re
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch

import lmforge
from lmforge.core.errors import RunFailed, UserError
from lmforge.serve.decoding.model_loading import load_model
from tests.conftest import Command

ROOT = Path(__file__).parents[1]
# The public interface. A change here is a change of it: see "Versions" in docs/library.md.
FUNCTIONS = {
    "prepare_data": "source, out, *, progress=None, dist_ctx=None, **options",
    "open_data": "folder, *, sequence_length, split='train', seed=0, shuffle=True",
    "open_batches": "dataset, *, batch_size, micro_batch_size=None, model",
    "open_tokenizer": "path",
    "build_model": "config='nano', *, vocab_size=None, seed=0, device='cpu', **fields",
    "load_model": "path, *, device='auto', dtype='auto'",
    "generate_text": (
        "model, prompts, *, max_tokens=64, temperature=None, top_k=None, top_p=None, seed=0"
    ),
    "evaluate_model": (
        "model, data=None, *, split='validation', sequences=None, sequence_length=None,"
        " batch_size=16"
    ),
    "save_model": "model, folder, *, tokenizer=None, dtype=None, overwrite=False",
    "export_model": (
        "run, folder, *, dtype='fp32', adapters=False, overwrite=False, text_only=False, source=None"
    ),
    "train_model": "options=None, *, recipe=None, stage='pretrain', objective=None, callbacks=()",
    "label_logprobs": "model, batch",
    "init_distributed": "device='auto', threads=None, timeout=None",
    "parallelize": "model, objective, dist_ctx, *, dtype='auto', compile=False, seed=0, **options",
    "build_optimizer": "model, name='adamw', **options",
    "train_step": (
        "parallel_model, optimizer, micro_batches, count_items, *, lr, max_grad_norm, set_phase=…,"
        " before_update=…, is_bad_step=None"
    ),
    "register": "kind, name, implementation=None, *, options=None, **facts",
    "option": "default, description, **bounds",
}
OTHERS = {
    "__version__",
    "Batch",
    "IGNORE_INDEX",
    "Objective",
    "Options",
    "UserError",
    "RunFailed",
    "Environment",
    "Reply",
}


# The module has the fixture's name.
@pytest.fixture
def lmforge_command(lmforge: Command) -> Command:
    return lmforge


def signature(name: str) -> str:
    words = []
    parameters = inspect.signature(getattr(lmforge, name)).parameters.values()
    for before, parameter in zip([None, *parameters], parameters, strict=False):
        if parameter.kind is parameter.KEYWORD_ONLY and (
            before is None or before.kind is not parameter.KEYWORD_ONLY
        ):
            words.append("*")
        prefix = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(
            parameter.kind, ""
        )
        value = "…" if callable(parameter.default) else repr(parameter.default)
        default = "" if parameter.default is parameter.empty else f"={value}"
        words.append(f"{prefix}{parameter.name}{default}")
    return ", ".join(words)


def test_the_public_names_and_signatures_are_those_of_this_list() -> None:
    assert set(lmforge.__all__) == {*FUNCTIONS, *OTHERS}
    assert {name: signature(name) for name in FUNCTIONS} == FUNCTIONS


def test_every_public_name_is_there_documented_and_described_on_its_page() -> None:
    page = (ROOT / "docs" / "library.md").read_text(encoding="utf-8")
    for name in lmforge.__all__:
        value = getattr(lmforge, name)
        assert name in dir(lmforge)
        assert f"`{name}" in page, name
        assert name in ("__version__", "IGNORE_INDEX") or inspect.getdoc(value), name


def test_no_public_name_is_that_of_a_subpackage_whose_import_would_replace_it() -> None:
    assert not {module.name for module in pkgutil.iter_modules(lmforge.__path__)} & set(
        lmforge.__all__
    )


def test_type_checkers_get_the_same_names_from_the_same_modules() -> None:
    stub = ast.parse((ROOT / "lmforge" / "__init__.pyi").read_text(encoding="utf-8"))
    declared = {
        alias.asname or alias.name: f"{node.module}:{alias.name}"
        for node in stub.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert declared == lmforge._PUBLIC
    [names] = [node.value for node in stub.body if isinstance(node, ast.Assign)]
    assert sorted(ast.literal_eval(names)) == sorted(lmforge.__all__)


USER = """
import lmforge

class Halved:
    def num_items(self, batch: lmforge.Batch):
        return (batch.labels != lmforge.IGNORE_INDEX).sum().float()

    def loss(self, model, batch: lmforge.Batch):
        total, count = -0.5 * lmforge.label_logprobs(model, batch).sum(), self.num_items(batch)
        return total, {"loss": (total.detach(), count)}

class Own(lmforge.Options):
    power: float = lmforge.option(2.0, "a power", ge=0, le=10)

objective: lmforge.Objective = Halved()
run = lmforge.train_model({"train.steps": 2}, objective=objective)
reveal_type(run)
reveal_type(lmforge.load_model(run))
lmforge.generate_text(lmforge.load_model(run), "The", max_tokens="many")
lmforge.nowhere
"""


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_type_checker_sees_the_types_of_the_names_in_a_users_program(tmp_path: Path) -> None:
    (tmp_path / "user.py").write_text(USER)
    command = [
        sys.executable,
        "-m",
        "mypy",
        "--config-file=",
        "--follow-imports=silent",
        "--ignore-missing-imports",
        "user.py",
    ]
    variables = os.environ | {"MYPYPATH": str(ROOT)}
    done = subprocess.run(
        command, cwd=tmp_path, env=variables, capture_output=True, text=True, timeout=1100
    )
    assert [re.sub(r"^user\.py:\d+: ", "", line) for line in done.stdout.splitlines()] == [
        'note: Revealed type is "pathlib.Path"',
        'note: Revealed type is "lmforge.serve.decoding.model_loading.LoadedModel"',
        (
            'error: Argument "max_tokens" to "generate_text" has incompatible type "str"; expected'
            ' "int"  [arg-type]'
        ),
        'error: Module has no attribute "nowhere"  [attr-defined]',
        "Found 2 errors in 1 file (checked 1 source file)",
    ]


def test_importing_lmforge_imports_no_torch_nor_pydantic_and_unknown_names_are_refused() -> None:
    code = (
        "import sys, lmforge; dir(lmforge); assert not {'torch', 'pydantic', 'numpy'} &"
        " set(sys.modules)\nlmforge.register, lmforge.Options, lmforge.UserError; assert 'torch'"
        " not in sys.modules\nhasattr(lmforge, 'nowhere') and sys.exit(1)\nlmforge.Batch; assert"
        " 'torch' in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_a_model_in_memory_is_saved_and_opens_as_the_same_model(
    tmp_path: Path, tiny_tokens: Path
) -> None:
    tokenizer = lmforge.open_tokenizer(tiny_tokens)
    sizes: dict[str, Any] = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    model = lmforge.build_model(
        vocab_size=tokenizer.vocab_size, seed=3, num_key_value_heads=2, **sizes
    )
    lmforge.save_model(model, tmp_path / "model", tokenizer=tokenizer)
    loaded = lmforge.load_model(tmp_path / "model", device="cpu", dtype="fp32")
    for name, tensor in model.named_parameters():
        assert torch.equal(dict(loaded.model.named_parameters())[name], tensor)
    assert loaded.tokenizer.hash == tokenizer.hash
    texts = lmforge.generate_text(loaded, ["a", "b"], max_tokens=4, seed=5)
    assert texts == lmforge.generate_text(loaded, ["a", "b"], max_tokens=4, seed=5)
    assert len(texts) == 2
    with pytest.raises(UserError, match="model"):
        lmforge.save_model(loaded, tmp_path / "model")


def test_an_evaluation_gives_what_the_command_prints(
    tiny_run: Path, lmforge_command: Command
) -> None:
    model = lmforge.load_model(tiny_run, device="cpu", dtype="fp32")
    done = lmforge_command(
        "evaluate", tiny_run, "--sequences", "8", "--device", "cpu", "--output", "json"
    )
    assert lmforge.evaluate_model(model, sequences=8)["loss"] == pytest.approx(
        json.loads(done.stdout)["loss"], rel=1e-6
    )


def test_wrong_options_of_a_program_are_refused_as_those_of_a_recipe(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"train.stps: no such option; did you mean train.steps\?"):
        lmforge.train_model({"train.stps": 3})
    with pytest.raises(UserError, match="sfd: no stage of training; did you mean sft"):
        lmforge.train_model(stage="sfd")
    with pytest.raises(UserError, match="expected a number above 0"):
        lmforge.train_model({"train.steps": 0})


def test_a_program_trains_with_its_objective_and_callbacks_and_continues(
    program: Command, tiny_tokens: Path, tmp_path: Path
) -> None:
    text = """
        import sys
        import lmforge

        class Halved:
            def num_items(self, batch):
                return (batch.labels != lmforge.IGNORE_INDEX).sum().float()

            def loss(self, model, batch):
                total, count = -0.5 * lmforge.label_logprobs(model, batch).sum(), self.num_items(batch)
                return total, {"loss": (total.detach(), count)}

        class Steps:
            def on_step_end(self, run, step, metrics):
                print("after", step)

        class Raises:
            def on_step_end(self, run, step, metrics):
                raise ValueError("enough")

        def train(steps, *callbacks):
            return lmforge.train_model(
                {"data.folder": sys.argv[1], "run.folder": sys.argv[2], "run.name": "own", "data.sequence_length": 32,
                 "model.hidden_size": 32, "model.intermediate_size": 48, "model.num_hidden_layers": 1,
                 "model.num_attention_heads": 2, "train.steps": steps, "train.global_batch_size": 4, "train.compile": "off",
                 "train.device": "cpu", "schedule.warmup_steps": 1, "log.every_steps": 1},
                objective=Halved(), callbacks=callbacks,
            )

        print("run", train(2, Steps()))
        train(3, Steps())
        try:
            train(4, Raises())
        except lmforge.RunFailed as problem:
            print("failed", problem)
    """
    printed = program(textwrap.dedent(text), tiny_tokens, tmp_path / "runs").stdout
    assert [line for line in printed.splitlines() if line.startswith("after")] == [
        "after 1",
        "after 2",
        "after 3",
    ]
    assert f"run {tmp_path / 'runs' / 'own'}" in printed
    assert "failed callback Raises (1): on_step_end raised ValueError: enough" in printed
    losses = [
        json.loads(line)["loss"]
        for line in (tmp_path / "runs/own/metrics.jsonl").read_text().splitlines()
    ]
    assert 2.5 < losses[0] < 3.5, "half of ln 512"
    assert issubclass(lmforge.RunFailed, RunFailed)
    assert (
        load_model(tmp_path / "runs" / "own", torch.device("cpu"), torch.float32).config.hidden_size
        == 32
    )
