"""The samples that a pretraining recipe asks for: its sources opened, checked against each other,
and mixed.
"""

from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property

from lmforge.core.data.dataset import PackedDataset, TokenDataset, join_datasets
from lmforge.core.data.mixture import MixedDataset, Phase, proportions_of
from lmforge.core.data.shards.folder import TokenFolder
from lmforge.core.data.shards.format import SHARDS_MANIFEST
from lmforge.core.data.shards.staged_copy import find_staged
from lmforge.core.data.tokenizer import Tokenizer
from lmforge.core.errors import UserError, prefix_errors
from lmforge.core.options.mixture import (
    TokenSourceOptions,
    is_remote,
    tokens_by_length,
)
from lmforge.core.options.stage import PretrainConfig, PretrainDataOptions
from lmforge.core.records.runs import parse_location


@dataclass(frozen=True)
class TokenSources:
    """The folders of a recipe's sources, opened, all of one tokenizer."""

    config: PretrainConfig
    folders: tuple[TokenFolder, ...]

    @classmethod
    def open(cls, config: PretrainConfig) -> "TokenSources":
        """Raises UserError where a folder is damaged, or two have different tokenizers or the same
        tokens.
        """
        folders = tuple(open_source(config.data, each) for each in config.data.all_sources)
        by_tokens: dict[str, TokenFolder] = {}
        for folder in folders:
            if folder.manifest.tokenizer != folders[0].manifest.tokenizer:
                raise UserError(
                    f"{folder.path}: prepared with another tokenizer than {folders[0].path};"
                    " prepare it with that one"
                )
            if (same := by_tokens.setdefault(folder.split("train").digest, folder)) is not folder:
                raise UserError(
                    f"{folder.path}: holds the same tokens as {same.path}; name it once, with a"
                    " higher weight"
                )
        return cls(config, folders)

    @property
    def tokenizer(self) -> Tokenizer:
        return self.folders[0].tokenizer

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(source.label for source in self.config.data.all_sources)

    @property
    def folders_by_name(self) -> dict[str, str]:
        """The folder of each source of a mixture; empty where there is one folder."""
        paths = (str(folder.path) for folder in self.folders)
        return dict(zip(self.names, paths, strict=True)) if len(self.folders) > 1 else {}

    @property
    def location(self) -> str:
        return ", ".join(str(folder.path) for folder in self.folders)

    def describe(self) -> str:
        """A description of the training data, for the log."""
        length = self.config.data.sequence_length
        lines = []
        for source, folder in enumerate(self.folders):
            num_tokens = folder.split("train").num_tokens
            sequences = self._train_split(source, length).sequences_per_epoch
            masked = folder.split("train").quarantined.num_tokens
            words = (
                f", {masked:,} of them in quarantine: sequences with any of those are padding"
                if masked
                else ""
            )
            lines.append(
                f"{folder.path}: {num_tokens:,} tokens{words}, {sequences:,} sequences per epoch"
            )
        return "; ".join(lines)

    def training(self, global_batch_size: int) -> MixedDataset:
        """The samples to train on.

        Raises UserError for a source without a sequence or with too small a weight.
        """
        data = self.config.data
        phases = []
        for number, length in enumerate(data.sequence_lengths):
            phase = data.phases[number] if data.phases else None
            own = {source.label: Fraction(str(source.weight)) for source in data.all_sources}
            table = (phase and phase.weight_table) or own
            weights = {name: table.get(name, Fraction(0)) for name in self.names}
            where = f"data.phases: phase {number + 1}" if phase else "data.sources"
            with prefix_errors(where):
                # Every sample has as many tokens, so that weights of tokens and of samples are the
                # same.
                proportions = proportions_of(weights)
            num_samples = None
            if phase and phase.steps is not None:
                num_samples = phase.steps * global_batch_size
            datasets = tuple(
                self._train_split(source, length) for source in range(len(self.folders))
            )
            phases.append(Phase(num_samples, proportions, datasets))
        # The phases suffice.
        tokens_by_length(
            data.phases, self.config.train.steps, global_batch_size, data.sequence_length
        )
        seed = self.config.train.seed
        return MixedDataset(self.names, phases, unit=global_batch_size, seed=seed)

    @cached_property
    def _opened(self) -> dict[tuple[int, int], TokenDataset]:
        """The training datasets by source and sequence length, each made once."""
        return {}

    def _train_split(self, source: int, length: int) -> TokenDataset:
        key = source, length
        if key not in self._opened:
            folder = self.folders[source]
            data = self.config.data
            dataset = TokenDataset(
                folder,
                sequence_length=length,
                seed=self.config.train.seed,
                window=data.shuffle_window,
                packing=data.packing,
            )
            if folder.split("train").quarantined.num_tokens == (
                count := folder.split("train").num_tokens
            ):
                raise UserError(
                    f"{folder.path}: all of its {count:,} tokens are in quarantine; leave it out"
                )
            if count <= length:
                raise UserError(
                    f"{folder.path}: {count:,} tokens, less than one sequence of {length:,};"
                    " prepare more, or shorten it"
                )
            self._opened[key] = dataset
        return self._opened[key]

    def validation(self) -> PackedDataset:
        """The validation splits of all sources that have one, one after another.

        Raises UserError where none has.
        """
        named = dict(zip(self.names, self.folders, strict=True))
        folders = {
            name: folder for name, folder in named.items() if "validation" in folder.splits
        } or named
        length = self.config.data.sequence_length
        splits = {
            name: TokenDataset(folder, split="validation", sequence_length=length, shuffle=False)
            for name, folder in folders.items()
        }
        return join_datasets(splits) if len(named) > 1 else splits[self.names[0]]


def find_missing_folders(config: PretrainConfig) -> list[str]:
    """The recipe's folders on this machine that are not prepared yet.

    Folders in an object store are not checked.
    """
    folders = [source.folder for source in config.data.all_sources if not is_remote(source.folder)]
    return [folder for folder in folders if not (parse_location(folder) / SHARDS_MANIFEST).exists()]


def open_source(
    data: PretrainDataOptions, source: TokenSourceOptions, *, staged: bool = True
) -> TokenFolder:
    """A token folder of a recipe.

    With `staged`, the copy on this host's own disk if there is one. Raises UserError.
    """
    is_staged = staged and not is_remote(source.folder)
    return TokenFolder.open(
        find_staged(data.stage_to, parse_location(source.folder)) if is_staged else source.folder,
        quarantine=source.quarantine,
        cache_folder=data.stage_to and data.stage_to / "shards",
    )
