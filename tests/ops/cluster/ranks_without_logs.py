"""Two ranks begin an attempt, and rank 1 can open no more files. Prints what each gets."""

import os
import resource
import sys
import threading
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from lmforge.core.distributed import distributed as cluster
from lmforge.core.errors import UserError
from lmforge.core.options.options import validate_options
from lmforge.core.options.stage import PretrainConfig
from lmforge.core.records.runs import Run
from lmforge.core.run import collective_timeout
from lmforge.core.stages.attempt import load_monitors, start_attempt
from lmforge.core.stages.custom_code import PluginCallbacks

if __name__ == "__main__":
    folder, watch_seconds = Path(sys.argv[1]), float(sys.argv[2])
    config = validate_options(
        PretrainConfig,
        {"run": {"folder": folder, "name": "a"}, "watch": {"timeout_seconds": watch_seconds}},
    )
    dist_ctx = cluster.init_distributed("cpu", threads=1, timeout=collective_timeout(config))
    group = dist.distributed_c10d._get_default_group()._get_backend(torch.device("cpu"))
    print("time-out", group.options._timeout == timedelta(seconds=2 * watch_seconds), flush=True)
    load_monitors(config)  # as when a run is entered
    if dist_ctx.rank_info.rank == 1:
        for thread in threading.enumerate():
            if thread.name == "joining":  # it closes its connection to the store at some time
                thread.join()
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(
            resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))) + 1, hard)
        )
        with suppress(OSError):
            while True:
                os.dup(0)
    try:
        start_attempt(config, Run.from_config(config), dist_ctx, PluginCallbacks())
    except UserError as refused:
        os.write(1, f"refused {refused}\n".encode())
    os._exit(0)
