"""A custom training loop on many ranks, with FSDP2.

It has no checkpoints, logs and recovery: `train_model` has.

torchrun --nproc-per-node=2 examples/parallelize_by_hand.py PREPARED_FOLDER OUT
"""

import os
import sys

import lmforge

STEPS = int(os.environ.get("STEPS", "100"))
folder, out = sys.argv[1:3] if len(sys.argv) > 2 else ("data/example", "by-hand")


class NextToken:
    def num_items(self, batch):
        return (batch.labels != lmforge.IGNORE_INDEX).sum().float()

    def loss(self, model, batch):
        total, count = -lmforge.label_logprobs(model, batch).sum(), self.num_items(batch)
        return total, {"loss": (total.detach(), count)}


objective = NextToken()
with lmforge.init_distributed() as ranks:
    data, tokenizer = lmforge.open_data(folder, sequence_length=128), lmforge.open_tokenizer(folder)
    # On the meta device a model takes no memory; each rank then creates only its part of the
    # weights.
    module = lmforge.build_model(
        vocab_size=tokenizer.vocab_size, hidden_size=96, intermediate_size=256, num_hidden_layers=3, device="meta"
    )
    model = lmforge.parallelize(module, objective, ranks, engine="fsdp2", dtype="fp32")
    optimizer = lmforge.build_optimizer(model, "adamw", lr=2e-3)
    with lmforge.open_batches(data, batch_size=16, model=model) as loader:
        for step in range(STEPS):
            micro_batches = loader.batches(step)
            norm, metrics = lmforge.train_step(
                model, optimizer, micro_batches, objective.num_items, lr=2e-3 * min(1, (step + 1) / 10), max_grad_norm=1.0
            )
            if step % 10 == 0 or step == STEPS - 1:
                total, count = (ranks.all_reduce_sum(sum(each["loss"][part] for each in metrics)) for part in (0, 1))
                if ranks.is_rank0:
                    print(f"step {step}: loss {float(total / count):.4f}, gradient norm {float(norm):.2f}", flush=True)
    lmforge.save_model(model, out, tokenizer=tokenizer, overwrite=True)
