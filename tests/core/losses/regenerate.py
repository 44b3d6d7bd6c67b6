"""Record the results of TRL's trainers for the tiny model: `python tests/core/losses/regenerate.py
[NAME …]`, where trl 1.16 is installed. Names of functions below record these cases again and keep
the others.

Each trainer computes its own loss of a fixed batch, every option pinned; the loss and some of every
gradient are written to vectors/. The tests read those and need no TRL.
"""

import copy
import json
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import transformers
import trl
from datasets import Dataset
from safetensors.numpy import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    PreTrainedTokenizerFast,
)
from trl.experimental.cpo import CPOConfig, CPOTrainer
from trl.experimental.gkd import GKDTrainer
from trl.experimental.orpo import ORPOConfig, ORPOTrainer

sys.path.insert(0, str(Path(__file__).parents[3]))

from tests.core.losses.tiny import DIVERGENCES, MARGINS, SHAPE, pairs, recorded, weights

VECTORS = Path(__file__).parent / "vectors"
COMMON = {
    "use_cpu": True,
    "bf16": False,
    "fp16": False,
    "report_to": "none",
    "gradient_checkpointing": False,
}
PAIRS, EVEN_PAIRS = pairs(), pairs(prompt=(1, 1), chosen=(8, 8))
ADVANTAGES = [1.2, -0.7, 0.4, -1.5, 0.9, -0.3, 0.0, 0.6]
CORRECTED: dict[str, dict[str, Any]] = {
    "token_truncate": {
        "vllm_importance_sampling_clip_max": 1.15,
        "vllm_importance_sampling_clip_min": 0.9,
    },
    "token_mask": {
        "loss_type": "dapo",
        "vllm_importance_sampling_clip_max": 1.2,
        "vllm_importance_sampling_clip_min": 0.8,
    },
    "sequence_truncate": {"loss_type": "dr_grpo", "vllm_importance_sampling_clip_max": 1.2},
    "sequence_mask": {
        "importance_sampling_level": "sequence",
        "vllm_importance_sampling_clip_max": 1.5,
    },
    "proximal token_truncate": {
        "epsilon": 0.1,
        "epsilon_high": 0.1,
        "vllm_importance_sampling_clip_max": 1.2,
    },
    "proximal sequence_mask": {"loss_type": "bnpo", "beta": 0.04, "use_bias_correction_kl": True},
    "token_truncate off-policy": {"off_policy_mask_threshold": 0.02},
}
for _name, _options in CORRECTED.items():
    _options["vllm_importance_sampling_mode"] = next(word for word in _name.split() if "_" in word)
    _options["loss_type"] = _options.get("loss_type", "grpo")
REWARDS = [1.0, 0.0, 0.5, 2.0, 0.25, None, 0.75, 1.0]


def model(moved: float = 0.0, seed: int = 0) -> LlamaForCausalLM:
    config = LlamaConfig(
        **SHAPE, pad_token_id=0, bos_token_id=1, eos_token_id=2, tie_word_embeddings=False
    )
    built = LlamaForCausalLM(config).float()
    built.load_state_dict(
        {name: torch.from_numpy(value) for name, value in weights(moved, seed).items()}
    )
    return built


def tokenizer() -> PreTrainedTokenizerFast:
    words = Tokenizer(
        models.WordLevel({f"t{number}": number for number in range(128)}, unk_token="t3")
    )
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="t0", bos_token="t1", eos_token="t2"
    )


def padded(rows: list[list[int]], fill: int = 0, left: bool = False) -> torch.Tensor:
    longest = max(map(len, rows))
    filled = [
        [fill] * (longest - len(row)) + row if left else row + [fill] * (longest - len(row))
        for row in rows
    ]
    return torch.tensor(filled)


def masked(prompts: list[list[int]], completions: list[list[int]]) -> dict[str, torch.Tensor]:
    together = list(zip(prompts, completions, strict=True))
    return {
        "input_ids": padded([prompt + completion for prompt, completion in together]),
        "attention_mask": padded(
            [[1] * len(prompt + completion) for prompt, completion in together]
        ),
        "completion_mask": padded(
            [[0] * len(prompt) + [1] * len(completion) for prompt, completion in together]
        ),
    }


def words(ids: list[int]) -> str:
    return " ".join(f"t{token}" for token in ids)


def dataset(*columns: str) -> Dataset:
    texts = {
        name: [words(pair[name]) for pair in PAIRS] for name in ("prompt", "chosen", "rejected")
    }
    texts |= {"completion": texts["chosen"], "label": [True, False] * 2}
    return Dataset.from_dict({name: texts[name] for name in columns})


class Recorder:
    def __init__(self) -> None:
        self.losses: dict[str, Any] = {}
        self.gradients: dict[str, np.ndarray] = {}

    def record(self, name: str, trainer: Any, inputs: dict[str, Any]) -> None:
        trainer.model.train()
        trainer.current_gradient_accumulation_steps = 1
        self.record_loss(name, trainer, trainer.compute_loss(trainer.model, inputs))

    def record_loss(self, name: str, trainer: Any, loss: torch.Tensor) -> None:
        trainer.model.zero_grad()
        loss.backward()
        self.losses[name] = {"loss": loss.item()}
        for key, values in getattr(trainer, "_metrics", {"train": {}})["train"].items():
            if key.startswith(("clip_ratio", "kl", "entropy")) and len(values) == 1:
                self.losses[name][key] = float(values[0])
        for parameter, value in trainer.model.named_parameters():
            ours = parameter.replace("score.", "lm_head.")
            self.gradients[f"{name}/{ours}"] = recorded(value.grad.numpy())
        print(name, self.losses[name])


def sft(recorder: Recorder, folder: str) -> None:
    config = trl.SFTConfig(folder, loss_type="nll", packing=False, **COMMON)
    trainer = trl.SFTTrainer(
        model(), config, train_dataset=dataset("prompt", "completion"), processing_class=tokenizer()
    )
    inputs = masked([pair["prompt"] for pair in PAIRS], [pair["chosen"] for pair in PAIRS])
    labels = inputs["input_ids"].masked_fill(inputs.pop("completion_mask") == 0, -100)
    recorder.record("sft", trainer, {**inputs, "labels": labels})


def dpo(recorder: Recorder, folder: str) -> None:
    inputs = masked(
        [pair["prompt"] for pair in PAIRS] * 2,
        [pair["chosen"] for pair in PAIRS] + [pair["rejected"] for pair in PAIRS],
    )
    kinds = ["sigmoid", "hinge", "ipo", "robust", "exo_pair", "nca_pair", "apo_zero", "apo_down"]
    # TRL's own DPO heeds the smoothing of labels in these two only; of the sigmoid's see CPO below.
    for kind in kinds:
        smoothing = 0.2 if kind in ("robust", "exo_pair") else 0.0
        config = trl.DPOConfig(
            folder,
            beta=0.1,
            loss_type=[kind],
            loss_weights=[1.0],
            label_smoothing=smoothing,
            f_divergence_type="reverse_kl",
            use_weighting=False,
            ld_alpha=None,
            precompute_ref_log_probs=False,
            **COMMON,
        )
        data = dataset("prompt", "chosen", "rejected")
        trainer = trl.DPOTrainer(
            model(), model(0.02, 1), config, train_dataset=data, processing_class=tokenizer()
        )
        recorder.record(f"dpo {kind}", trainer, inputs)


def kto(recorder: Recorder, folder: str) -> None:
    prompts, completions = [pair["prompt"] for pair in PAIRS], [pair["chosen"] for pair in PAIRS]
    rotated = masked(prompts, completions[-1:] + completions[:-1])
    inputs = {
        **masked(prompts, completions),
        **{f"KL_{name}": value for name, value in rotated.items()},
    }
    config = trl.KTOConfig(
        folder,
        beta=0.1,
        loss_type="kto",
        desirable_weight=1.3,
        undesirable_weight=0.8,
        precompute_ref_log_probs=False,
        per_device_train_batch_size=4,
        **COMMON,
    )
    data = dataset("prompt", "completion", "label")
    trainer = trl.KTOTrainer(
        model(), model(0.02, 1), config, train_dataset=data, processing_class=tokenizer()
    )
    recorder.record("kto", trainer, {**inputs, "label": torch.tensor([True, False, True, False])})


def without_reference(recorder: Recorder, folder: str) -> None:
    data = dataset("prompt", "chosen", "rejected")

    def sides(chosen_pairs: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
        results = {}
        for side in ("chosen", "rejected"):
            made = masked(
                [pair["prompt"] for pair in chosen_pairs], [pair[side] for pair in chosen_pairs]
            )
            results[f"{side}_labels"] = made["input_ids"].masked_fill(
                made["completion_mask"] == 0, -100
            )
            results |= {f"{side}_{name}": made[name] for name in ("input_ids", "attention_mask")}
        return results

    config = ORPOConfig(folder, beta=0.1, **COMMON)
    recorder.record(
        "orpo",
        ORPOTrainer(model(), config, train_dataset=data, processing_class=tokenizer()),
        sides(EVEN_PAIRS),
    )
    kinds: dict[str, dict[str, Any]] = {
        "simpo": {"loss_type": "simpo", "beta": 2.0, "simpo_gamma": 0.5, "label_smoothing": 0.0},
        # DPO with a reference to which every completion is certain.
        "cpo smoothed": {"loss_type": "sigmoid", "beta": 0.1, "label_smoothing": 0.1},
    }
    for name, options in kinds.items():
        config = CPOConfig(folder, cpo_alpha=0.0, **options, **COMMON)
        recorder.record(
            name,
            CPOTrainer(model(), config, train_dataset=data, processing_class=tokenizer()),
            sides(PAIRS),
        )


def rewards(recorder: Recorder, folder: str) -> None:
    shape = LlamaConfig(**SHAPE, pad_token_id=0, bos_token_id=1, eos_token_id=2, num_labels=1)
    sides = [pair["prompt"] + pair[side] for side in ("chosen", "rejected") for pair in PAIRS]
    inputs = {
        "input_ids": padded(sides),
        "attention_mask": padded([[1] * len(row) for row in sides]),
    }
    for name, coefficient, margins in (("reward", None, None), ("reward centred", 0.01, MARGINS)):
        built = LlamaForSequenceClassification(shape).float()
        given = {parameter: torch.from_numpy(value) for parameter, value in weights().items()}
        given["score.weight"] = given.pop("lm_head.weight")[:1]
        built.load_state_dict(given)
        config = trl.RewardConfig(folder, center_rewards_coefficient=coefficient, **COMMON)
        data = dataset("prompt", "chosen", "rejected")
        trainer = trl.RewardTrainer(built, config, train_dataset=data, processing_class=tokenizer())
        recorder.record(
            name,
            trainer,
            {**inputs, **({} if margins is None else {"margin": torch.tensor(margins)})},
        )


def policy(recorder: Recorder, folder: str) -> None:
    prompts = [pair["prompt"] for pair in PAIRS for _ in range(2)]
    completions = [pair[side] for pair in PAIRS for side in ("chosen", "rejected")]
    inputs = {
        "prompt_ids": padded(prompts, left=True),
        "prompt_mask": padded([[1] * len(row) for row in prompts], left=True),
        "completion_ids": padded(completions),
        "completion_mask": padded([[1] * len(row) for row in completions]),
        "advantages": torch.tensor(ADVANTAGES),
        "num_items_in_batch": torch.tensor(sum(map(len, completions))),
    }
    data = Dataset.from_dict(
        {"prompt": [words(pair["prompt"]) for pair in PAIRS for _ in range(2)]}
    )
    shared = {
        **COMMON,
        "per_device_train_batch_size": 8,
        "gradient_accumulation_steps": 1,
        "max_completion_length": 16,
    }
    cases: dict[str, dict[str, Any]] = {
        "grpo token": {"loss_type": "grpo"},
        "grpo token kl": {"loss_type": "grpo", "beta": 0.04},
        "grpo token kl corrected": {
            "loss_type": "grpo",
            "beta": 0.04,
            "use_bias_correction_kl": True,
        },
        "bnpo": {"loss_type": "bnpo"},
        "dr_grpo": {"loss_type": "dr_grpo"},
        "dapo": {"loss_type": "dapo", "epsilon_high": 0.28},
        "grpo sequence": {
            "loss_type": "grpo",
            "importance_sampling_level": "sequence",
            "epsilon": 0.05,
            "epsilon_high": 0.06,
        },
        "dapo temperature": {"loss_type": "dapo", "temperature": 0.7},
    }
    # TRL opens the reference by the model's name; its log-probabilities are given below, of another
    # one.
    model().save_pretrained(f"{folder}/model")
    for name, options in cases.items():
        opened = LlamaForCausalLM.from_pretrained(f"{folder}/model")
        pinned = {
            "beta": 0.0,
            "epsilon": 0.2,
            "epsilon_high": 0.2,
            "importance_sampling_level": "token",
            "temperature": 1.0,
            "top_entropy_quantile": 1.0,
            "mask_truncated_completions": False,
            "num_generations": 4,
            "num_iterations": 1,
            "use_bias_correction_kl": False,
            "delta": None,
            "use_vllm": False,
            "scale_rewards": "group",
            "steps_per_generation": 1,
        }
        config = trl.GRPOConfig(folder, **{**pinned, **options}, **shared)
        trainer = trl.GRPOTrainer(
            opened, reward, config, train_dataset=data, processing_class=tokenizer()
        )
        with torch.no_grad():
            ids, mask = (
                torch.cat([inputs[f"prompt_{k}"], inputs[f"completion_{k}"]], 1)
                for k in ("ids", "mask")
            )
            keep = inputs["completion_ids"].shape[1]
            old = trainer._get_per_token_logps_and_entropies(
                fused(model(0.004, 2), trainer), ids, mask, keep
            )[0]
            reference = trainer._get_per_token_logps_and_entropies(
                fused(model(0.02, 1), trainer), ids, mask, keep
            )[0]
        recorder.record(
            name, trainer, {**inputs, "old_per_token_logps": old, "ref_per_token_logps": reference}
        )
    pinned = {
        "beta": 0.0,
        "epsilon": 0.2,
        "epsilon_high": 0.2,
        "num_generations": 4,
        "normalize_advantages": False,
    }
    config = trl.RLOOConfig(folder, **pinned, temperature=1.0, steps_per_generation=1, **shared)
    trainer = trl.RLOOTrainer(
        model(), reward, config, train_dataset=data, processing_class=tokenizer()
    )
    with torch.no_grad():
        old = trainer._get_per_token_logps_and_entropies(
            fused(model(0.004, 2), trainer), ids, mask, keep
        )[0]
    old = (old * inputs["completion_mask"]).sum(1)
    recorder.record("rloo", trainer, {**inputs, "old_logps": old})


def corrected(recorder: Recorder, folder: str) -> None:
    """What another model sampled; with "proximal", of a set that a third model was the first to
    use.
    """
    prompts = [pair["prompt"] for pair in PAIRS for _ in range(2)]
    completions = [pair[side] for pair in PAIRS for side in ("chosen", "rejected")]
    texts = [words(completion) for completion in completions]
    data = Dataset.from_dict(
        {"prompt": [words(pair["prompt"]) for pair in PAIRS for _ in range(2)]}
    )
    for name, options in CORRECTED.items():
        pinned = {
            "beta": 0.0,
            "epsilon": 0.2,
            "epsilon_high": 0.2,
            "importance_sampling_level": "token",
            "temperature": 1.0,
            "top_entropy_quantile": 1.0,
            "mask_truncated_completions": False,
            "num_generations": 4,
            "num_iterations": 1,
            "use_bias_correction_kl": False,
            "delta": None,
            "scale_rewards": "group",
            "steps_per_generation": 1,
            "off_policy_mask_threshold": None,
            "vllm_importance_sampling_clip_max": 3.0,
            "vllm_importance_sampling_clip_min": None,
            "per_device_train_batch_size": 8,
            "gradient_accumulation_steps": 1,
            "max_completion_length": 16,
        }
        config = trl.GRPOConfig(folder, **{**pinned, **options}, **COMMON)
        opened = LlamaForCausalLM.from_pretrained(f"{folder}/model")
        trainer = trl.GRPOTrainer(
            opened, reward, config, train_dataset=data, processing_class=tokenizer()
        )
        trainer.use_vllm = True
        ids = [
            torch.tensor([prompt + completion])
            for prompt, completion in zip(prompts, completions, strict=True)
        ]
        older = fused(model(0.004, 2), trainer)
        with torch.no_grad():
            sampled = [
                trainer._get_per_token_logps_and_entropies(
                    older, each, torch.ones_like(each), len(completion)
                )[0][0].tolist()
                for each, completion in zip(ids, completions, strict=True)
            ]
        made = (prompts, completions, None, texts, sampled, {}, None, None)
        trainer._generate = lambda _, made=made: made
        current = copy.deepcopy(trainer.model.state_dict())
        if name.startswith("proximal"):
            trainer.model.load_state_dict(fused(model(0.002, 3), trainer).state_dict())
        if trainer.ref_model is not None:
            trainer.ref_model.load_state_dict(fused(model(0.02, 1), trainer).state_dict())
        trainer.model.train()
        inputs = trainer._generate_and_score_completions(
            [{"prompt": text} for text in data["prompt"]]
        )
        trainer.model.load_state_dict(current)
        recorder.record(name, trainer, {**inputs, "advantages": torch.tensor(ADVANTAGES)})
        measured = trainer._metrics["train"]
        for key in (
            "sampling_logp_difference/mean",
            "sampling_logp_difference/max",
            "importance_sampling_ratio/mean",
        ):
            recorder.losses[name][key] = measured[f"sampling/{key}"][0]


def distill(recorder: Recorder, folder: str) -> None:
    """The loss function itself: the trainer calls it with temperature 1 always."""
    inputs = masked([pair["prompt"] for pair in PAIRS], [pair["chosen"] for pair in PAIRS])
    labels = inputs["input_ids"].masked_fill(inputs.pop("completion_mask") == 0, -100)[:, 1:]
    for name, (beta, temperature) in DIVERGENCES.items():
        student = model()
        with torch.no_grad():
            teacher_logits = model(0.1, 3)(**inputs).logits[:, :-1]
        loss = GKDTrainer.generalized_jsd_loss(
            student(**inputs).logits[:, :-1],
            teacher_logits,
            labels,
            beta=beta,
            temperature=temperature,
            num_items_in_batch=(labels != -100).sum(),
        )
        recorder.record_loss(name, SimpleNamespace(model=student), loss)


def reward(completions: list[str], **columns: Any) -> list[float | None]:
    return REWARDS[: len(completions)]


def fused(other: LlamaForCausalLM, trainer: Any) -> Any:
    """Another model with the head that TRL has put on its trainer's own."""
    made = copy.deepcopy(trainer.model)
    made.load_state_dict(other.state_dict())
    return made


def advantages(recorder: Recorder, folder: str) -> None:
    """What TRL makes of REWARDS in two groups of four, the second of which has one that could not
    be given.
    """
    completions = [pair[side] for pair in PAIRS for side in ("chosen", "rejected")]

    ids = [[3, 4]] * 8
    texts = [words(completion) for completion in completions]
    logprobs = [[-1.0] * len(completion) for completion in completions]

    def rollout(prompts: list[str], trainer: Any) -> dict[str, Any]:
        return {"prompt_ids": ids, "completion_ids": completions, "logprobs": logprobs}

    data = Dataset.from_dict({"prompt": ["t3 t4"] * 8})
    shared = {
        **COMMON,
        "per_device_train_batch_size": 8,
        "num_generations": 4,
        "max_completion_length": 16,
        "beta": 0.0,
    }
    kinds: dict[str, tuple[Any, Any, dict[str, Any]]] = {
        "group none": (trl.GRPOConfig, trl.GRPOTrainer, {"scale_rewards": "none"}),
        "group bessel": (trl.GRPOConfig, trl.GRPOTrainer, {"scale_rewards": "group"}),
        "leave-one-out none": (trl.RLOOConfig, trl.RLOOTrainer, {"normalize_advantages": False}),
    }
    for name, (config, trainer, options) in kinds.items():
        args = config(folder, **shared, **options)
        custom = {"rollout_func": rollout} if trainer is trl.GRPOTrainer else {}
        made = trainer(
            model(), reward, args, train_dataset=data, processing_class=tokenizer(), **custom
        )
        if not custom:
            made._generate = lambda prompts: (ids, completions, texts)
        result = made._generate_and_score_completions([{"prompt": "t3 t4"} for _ in range(8)])[
            "advantages"
        ]
        recorder.losses[f"advantages {name}"] = {"rewards": REWARDS, "advantages": result.tolist()}
        print(name, result)


def main() -> None:
    recorder, names = Recorder(), sys.argv[1:]
    versions = {library.__name__: library.__version__ for library in (torch, transformers, trl)}
    if names:
        before = json.loads((VECTORS / "trl.json").read_text())
        assert before["versions"] == versions, "record all cases with one set of libraries"
        recorder.losses, recorder.gradients = (
            before["cases"],
            load_file(VECTORS / "trl.safetensors"),
        )
    with tempfile.TemporaryDirectory() as folder:
        for record in (
            sft,
            dpo,
            kto,
            without_reference,
            rewards,
            policy,
            corrected,
            distill,
            advantages,
        ):
            if record.__name__ in names or not names:
                record(recorder, folder)
    VECTORS.mkdir(exist_ok=True)
    (VECTORS / "trl.json").write_text(
        json.dumps({"versions": versions, "cases": recorder.losses}, indent=1) + "\n"
    )
    save_file(recorder.gradients, VECTORS / "trl.safetensors")


if __name__ == "__main__":
    main()
