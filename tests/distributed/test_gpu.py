"""What only a GPU shows, on one: strategies, offload, scoring, NCCL, host memory of saves, snapshots."""

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lmforge.bench.parity import SMALL_MODEL, ParityData
from lmforge.checkpoint.async_save import _host_tensor
from lmforge.cluster.distributed import DistributedContext, destroy_distributed
from lmforge.cluster.rank_info import RankInfo
from lmforge.config.sections import ParallelOptions
from lmforge.data.batch import Batch
from lmforge.model import build_model
from lmforge.model.config import ModelConfig
from lmforge.model.init_weights import init_weights
from lmforge.monitor.flight_recorder import recent_collectives
from lmforge.parallel.parallelize import parallelize
from lmforge.runs import Run
from lmforge.stages.reference import ReferenceModel, reference_logprobs
from tests.conftest import Command
from tests.distributed.conftest import losses

pytestmark = pytest.mark.gpu


def test_every_strategy_of_one_gpu_agrees_with_one_process(lmforge: Command) -> None:
    done = lmforge("doctor", "--parity", "--device", "cuda", "--steps", 5)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("implementation", ["fused", "foreach"])
def test_offloaded_weights_train_as_those_on_the_gpu(
    lmforge: Command, tiny_options: list[str], tmp_path: Path, implementation: str
) -> None:
    found = {}
    for offload in ("false", "true"):
        words = ["--train.device", "cuda", "--parallel.engine", "fsdp2", "--parallel.cpu_offload", offload]
        words += ["--optimizer.implementation", implementation, "--run.folder", str(tmp_path), "--run.name", offload]
        done = lmforge("pretrain", *tiny_options, *words)
        assert done.returncode == 0, done.stdout + done.stderr
        found[offload] = losses(Run(tmp_path / offload))
    assert found["true"] == pytest.approx(found["false"], rel=1e-4)


def small_model(config: ModelConfig = SMALL_MODEL, **options: Any) -> Any:
    device = torch.device("cuda", 0)
    return parallelize(
        init_weights(build_model(config, device), 0),
        reference_logprobs,
        dist_ctx=DistributedContext(RankInfo(), device, None),
        dtype=torch.bfloat16,
        options=ParallelOptions(**options),
    )


def test_scoring_long_sequences_keeps_no_matrix_of_scores() -> None:
    length, sequences = 4096, 2
    model = small_model()
    tokens = torch.zeros(sequences, length, dtype=torch.int64)
    positions = torch.arange(length).expand(sequences, -1)
    batch = Batch(tokens, tokens, positions, torch.zeros(sequences, length, dtype=torch.int32)).to(torch.device("cuda", 0))
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    ReferenceModel(model).logprobs(batch)
    scores = sequences * SMALL_MODEL.num_attention_heads * length * length * 2
    assert torch.cuda.max_memory_allocated() - before < scores


def test_a_model_with_small_heads_trains_with_dense_masks() -> None:
    config = ModelConfig(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4)
    batch = ParityData(sequences=2).batch(0, 64).to(torch.device("cuda", 0))
    assert torch.isfinite(ReferenceModel(small_model(config)).logprobs(batch)).all()


def test_collectives_of_nccl_are_in_the_report_of_a_stall() -> None:
    small_model(engine="fsdp2")  # initializes the process group of one rank
    try:
        dist.all_reduce(torch.ones(3, device="cuda"))
        torch.cuda.synchronize()
        assert "all_reduce" in {record.operation for record in recent_collectives()}
    finally:
        destroy_distributed()


def test_host_memory_for_saves_is_page_locked_and_no_larger_than_the_tensor() -> None:
    like = torch.empty(3 * 2**20 + 1, dtype=torch.uint8, device="cuda")
    copy = _host_tensor(like, page_locked=True)
    assert copy.is_pinned()
    assert copy.untyped_storage().nbytes() == like.nbytes


def test_a_run_writes_what_the_gpu_held(lmforge: Command, tiny_options: list[str], tmp_path: Path) -> None:
    words = ["--train.device", "cuda", "--log.memory_snapshot", "true", "--run.folder", str(tmp_path), "--run.name", "a"]
    done = lmforge("pretrain", *tiny_options, *words)
    assert done.returncode == 0, done.stdout + done.stderr
    (snapshot,) = (tmp_path / "a" / "logs").rglob("*.memory.pickle")
    assert pickle.loads(snapshot.read_bytes())["segments"]
