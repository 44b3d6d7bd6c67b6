"""Functions on models, for programs: build, load, generate, evaluate, save, export."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from torch.distributed.tensor import DTensor

from lmforge.core.data.tokenizer import Tokenizer
from lmforge.core.distributed.distributed import init_distributed
from lmforge.core.errors import UserError
from lmforge.core.model.build import build_model as build_module
from lmforge.core.model.init_weights import init_weights, named_tensors
from lmforge.core.model.layers import LanguageModel
from lmforge.core.options.options import validate_options
from lmforge.core.parallel.parallel_model import ParallelModel
from lmforge.core.parallel.precision import DTYPES
from lmforge.hf.export import export_folder
from lmforge.hf.resolve import resolve_model_config
from lmforge.ops.export import companion_files, export_checkpoint
from lmforge.serve.decoding import engine, model_loading
from lmforge.serve.decoding.model_loading import LoadedModel, resolve_device_and_dtype
from lmforge.serve.decoding.prompts import max_input_length
from lmforge.serve.evaluate.measure_loss import measure_loss
from lmforge.serve.options.models import ExportOptions
from lmforge.text.sources.folders import FileSplit


def build_model(
    config: str | Path = "nano",
    *,
    vocab_size: int | None = None,
    seed: int = 0,
    device: str = "cpu",
    **fields: Any,
) -> LanguageModel:
    """A model with random weights, in fp32.

    config      a preset (`lmforge show presets`), or a Hugging Face folder, whose weights are not
                read
    vocab_size  entries of the tokenizer; None: as the config says
    device      "cpu", "cuda", or "meta": without memory, for `parallelize`, which then draws the
                weights of each rank's part
    fields      further fields of the config by their names in config.json, such as
                num_hidden_layers=2

    Raises UserError for a config that cannot be built.
    """
    model = build_module(resolve_model_config(config, fields, vocab_size), device)
    if device == "meta":
        return model
    return init_weights(model, seed)


def open_tokenizer(path: str | Path) -> Tokenizer:
    """The tokenizer of prepared data, a run's checkpoint, a Hugging Face folder, or a
    tokenizer.json.

    `encode(text)` gives ids, `decode(ids)` text; it has `vocab_size` and `eos_token_id`. Raises
    UserError where there is none.
    """
    inside = Path(path) / "tokenizer"
    return Tokenizer.open(inside if inside.is_dir() else path)


def load_model(path: str | Path, *, device: str = "auto", dtype: str = "auto") -> LoadedModel:
    """The model of a run, a checkpoint, a Hugging Face folder or name, or a PEFT folder, in eval
    mode, with its tokenizer.

    device  "auto" (cuda where there is one), "cpu" or "cuda"
    dtype   "auto" (bf16 where it is faster), "fp32" or "bf16"

    Has `model`, `config`, `tokenizer` and `path`. Raises UserError where there is no model.
    """
    return model_loading.load_model(Path(path), *resolve_device_and_dtype(device, dtype))


def generate_text(
    model: LoadedModel,
    prompts: str | Sequence[str],
    *,
    max_tokens: int = 64,
    temperature: float | None = None,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int = 0,
) -> list[str]:
    """The text that the model generates after each prompt, without the prompt.

    The same seed gives the same text; temperature 0 is greedy. None: as the model's
    generation_config.json says, else temperature 0.8 alone. Raises UserError for a prompt that
    leaves no room in what the model reads; texts end there.
    """
    completions = engine.generate(
        model.model,
        model.tokenizer,
        [prompts] if isinstance(prompts, str) else prompts,
        max_tokens=max_tokens,
        sampling=model.sampling(0.8, temperature=temperature, top_k=top_k, top_p=top_p),
        seed=seed,
        stop_strings=model.stop_strings,
        prefix_ids=model.prefix_ids,
        stop_token_ids=model.stop_token_ids,
        max_length=max_input_length(model.config),
    )
    return [completion.text for completion in completions]


def evaluate_model(
    model: LoadedModel,
    data: str | Path | None = None,
    *,
    split: FileSplit = "validation",
    sequences: int | None = None,
    sequence_length: int | None = None,
    batch_size: int = 16,
) -> dict[str, Any]:
    """Loss (nats per token), perplexity and bits_per_byte of a model, by these names, with what was
    measured on what.

    data   prepared data, or files of text or conversations; None: what the model was trained on
    split  "validation" or "train" of prepared data

    Other arguments as in `lmforge evaluate`. Raises UserError for data that cannot be used.
    """
    with init_distributed(next(model.model.parameters()).device.type) as dist_ctx:
        return measure_loss(
            model,
            dist_ctx,
            data=None if data is None else Path(data),
            split=split,
            sequences=sequences,
            sequence_length=sequence_length,
            batch_size=batch_size,
        )


def save_model(
    model: LanguageModel | ParallelModel | LoadedModel,
    folder: str | Path,
    *,
    tokenizer: Tokenizer | None = None,
    dtype: str | None = None,
    overwrite: bool = False,
) -> None:
    """Write a model that is in memory as a Hugging Face folder, complete or not at all.

    model      of a `ParallelModel` every rank calls it, and rank 0 writes; not of engine fsdp1 or a
               pipeline
    tokenizer  of `open_tokenizer`, written beside the weights; None: of a `LoadedModel` its own,
               else none
    dtype      "fp32", "bf16" or "fp16"; None: as it is

    Raises UserError for a folder that exists, unless `overwrite` and it is that of a model.
    """
    module: Any = model.model if isinstance(model, ParallelModel | LoadedModel) else model
    tensors = dict(named_tensors(module))
    if isinstance(model, ParallelModel):
        if (
            model.engine == "fsdp1"
            or model.pipeline_rank
            or not model.parameter_shapes.keys() <= tensors.keys()
        ):
            raise UserError(
                f"{folder}: the parts of engine {model.engine} cannot be put together here; use"
                " fsdp2"
            )
        tensors = model.state_dict(None, lambda module, optimizer: {})["model"]  # type: ignore[arg-type]
        tensors = {
            name: each.full_tensor() if isinstance(each, DTensor) else each
            for name, each in tensors.items()
        }
    if isinstance(model, LoadedModel) and tokenizer is None:
        tokenizer = model.tokenizer
    if tokenizer is not None:
        files = {**companion_files(tokenizer, module.config, None), **tokenizer.files}
    else:
        files = None
    write = partial(
        export_folder,
        {name: tensor.detach().cpu() for name, tensor in tensors.items()},
        module.config,
        folder,
        dtype=DTYPES[dtype] if dtype else None,
        overwrite=overwrite,
        extra_files=files,
    )
    if isinstance(model, ParallelModel):
        model.dist_ctx.decide_on_rank0(write)
    else:
        write()


def export_model(
    run: str | Path,
    folder: str | Path,
    *,
    dtype: str = "fp32",
    adapters: bool = False,
    overwrite: bool = False,
    text_only: bool = False,
    source: str | Path | None = None,
) -> None:
    """Write a checkpoint, or the newest one of a run, as a Hugging Face folder, as `lmforge export`
    does, in bounded memory.

    dtype     "fp32", "bf16" or "fp16"
    adapters  the adapters alone, in PEFT's layout
    text_only of a run that began from a multimodal folder: the language model alone
    source    where that folder is now; None: where the run found it

    Raises UserError where there is no checkpoint, or the folder exists.
    """
    given = {
        "model": str(run),
        "out": str(folder),
        "dtype": dtype,
        "adapters": adapters,
        "overwrite": overwrite,
        "text_only": text_only,
        "source": source and str(source),
    }
    export_checkpoint(validate_options(ExportOptions, given))
