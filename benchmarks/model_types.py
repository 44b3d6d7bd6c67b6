"""Which models of transformers lmforge opens, and how far it is from them: a table of model types.

Each is made small and random by transformers, saved, and opened: computed by lmforge's own modules
(native), by transformers' modules in lmforge (wrapped), or refused, with the reason. Of each that
opens it measures the largest distances in fp32, as parts of the largest number of a tensor:

    logits      of two rows, from transformers'
    gradients   of the mean loss of every parameter, from transformers'
    rounding    the same gradients of lmforge, from its own in fp64
    packed      logits of documents in one row, from those of each alone
    export      logits of the exported folder in transformers, from lmforge's

and whether greedy decoding of prompts of several lengths gives the tokens of transformers'
`generate`. transformers' chunks of the gated delta rule lose up to 1e-5, so it computes that rule
token by token; and Nemotron-H's steps have the limits of its config alone, as in published code.

    python benchmarks/model_types.py [TYPE …] [--write]

With --write all rows go into benchmarks/results/model_types.json, and the table into docs/models.md.
"""

import argparse
import copy
import datetime
import json
import sys
import tempfile
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from lmforge.core.errors import UserError
from lmforge.core.model.build import build_model
from lmforge.core.model.init_weights import named_tensors
from lmforge.hf.export import export_folder
from lmforge.hf.resolve import resolve_model_config
from lmforge.hf.weights import load_folder
from lmforge.serve.decoding.engine import Engine, GenerationRequest
from lmforge.serve.decoding.sampling import SamplingParams

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "model_types.json"
PAGE = ROOT / "docs" / "models.md"
BEGIN = "<!-- the table of benchmarks/model_types.py -->\n"
END = "<!-- end of the table -->\n"
SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
EXPERTS: dict[str, Any] = {
    "num_experts": 6,
    "num_local_experts": 6,
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "n_group": 1,
    "topk_group": 1,
}
DELTA: dict[str, Any] = {
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "layer_types": ["linear_attention"] * 3 + ["full_attention"],
}
MAMBA: dict[str, Any] = {
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "mamba_n_groups": 2,
    "mamba_d_state": 8,
    "mamba_num_heads": 8,
    "mamba_head_dim": 8,
    "n_groups": 2,
    "ssm_state_size": 8,
    "mamba_d_ssm": 64,
}
LOCAL: dict[str, Any] = {"sliding_window": 9}
VISION: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
QWEN_VISION: dict[str, Any] = {
    "depth": 1,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_heads": 2,
    "out_hidden_size": 32,
    "num_position_embeddings": 16,
}
QWEN_TOKENS: dict[str, Any] = {
    "image_token_id": 95,
    "video_token_id": 94,
    "vision_start_token_id": 93,
    "vision_end_token_id": 92,
}
# Of each model_type, what its small config has besides SIZES, or in place of them.
MODEL_TYPES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": LOCAL,
    "qwen2": {},
    "qwen3": {},
    "qwen3_moe": EXPERTS,
    "olmo2": {},
    "olmo3": LOCAL,
    "olmoe": EXPERTS,
    "mixtral": EXPERTS,
    "deepseek_v3": {
        **EXPERTS,
        "num_key_value_heads": 4,
        "first_k_dense_replace": 1,
        "kv_lora_rank": 8,
        "q_lora_rank": 12,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 4,
        "v_head_dim": 8,
    },
    "gpt2": {},
    "gemma2": LOCAL,
    "gemma3_text": LOCAL,
    "gemma4_text": {
        **LOCAL,
        "global_head_dim": 8,
        "num_kv_shared_layers": 0,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": 96,
    },
    "gpt_oss": {**EXPERTS, **LOCAL},
    "qwen3_next": {**EXPERTS, **DELTA, "shared_expert_intermediate_size": 24},
    "qwen3_5_text": DELTA,
    "qwen3_5_moe_text": {**EXPERTS, **DELTA, "shared_expert_intermediate_size": 24},
    "olmo_hybrid": {**DELTA, "linear_num_key_heads": 4},
    "glm4": {},
    "glm4_moe": {**EXPERTS, "first_k_dense_replace": 1, "head_dim": 8},
    "minimax_m2": {**EXPERTS, "rotary_dim": 4},
    "smollm3": {},
    "phi3": {"partial_rotary_factor": 0.5},
    "granite": {"logits_scaling": 4.0, "residual_multiplier": 0.5, "attention_multiplier": 0.3},
    "granitemoehybrid": {
        **EXPERTS,
        **MAMBA,
        "shared_intermediate_size": 24,
        "layer_types": ["mamba", "mamba", "attention", "mamba"],
    },
    "nemotron_h": {
        **EXPERTS,
        **MAMBA,
        "layers_block_type": ["mamba", "moe", "attention", "mamba"],
        "moe_shared_expert_intermediate_size": 24,
        "moe_latent_size": None,
    },
    "falcon_h1": MAMBA,
    "lfm2": {"layer_types": ["conv", "conv", "full_attention", "conv"]},
    "lfm2_moe": {
        **EXPERTS,
        "num_dense_layers": 1,
        "layer_types": ["conv", "conv", "full_attention", "conv"],
    },
    "kimi_linear": {
        **EXPERTS,
        "num_key_value_heads": 4,
        "first_k_dense_replace": 1,
        "kv_lora_rank": 8,
        "q_lora_rank": None,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 4,
        "v_head_dim": 8,
        "linear_attn_config": {
            "kda_layers": [1, 2, 4],
            "full_attn_layers": [3],
            "head_dim": 8,
            "num_heads": 4,
            "short_conv_kernel_size": 4,
        },
        "layer_types": ["linear_attention"] * 2 + ["full_attention", "linear_attention"],
    },
    "seed_oss": {},
    "exaone4": LOCAL,
    "ernie4_5": {},
    "ernie4_5_moe": {**EXPERTS, "moe_num_experts": 6, "moe_k": 2, "moe_layer_start_index": 1},
    "cohere2": LOCAL,
    "apertus": {},
    "ministral3": {},
    "starcoder2": {},
    "arcee": {},
    "gemma3": {
        "text_config": {**SIZES, **LOCAL},
        "vision_config": {"model_type": "siglip_vision_model", **VISION},
        "mm_tokens_per_image": 1,
        "image_token_index": 95,
    },
    "qwen3_5": {
        "text_config": {**SIZES, **DELTA},
        "vision_config": QWEN_VISION,
        **QWEN_TOKENS,
    },
    "qwen3_5_moe": {
        "text_config": {**SIZES, **EXPERTS, **DELTA, "shared_expert_intermediate_size": 24},
        "vision_config": QWEN_VISION,
        **QWEN_TOKENS,
    },
    "qwen3_vl": {
        "text_config": SIZES,
        "vision_config": {**QWEN_VISION, "deepstack_visual_indexes": [0]},
        **QWEN_TOKENS,
    },
    "mistral3": {
        "text_config": {"model_type": "mistral", **SIZES},
        "vision_config": {"model_type": "pixtral", "head_dim": 8, **VISION},
        "image_token_index": 95,
    },
}
PROMPTS = (3, 11, 6)  # their lengths
NEW_TOKENS = 8
DOCUMENTS = (1, 13, 5, 20)  # their lengths in a packed row
# Functions of transformers → those that compute the same token by token.
TOKEN_BY_TOKEN = {"torch_chunk_gated_delta_rule": "torch_recurrent_gated_delta_rule"}


@dataclass
class Row:
    """A model type in the table. how: native, wrapped, or refused with the `reason`.

    Distances are as at the top of this file; `greedy`: whether tokens are equal.
    """

    model_type: str
    how: str
    reason: str = ""
    logits: float | None = None
    gradients: float | None = None
    rounding: float | None = None
    packed: float | None = None
    export: float | None = None
    greedy: bool | None = None


def make(model_type: str, folder: Path) -> Any:
    """transformers' model of a small config, random in every parameter and saved in `folder`."""
    torch.manual_seed(0)
    chosen = MODEL_TYPES[model_type]
    is_tower = "text_config" in chosen
    fields = chosen if is_tower else {**SIZES, **chosen}
    known = transformers.CONFIG_MAPPING[model_type]
    config = known(**{name: each for name, each in fields.items() if _has(known, name, is_tower)})
    kind = (
        transformers.AutoModelForImageTextToText if is_tower else transformers.AutoModelForCausalLM
    )
    model = kind.from_config(config, attn_implementation="eager", experts_implementation="eager")
    model = model.float().eval()
    with torch.no_grad():
        for name, each in named_tensors(model):
            if each.is_floating_point() and "rotary" not in name:
                # A residual stream of small numbers makes much of rounding.
                scale = 1.0 if name.endswith("embed_tokens.weight") else 0.1
                each.add_(scale * torch.randn_like(each))
    _compute_as_published(model)
    model.save_pretrained(folder)
    return model


def _has(config: Any, name: str, is_tower: bool) -> bool:
    """Whether a config of transformers has a field of this name, so that nothing foreign is written
    into its folder.
    """
    own = {*config.__dataclass_fields__, *config.attribute_map}
    return is_tower or name in own or name in ("rotary_dim", "partial_rotary_factor")


def _compute_as_published(model: Any) -> None:
    each: Any
    for each in model.modules():
        if hasattr(each, "time_step_limit"):
            each.time_step_limit = model.config.time_step_limit
    module = import_module(type(model).__module__)
    for name, other in TOKEN_BY_TOKEN.items():
        if hasattr(module, name):
            setattr(module, name, getattr(module, other))


def open_folder(folder: Path) -> tuple[str, Any, str]:
    """(how it opens, the model or None, why it does not)."""
    reason = ""
    for how, implementation in (("native", "lmforge"), ("wrapped", "transformers")):
        try:
            model = build_model(resolve_model_config(folder, {}, implementation=implementation))
            load_folder(folder, model)
            return how, model, ""
        except UserError as problem:
            reason = str(problem).replace(f"{folder}/config.json: ", "")
    return "refused", None, reason


def distance(ours: Tensor, theirs: Tensor) -> float:
    """The largest difference, as a part of the largest of `theirs`."""
    largest = theirs.abs().max().item()
    difference = (ours - theirs).abs().max().item()
    return difference / largest if largest else difference


def logits_of(model: Any, rows: Sequence[Sequence[int]]) -> Tensor:
    """Logits of lmforge's model [1, tokens, vocabulary] of one row in which these documents follow
    each other.
    """
    tokens = torch.tensor([[token for row in rows for token in row]])
    positions = torch.tensor([[place for row in rows for place in range(len(row))]])
    numbers = [number for number, row in enumerate(rows) for _ in row]
    ids = torch.tensor([numbers], dtype=torch.int32)
    logits: Tensor = model.lm_head(model(tokens, positions, ids))
    return logits


def mean_loss(logits: Tensor, row: Sequence[int]) -> Tensor:
    return nn.functional.cross_entropy(logits[0, :-1], torch.tensor(row[1:]))


def gradient_distances(
    ours: Any, theirs: Any, row: Sequence[int], folder: Path
) -> tuple[float, float]:
    """Those of the worst parameter, from transformers' and from lmforge's in fp64. The gradients of
    transformers' model are saved as weights are, and read by lmforge, which knows their names.
    """
    exact = copy.deepcopy(ours).double()
    for module in exact.modules():
        if hasattr(module, "set_experts_implementation"):
            module.set_experts_implementation("eager")  # torch multiplies experts in 32 bits
    for model in (ours, exact):
        mean_loss(logits_of(model, [row]), row).backward()
    mean_loss(theirs(torch.tensor([row])).logits, row).backward()
    with torch.no_grad():
        for parameter in theirs.parameters():
            gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            parameter.copy_(gradient)
    theirs.save_pretrained(folder)
    again = build_model(ours.config)
    load_folder(folder, again)
    worst = 0.0
    rounding = 0.0
    for name, parameter in ours.named_parameters():
        if parameter.grad is None:
            worst = max(worst, again.get_parameter(name).abs().max().item())
            continue
        worst = max(worst, distance(parameter.grad, again.get_parameter(name).detach()))
        in_fp64 = exact.get_parameter(name).grad
        rounding = max(rounding, distance(parameter.grad.double(), in_fp64))
    return worst, rounding


def greedy_tokens(model: Any, prompts: Sequence[Sequence[int]]) -> list[list[int]]:
    """Those that lmforge decodes for prompts in one batch."""
    engine = Engine(
        model,
        vocab_size=SIZES["vocab_size"],
        max_batch_size=len(prompts),
        max_length=max(PROMPTS) + NEW_TOKENS,
    )
    tokens: dict[int, list[int]] = {}
    for prompt in prompts:
        request = GenerationRequest(
            prompt, NEW_TOKENS, SamplingParams(temperature=0.0), 0, frozenset()
        )
        tokens[engine.add_request(request)] = []
    while engine.num_unfinished:
        for token in engine.step():
            tokens[token.request_id].append(token.token_id)
    return [*tokens.values()]


def measure(model_type: str, folder: Path) -> Row:
    """The row of a model type, whose folders are made in `folder`."""
    theirs = make(model_type, folder / "theirs")
    how, ours, reason = open_folder(folder / "theirs")
    row = Row(model_type, how, reason)
    if ours is None:
        return row
    ours.eval()
    generator = torch.Generator().manual_seed(1)

    def drawn(length: int) -> list[int]:
        # The last tokens stand for images in some folders.
        return torch.randint(0, 90, (length,), generator=generator).tolist()

    text = drawn(40)
    with torch.no_grad():
        of_ours = logits_of(ours, [text])
        row.logits = distance(of_ours, theirs(torch.tensor([text])).logits)
        documents = [drawn(length) for length in DOCUMENTS]
        alone = torch.cat([logits_of(ours, [each]) for each in documents], 1)
        row.packed = distance(logits_of(ours, documents), alone)
    prompts = [drawn(length) for length in PROMPTS]
    wanted = [
        theirs.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            max_new_tokens=NEW_TOKENS,
            do_sample=False,
            pad_token_id=0,
        )[0, len(prompt) :].tolist()
        for prompt in prompts
    ]
    row.greedy = greedy_tokens(ours, prompts) == wanted
    export_folder(ours, ours.config, folder / "export")
    again = transformers.AutoModelForCausalLM.from_pretrained(
        folder / "export", attn_implementation="eager", experts_implementation="eager"
    )
    _compute_as_published(again)
    with torch.no_grad():
        row.export = distance(again(torch.tensor([text])).logits, of_ours)
    row.gradients, row.rounding = gradient_distances(ours, theirs, text, folder / "gradients")
    return row


def lines_of(rows: Sequence[Row]) -> list[str]:
    """The table in Markdown."""
    lines = [
        "| model type | how | logits | gradients | rounding | packed | export | greedy tokens |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        if row.how == "refused":
            lines.append(f"| {row.model_type} | refused: {row.reason} | | | | | | |")
            continue
        numbers = (row.logits, row.gradients, row.rounding, row.packed, row.export)
        cells = ["" if each is None else f"{each:.0e}" for each in numbers]
        greedy = {True: "equal", False: "differ", None: ""}[row.greedy]
        lines.append(f"| {' | '.join([row.model_type, row.how, *cells, greedy])} |")
    return lines


def attempt(model_type: str) -> Row:
    """The row of a model type; one that fails says with what."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            return measure(model_type, Path(folder))
        except Exception as problem:
            first = str(problem).strip().splitlines()[:1]
            return Row(model_type, "failed", f"{type(problem).__name__}: {' '.join(first)}")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Model types of transformers in lmforge.")
    parser.add_argument("model_types", nargs="*", metavar="TYPE", help="default: all")
    parser.add_argument("--write", action="store_true", help="write results and page")
    chosen = parser.parse_args(arguments)
    unknown = [each for each in chosen.model_types if each not in MODEL_TYPES]
    if unknown:
        print(f"{unknown[0]}: no such model type; there are {', '.join(MODEL_TYPES)}")
        return 2
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    rows = []
    for model_type in chosen.model_types or MODEL_TYPES:
        rows.append(attempt(model_type))
        print(lines_of(rows[-1:])[-1], rows[-1].reason[:300], flush=True)
    if chosen.write:
        content = {
            "date": datetime.date.today().isoformat(),
            "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
            "rows": [asdict(row) for row in rows],
        }
        RESULTS.write_text(json.dumps(content, indent=1) + "\n")
        write_page(rows)
    return 0


def write_page(rows: Sequence[Row]) -> None:
    before, _, rest = PAGE.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    table = "".join(f"{line}\n" for line in lines_of(rows))
    PAGE.write_text(f"{before}{BEGIN}\n{table}\n{END}{after}")


def table_on_page() -> list[str]:
    """The lines of the table in docs/models.md."""
    _, _, rest = PAGE.read_text().partition(BEGIN)
    return rest.partition(END)[0].strip().splitlines()


def written_rows() -> list[Row]:
    """Those of benchmarks/results/model_types.json."""
    return [Row(**each) for each in json.loads(RESULTS.read_text())["rows"]]


if __name__ == "__main__":
    sys.exit(main())
