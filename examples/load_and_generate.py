"""Load a model by name and generate text. `python examples/load_and_generate.py MODEL [PROMPT …]`

MODEL is a run, a checkpoint, a folder in Hugging Face's layout, or a name on the hub.
"""

import sys

import lmforge

model = lmforge.load_model(sys.argv[1] if len(sys.argv) > 1 else "runs/example")
prompts = sys.argv[2:] or ["import ", "def main("]
print(f"{model.path}: {model.config.num_hidden_layers} layers, {model.tokenizer.vocab_size} tokens")

# The same seed gives the same text; temperature 0 takes the likeliest token.
for temperature in (0.0, 0.8):
    for prompt, text in zip(
        prompts,
        lmforge.generate_text(model, prompts, max_tokens=24, temperature=temperature, seed=1),
        strict=True,
    ):
        print(f"--- temperature {temperature} ---\n{prompt}{text}")
