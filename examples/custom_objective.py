"""Train with a custom objective: next-token prediction without a reward for very confident
predictions. All strategies, resume and checkpoints work with it. `python
examples/custom_objective.py PREPARED_FOLDER`
"""

import os
import sys

import lmforge

STEPS = int(os.environ.get("STEPS", "300"))


class CappedConfidence:
    """Cross-entropy without the tokens whose probability is above `cap`."""

    def __init__(self, cap: float) -> None:
        self.cap = cap

    def num_items(self, batch):
        return (batch.labels != lmforge.IGNORE_INDEX).sum().float()

    def loss(self, model, batch):
        logprobs = lmforge.label_logprobs(model, batch)  # [sequences, length], 0 where nothing is scored
        is_sure = logprobs.detach().exp() > self.cap
        total = -(logprobs * ~is_sure).sum()  # a sum: lmforge divides it once, over all ranks
        count = self.num_items(batch)
        return total, {"loss": (-logprobs.detach().sum(), count), "capped": (total.detach(), count)}


run = lmforge.train_model(
    {
        "data.folder": sys.argv[1] if len(sys.argv) > 1 else "data/example",
        "data.sequence_length": 128,
        "model.hidden_size": 96,
        "model.intermediate_size": 256,
        "model.num_hidden_layers": 3,
        "train.steps": STEPS,
        "train.compile": "off",  # for so few steps it takes longer than it saves
        "train.global_batch_size": 16,
        "schedule.warmup_steps": STEPS // 10,
        "run.name": "custom-objective",
    },
    objective=CappedConfidence(cap=0.9),
)
print(f"its metrics, val/capped among them, are in {run}/metrics.jsonl")
