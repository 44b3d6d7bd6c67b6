"""Text files → tokenizer and tokens → a trained model → generated text.

`python examples/pretrain_from_text.py FOLDER_OF_TEXT`

The run resumes when the script is started again. STEPS=20 makes it short.
"""

import os
import sys

import lmforge

STEPS = int(os.environ.get("STEPS", "300"))
text = sys.argv[1] if len(sys.argv) > 1 else "stdlib"  # the source of Python's standard library

prepared = lmforge.prepare_data(text, "data/example", vocab_size=1024)
print(f"{prepared.tokens['train']:,} tokens to train on")

run = lmforge.train_model(
    {
        "data.folder": "data/example",
        "data.sequence_length": 128,
        "model.hidden_size": 96,
        "model.intermediate_size": 256,
        "model.num_hidden_layers": 3,
        "train.steps": STEPS,
        "train.compile": "off",  # for so few steps it takes longer than it saves
        "train.global_batch_size": 16,
        "optimizer.lr": 2e-3,
        "schedule.warmup_steps": STEPS // 10,
        "run.name": "example",
    }
)

model = lmforge.load_model(run)
print(lmforge.generate_text(model, "import ", max_tokens=40)[0])
