"""Which sampler a run has: the trainer itself, servers, or servers that sample while it trains."""

from lmforge.config.align import AlignConfig
from lmforge.stages.alignment.async_sampling import AsyncSampler
from lmforge.stages.alignment.engines.started_servers import ServerStarter
from lmforge.stages.alignment.remote_sampling import RemoteSampler
from lmforge.stages.alignment.sampling import InProcessSampler, SamplingSettings
from lmforge.stages.attempt import RunContext
from lmforge.stages.build_model import BuiltModel
from lmforge.stages.inputs import RunInputs


def build_sampler(
    ctx: RunContext, inputs: RunInputs, built: BuiltModel, settings: SamplingSettings
) -> InProcessSampler | RemoteSampler | AsyncSampler:
    """The sampler that `rollout.engine` names. Every rank calls it. Raises UserError where a server does not start."""
    assert isinstance(ctx.config, AlignConfig)
    options, starter = ctx.config.rollout, None
    if options.engine == "in-process":
        return InProcessSampler(built.parallel_model, settings)

    def warn(line: str) -> None:
        """The console prints on rank 0 only; other ranks print to their logs."""
        if ctx.dist_ctx.is_rank0:
            ctx.console.warn(line)
        else:
            print(line, flush=True)

    if options.engine_start:
        starter = ServerStarter(ctx.config, settings, inputs.tokenizer, built.dtype, ctx.run.logs_folder)
    remote = RemoteSampler(built.parallel_model, inputs.model_config, options, settings, ctx.run.path, warn, starter)
    return AsyncSampler(remote) if options.max_staleness else remote
