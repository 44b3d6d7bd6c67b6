"""The options of training, and how options are declared: type, default, bounds and meaning.

Begin with `sections.py` (the sections that all training stages share), then `stage.py` (the stages,
pretraining). Those of fine-tuning and alignment are in post/options/, those of other verbs in the
`options/` of their wings. `options.py` declares, parses and validates options, `help_text.py`
explains them; neither knows any of them. For other packages: the option classes, `load.py` (recipe
and command line → the config of a stage) and `batch_plan.py`, the one place where batch sizes are
derived.

builtin_names.py registers the names that a recipe chooses by (`lmforge/core/registry.py`);
extend.py adds the options of plugins.

No torch here, so that `--help` and `--dry-run` answer at once. Options are read once, at the edge:
below the stages, functions take plain values.
"""

from lmforge.core.options import builtin_names as builtin_names
