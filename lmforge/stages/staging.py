"""`data.stage_to`: the folders that a run reads, copied to each host's own disk before it begins."""

import sys
from functools import partial
from pathlib import Path

from lmforge.cluster.distributed import DistributedContext
from lmforge.config.mixture import is_remote
from lmforge.config.stage import PretrainConfig, StageConfig
from lmforge.data.shards.staged_copy import stage_folder
from lmforge.runs import parse_location
from lmforge.stages.pretrained import find_pretrained


def stage_inputs(config: StageConfig, dist_ctx: DistributedContext) -> None:
    """Copy the token folders and the model of a recipe to each host's own disk, if the recipe has data.stage_to. Every rank
    calls it. One rank copies per host, or per group of hosts that share the folder. Remote data is not copied: what is read of
    it is cached in data.cache_folder. Raises UserError on all ranks where a host has too little disk space.
    """
    if config.data.stage_to is not None:
        dist_ctx.run_once_per_folder(partial(_stage, config, config.data.stage_to), config.data.stage_to)


def _stage(config: StageConfig, stage_to: Path) -> None:
    for folder in _folders(config):
        stage_folder(stage_to, folder, partial(print, file=sys.stderr, flush=True))


def _folders(config: StageConfig) -> list[Path]:
    folders = []
    if isinstance(config, PretrainConfig):
        folders = [parse_location(source.folder) for source in config.data.all_sources if not is_remote(source.folder)]
    if config.model.source is not None and config.model.load_weights:
        pretrained = find_pretrained(config.model.source, "weights")
        folders += [pretrained.folder, *([pretrained.adapters] if pretrained.adapters else [])]
    return [folder for folder in folders if folder.is_dir()]
