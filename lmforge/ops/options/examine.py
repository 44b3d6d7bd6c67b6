"""The options of the verbs that say what a thing is, and whether a machine has what a run needs:
`show` and `doctor`.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar, Literal

from lmforge.core.options.operation import JobOptions
from lmforge.core.options.options import OUTPUT_FORMAT, Options, argument, option
from lmforge.core.options.ranges import (
    DURATION,
    SEED,
)
from lmforge.core.options.sections import DEVICE, Device, ExampleFormat


class ShowOptions(Options):
    """lmforge show THING [OF]: what a recipe, model, token folder, run or checkpoint is; `show data
    OF`: its data.
    """

    thing: str = argument(
        ...,
        "recipe.toml, preset name, Hugging Face folder or name, token folder, run, checkpoint,"
        " `presets` or `data`",
    )
    of: Path | None = argument(
        None,
        "with `data`: a run, recipe or token folder, the file of a bad step, or of conversations,"
        " pairs or prompts",
    )
    tokenizer: Path | None = option(
        None, "with `data` and a file of examples: model whose tokenizer and template to use"
    )
    mask: Literal["assistant", "last", "all"] = option(
        "assistant", "with such a file: tokens in the loss, as data.mask"
    )
    format: ExampleFormat = option(
        "auto", "with such a file: format of the records, as data.format; or prompts"
    )
    fields: tuple[str, ...] = option(
        (), "with such a file: fields that have other names there, OURS=THEIRS, as data.fields"
    )
    apply_chat_template: bool = option(
        False, "with such a file: strings become turns, as data.apply_chat_template"
    )
    split_turns: bool = option(
        False, "with such a file: answers become examples of their own, as data.split_turns"
    )
    ignore_media: bool = option(
        False, "with such a file: show the text of records that hold images, as data.ignore_media"
    )
    skip_invalid: bool = option(
        False, "with such a file: leave out records that cannot be used, as data.skip_invalid"
    )
    samples: str | None = option(
        None,
        "with `data`: numbers of samples or records, FIRST:AFTER_LAST (default: the first 3, or"
        " those of a bad step)",
    )
    num_samples: int | None = option(
        None,
        "with `data` and a run, recipe or token folder: print N samples, evenly spaced over it",
        gt=0,
        le=10_000,
    )

    def problems(self) -> Iterator[str]:
        chosen = [
            name for name in ("tokenizer", "samples", "num_samples") if name in self.changed()
        ]
        if len(chosen) > 1 and chosen != ["tokenizer", "samples"]:
            yield f"--{chosen[1]}: does not go with --{chosen[0]}; leave one of them out"


class DoctorOptions(JobOptions):
    """lmforge doctor [RECIPE.toml] [--on slurm]: check machine, data and network before a run;
    --parity compares strategies.
    """

    recipe: Path | None = argument(
        None, "recipe whose data, model and checkpoint folder are checked too, on every host"
    )
    parity: bool = option(
        False, "train a small model with every strategy that fits the ranks, and compare"
    )
    coordinates: bool = option(
        False,
        "train small models like RECIPE's of several widths (completep: and depths), and compare"
        " what their modules compute",
    )
    on: Literal["local", "ssh", "slurm", "pbs", "mpi"] | None = option(  # type: ignore[assignment]
        None, "start a job that checks its hosts; takes the options of lmforge launch"
    )
    timeout_seconds: float = option(
        60.0,
        "seconds after which a rank, or a strategy of --parity, that has not ended is named",
        **DURATION,
    )
    steps: int = option(
        10, "with --parity, --coordinates: steps of each comparison", gt=1, le=10_000
    )
    compile: bool = option(False, "with --parity: compiled blocks too")
    dtype: Literal["fp32", "bf16"] = option(
        "fp32", "with --parity: compute dtype of all compared runs"
    )
    seed: int = option(0, "with --parity: seed of weights and data", **SEED)
    device: Device = DEVICE
    output: Literal["text", "json"] = OUTPUT_FORMAT

    ESSENTIAL: ClassVar[str] = (
        "recipe on nodes processes hosts parity timeout_seconds device output"
    )

    def problems(self) -> Iterator[str]:
        of_parity = ["compile", "dtype", "seed"]
        if not self.coordinates:
            of_parity.insert(0, "steps")
        ignored = [name for name in of_parity if name in self.changed()]
        if ignored and not self.parity:
            yield f"--{ignored[0]}: applies to --parity only; add --parity, or leave it out"
        if self.coordinates and (self.recipe is None or self.is_elsewhere or self.parity):
            yield (
                "--coordinates: needs a recipe, and runs here by itself; leave --parity and"
                " --on out"
            )
        if self.parity and self.recipe is not None:
            yield (
                "--recipe: not with --parity, which checks nothing but the strategies; leave one of"
                " them out"
            )
        of_jobs = [
            name
            for name in JobOptions.model_fields
            if name not in ("on", "processes", "environment")
        ]
        if not self.is_elsewhere and (
            given := [name for name in of_jobs if name in self.changed()]
        ):
            yield (
                f"--{given[0]}: applies to --on ssh, slurm, pbs and mpi only; add one of them, or"
                " leave it out"
            )
        yield from super().problems()

    @property
    def uses_ranks(self) -> bool:
        return not self.is_elsewhere

    @property
    def is_elsewhere(self) -> bool:
        """Whether other hosts are to be checked than this one."""
        return self.on not in (None, "local")
