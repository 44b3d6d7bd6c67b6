"""`lmforge doctor`: a line for each check of the machine; with `--parity` a table of every strategy
compared with one process. Its status says whether the machine is usable, and whether the strategies
agree.
"""

import importlib.metadata
import json
import math
import platform
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from lmforge.cli import run
from lmforge.core.distributed import host_memory
from lmforge.core.distributed.rendezvous import free_port
from lmforge.core.options.load import parse_config
from lmforge.core.options.options import to_toml
from lmforge.core.options.stage import PretrainConfig
from lmforge.core.parallel.fsdp2 import FSDP2Model
from lmforge.lab.bench import parity
from lmforge.lab.bench.parity import strategy_cases
from lmforge.ops.doctor import machine_checks
from lmforge.ops.doctor.rank_checks import (
    check_devices,
    check_network,
    compare_clocks,
    compare_versions,
    describe_host,
    neighbours,
)
from lmforge.ops.doctor.storage_checks import compare_contents
from tests.conftest import Command, Refusal
from tests.support.preloaded import preloaded

# Rank 1 is late for one strategy, for longer than the time-out.
LATE_STRATEGY = """
import os, threading
from lmforge.lab.bench import parity
from lmforge.cli import exit_process, run
def wait_for_nothing():
    threading.Event().wait(3)
strategy_cases, run_case = parity.strategy_cases, parity.run_case
def late(*arguments):
    if os.environ["RANK"] == "1":
        wait_for_nothing()
    return run_case(*arguments)
parity.strategy_cases = lambda *arguments: [case for case in strategy_cases(*arguments) if case.name == "ddp"]
parity.cases_of_other_models = lambda *arguments: []
parity.run_case = late
exit_process(run(["doctor", "--parity", "--steps", "2", "--device", "cpu", "--timeout_seconds", "1"]))
"""


@pytest.mark.slow
def test_two_ranks_agree_with_one_process_under_every_strategy(lmforge: Command) -> None:
    done = lmforge(
        "doctor", "--parity", "--processes", 2, "--steps", 2, "--output", "json", "--device", "cpu"
    )
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)
    engines = {row["options"]["engine"] for row in rows}
    assert engines == {"ddp", "fsdp1", "fsdp2"}
    assert not any(row["wrong"] for row in rows)
    mixtures = [row["options"] for row in rows if row["strategy"].startswith("mixture: ")]
    assert {options["engine"] for options in mixtures} == engines
    assert {options["expert_parallel_degree"] for options in mixtures} == {1, 2}
    assert all(row["ranks"] == 2 and row["tokens_per_second"] > 0 for row in rows)


def test_a_strategy_with_other_results_is_reported_and_sets_the_status(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ("one process, 2 micro-batches", "fsdp2 full-shard", "fsdp2 grad-shard")
    few = [case for case in strategy_cases(1, False) if case.name in names]
    assert len(few) == len(names)
    monkeypatch.setattr(parity, "strategy_cases", lambda *arguments: few)
    monkeypatch.setattr(parity, "cases_of_other_models", lambda *arguments: [])
    assert run(["doctor", "--parity", "--steps", "2", "--device", "cpu"]) == 0
    assert "strategies agree with one process within 1e-06" in capsys.readouterr().out
    monkeypatch.setattr(FSDP2Model, "gradient_divide_factor", 1.001)
    assert run(["doctor", "--parity", "--steps", "2", "--device", "cpu"]) == 1
    printed = capsys.readouterr().out
    assert (
        "WRONG, further than 1e-06 from one process, or in another dtype: fsdp2 full-shard, "
        in printed
    )
    assert "one process, 2 micro-batches," not in printed.partition("WRONG")[2]


@pytest.mark.parametrize("wrong", ["losses", "grad_norms", "weights"])
def test_a_strategy_that_becomes_nan_after_equal_values_is_wrong(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, wrong: str
) -> None:
    few, run_case = strategy_cases(1, False)[:1], parity.run_case

    def run_wrong(case: parity.ParityCase, *arguments: Any) -> parity.ParityResult:
        result = run_case(case, *arguments)
        if case.accumulation == 2 and wrong == "weights":
            [*result.weights.values()][-1].view(-1)[-1] = math.nan
        elif case.accumulation == 2:
            getattr(result, wrong)[-1] = math.nan
        return result

    monkeypatch.setattr(parity, "strategy_cases", lambda *arguments: few)
    monkeypatch.setattr(parity, "run_case", run_wrong)
    assert run(["doctor", "--parity", "--steps", "2", "--device", "cpu", "--output", "json"]) == 1
    printed = capsys.readouterr().out
    assert json.loads(printed)[0]["wrong"]
    assert "NaN" not in printed
    assert "Infinity" not in printed


def test_a_strategy_that_does_not_end_is_named_with_its_rank_and_stacks_while_it_waits(
    program: Command,
) -> None:
    done = program(LATE_STRATEGY, ranks=2)
    assert done.returncode == 0, done.stderr
    for rank in (0, 1):
        assert (
            f"lmforge: rank {rank}: ddp has not ended after 1s; the stacks of the rank:\n"
            in done.stderr
        )
    assert " in wait_for_nothing\n" in done.stderr
    assert done.stderr.count(" in _run_cases\n") >= 2, "the stack of each rank"


@pytest.mark.slow
def test_the_stacks_of_a_rank_that_waits_with_the_lock_of_python_are_printed(
    program: Command,
) -> None:
    holding = LATE_STRATEGY.replace(
        "threading.Event().wait(3)", "ctypes.PyDLL(None).sleep(3)"
    ).replace(
        "import os, threading\n",
        "import ctypes, os\nfrom lmforge.lab.bench import parity_table\nparity_table.GRACE_SECONDS"
        " = 0.5\n",
    )
    done = program(holding, ranks=2)
    assert done.returncode == 0, done.stderr
    assert " in wait_for_nothing\n" in done.stderr


@pytest.mark.slow
def test_in_bf16_the_strategies_agree_and_a_residual_stream_in_fp32_is_reported(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["doctor", "--parity", "--dtype", "bf16", "--steps", "2", "--device", "cpu"]
    assert run(words) == 0
    assert (
        "within 0.0002, 0.0039, 0.016 (loss, gradient, weights), with a residual stream in bf16"
        in capsys.readouterr().out
    )
    few = strategy_cases(1, False, torch.bfloat16)[:2]
    monkeypatch.setattr("lmforge.lab.bench.parity.strategy_cases", lambda *args: few)
    monkeypatch.setattr("lmforge.core.model.layers.to_autocast_dtype", lambda hidden: hidden)
    assert run(words) == 1
    # FSDP has no autocast: there the embedding itself is in bf16.
    assert "in another dtype: one process, 2 micro-batches\n" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_on_several_ranks_the_strategies_agree_in_bf16(lmforge: Command, ranks: int) -> None:
    words = [
        "--parity",
        "--dtype",
        "bf16",
        "--processes",
        ranks,
        "--output",
        "json",
        "--device",
        "cpu",
    ]
    done = lmforge("doctor", *words)
    assert done.returncode == 0, done.stdout + done.stderr
    assert {row["options"]["engine"] for row in json.loads(done.stdout)} == {
        "ddp",
        "fsdp1",
        "fsdp2",
    }


Findings = dict[str, dict[str, Any]]


def examined(capfd: pytest.CaptureFixture[str], *words: str, status: int = 0) -> Findings:
    capfd.readouterr()
    assert run(["doctor", "--output", "json", *words]) == status
    return {finding["name"]: finding for finding in json.loads(capfd.readouterr().out)}


def test_this_machine_is_examined(capfd: pytest.CaptureFixture[str]) -> None:
    findings = examined(capfd, "--device", "cpu")
    assert set(findings) >= {
        "python",
        "packages",
        "torch",
        "cpu",
        "compiler",
        "memory",
        "checkpoints",
    }
    assert not [finding for finding in findings.values() if finding["status"] == "fail"]
    assert run(["doctor", "--device", "cpu"]) == 0
    lines = capfd.readouterr().out.splitlines()
    assert lines[-1].startswith("lmforge can train here")
    assert [line[6:].partition("  ")[0] for line in lines[:-1]] == list(findings)


@pytest.mark.parametrize(
    ("folder", "limit", "used", "cached"),
    [
        (".", "memory.max", "memory.current", "inactive_file"),
        ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ],
    ids=["v2", "v1"],
)
def test_cached_files_of_a_container_count_as_free_memory(
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    folder: str,
    limit: str,
    used: str,
    cached: str,
) -> None:
    values = {
        limit: f"{100 * 2**20}",
        used: f"{95 * 2**20}",
        "memory.stat": f"anon {5 * 2**20}\n{cached} {90 * 2**20}",
    }
    (tmp_path / folder).mkdir(exist_ok=True)
    for name, text in values.items():
        (tmp_path / folder / name).write_text(f"{text}\n")
    monkeypatch.setattr(host_memory, "CGROUP_FOLDER", tmp_path)
    monkeypatch.setattr(machine_checks, "LOW_MEMORY_BYTES", 50 * 2**20)
    finding = examined(capfd)["memory"]
    assert (finding["status"], finding["description"]) == (
        "pass",
        "95 MiB free of 100 MiB of this container",
    )


@pytest.mark.slow
@pytest.mark.needs("a C++ compiler")
def test_a_working_compiler_is_distinguished_from_a_broken_one(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert examined(capfd)["compiler"]["status"] == "pass"
    broken = tmp_path / "g++"
    broken.write_text("#!/bin/sh\necho 'fatal error: no room' >&2\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    finding = examined(capfd)["compiler"]
    assert finding["status"] == "warn"
    assert "does not work (fatal error: no room)" in finding["description"]
    broken.unlink()
    assert "no C++ compiler" in examined(capfd)["compiler"]["description"]


def test_a_package_that_is_missing_or_too_old_is_broken(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    needs = ["torch>=99", "no-such-package>=1", "numpy>=1", 'absent; extra == "serve"']
    monkeypatch.setattr(importlib.metadata, "requires", lambda name: needs)
    finding = examined(capfd, status=1)["packages"]
    version = importlib.metadata.version("torch").partition("+")[0]
    assert (finding["status"], finding["description"]) == (
        "fail",
        f"torch {version} is not >=99, no-such-package is missing",
    )


def test_a_torch_that_cannot_be_imported_is_broken(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    finding = examined(capfd, status=1)["torch"]
    assert finding["status"] == "fail"
    assert "cannot be imported" in finding["description"]


def test_a_gpu_that_is_requested_and_absent_is_broken(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert examined(capfd, "--device", "cuda", status=1)["gpu"]["status"] == "fail"


def test_a_folder_that_cannot_be_written_is_reported(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    tmp_path.rmdir()
    finding = examined(capfd, status=1)["checkpoints"]
    assert finding["status"] == "fail"
    assert "cannot be written" in finding["description"]


def test_options_of_the_comparison_are_refused_without_it_and_others_with_it(
    refused: Refusal,
) -> None:
    assert (
        refused("doctor", "--steps", 2)
        == "--steps: applies to --parity only; add --parity, or leave it out"
    )
    assert refused("doctor", "a.toml", "--parity").startswith("--recipe: not with --parity")


@pytest.fixture
def recipe(tiny_options: list[str], tmp_path: Path) -> Path:
    """A recipe of the small run."""
    config = parse_config(PretrainConfig, [*tiny_options, "--run.folder", str(tmp_path / "runs")])
    (tmp_path / "recipe.toml").write_text(to_toml(config, changed_only=True))
    return tmp_path / "recipe.toml"


def test_ranks_give_one_answer_about_versions_data_disk_devices_and_network(
    recipe: Path, lmforge: Command
) -> None:
    done = lmforge("doctor", recipe, "--device", "cpu", "--output", "json", ranks=2)
    assert done.returncode == 0, done.stdout + done.stderr
    findings = {finding["name"]: finding for finding in json.loads(done.stdout)}
    # Not the speeds: other work on this machine may slow one of the ranks.
    for name in ("ranks", "versions", "data", "recipe", "checkpoints", "all-reduce", "all-gather"):
        assert findings[name]["status"] == "pass", findings[name]
    assert findings["ranks"]["description"].startswith("2 on 1 host met at ")
    assert "read and verified" in findings["data"]["description"]
    assert len(findings["device speed"]["values"]["tflops"]) == 2
    assert findings["all-reduce"]["values"]["bytes"][0] == 65_536


def test_data_that_is_damaged_and_a_model_that_is_not_there_fail(
    recipe: Path, tiny_tokens: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    tokens = shutil.copytree(tiny_tokens, tmp_path / "tokens")
    shard = next(tokens.glob("train*.tokens"))
    shard.write_bytes(bytes(len(shard.read_bytes())))
    words = recipe.read_text().replace(f'"{tiny_tokens}"', f'"{tokens}"')
    recipe.write_text(
        f'{words}\n[model]\nsource = "org/absent"\n' if "[model]" not in words else words
    )
    result = examined(capfd, str(recipe), "--device", "cpu", status=1)
    assert result["data"]["status"] == "fail"
    assert "does not match its checksum" in result["data"]["description"]


@pytest.mark.slow
def test_a_rank_that_does_not_answer_is_named(recipe: Path, lmforge: Command) -> None:
    variables = {
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(free_port()),
    }
    words = ["doctor", "--device", "cpu", "--timeout_seconds", 3, "--output", "json"]
    done = preloaded_rank(words, recipe.parent, RANK="0", LOCAL_RANK="0", **variables)
    assert done.returncode == 1, done.stderr
    ranks = next(finding for finding in json.loads(done.stdout) if finding["name"] == "ranks")
    assert (ranks["status"], ranks["where"]) == ("fail", ["rank 1"])
    words[words.index("--timeout_seconds") + 1] = 1
    done = preloaded_rank(words, recipe.parent, RANK="1", LOCAL_RANK="1", **variables)
    assert done.returncode == 1
    assert done.stderr.startswith(
        f"lmforge: rank 1 cannot reach localhost:{variables['MASTER_PORT']} ("
    )
    assert done.stdout == ""


def preloaded_rank(
    words: list[Any], folder: Path, **variables: str
) -> subprocess.CompletedProcess[str]:
    (output := folder / f"rank-{variables['RANK']}").mkdir()
    return preloaded().run([str(word) for word in words], output, variables=variables)


@pytest.mark.slow
def test_a_rank_that_stops_in_the_middle_is_named_and_the_rest_is_examined(
    tmp_path: Path, program: Command
) -> None:
    done = program(STOPS, ranks=2)
    findings = {finding["name"]: finding for finding in json.loads(done.stdout)}
    assert done.returncode == 1
    assert findings["ranks"]["status"] == "pass"
    assert (findings["device"]["status"], findings["device"]["where"]) == (
        "fail",
        [f"rank 1 on {platform.node()}"],
    )
    assert findings["device speed"]["status"] == "pass"
    assert findings["network"]["description"] == "not measured: not all ranks answer"


# Rank 1 says nothing any more once it has measured its device.
STOPS = """
import os, time
from lmforge.ops.doctor import examine_ranks
from lmforge.cli import exit_process, run

examine_ranks.ANSWER_SECONDS = 0.5
post = examine_ranks.RankReports.post

def post_or_stop(self, name, value):
    if "device" in name:
        time.sleep(6)
        os._exit(0)
    post(self, name, value)

if os.environ["RANK"] == "1":
    examine_ranks.RankReports.post = post_or_stop
exit_process(run(["doctor", "--device", "cpu", "--output", "json", "--timeout_seconds", "4"]))
"""


def test_what_hosts_have_in_different_versions_is_named_with_the_host() -> None:
    facts = {rank: {**describe_host(), "host": f"node{rank // 2 + 1}"} for rank in range(4)}
    assert [each.status for each in compare_versions(facts)] == ["pass"]
    facts[2]["versions"] = facts[2]["versions"] | {"torch": "1.0"}
    [finding] = compare_versions(facts)
    assert (finding.name, finding.status, finding.where) == ("versions", "fail", ("node2",))
    assert finding.description.startswith("torch 1.0 on 1 of 4 ranks, ")


def test_of_two_hosts_that_read_other_data_the_second_is_named() -> None:
    findings = [*compare_contents({"node1": {"data": "a"}, "node2": {"data": "b"}})]
    assert [(each.status, each.where) for each in findings] == [("fail", ("node2",))]
    assert findings[0].description == "data: not the same files as on node1"
    contents = {
        f"node{number}": {"data": "b" if number == 1 else "a", "model": "c"} for number in (1, 2, 3)
    }
    assert [each.where for each in compare_contents(contents)] == [("node1",)]
    contents["node1"]["data"] = "a"
    assert [each.description for each in compare_contents(contents)] == [
        "the same on 3 hosts: data, model"
    ]


def test_the_slow_link_the_slow_device_and_the_wrong_clock_are_named() -> None:
    hosts = dict(enumerate(f"node{number}" for number in range(4)))
    links = [
        [a, b, 1e7 if (a, b) == (2, 1) else 1e10] for a in range(4) for b in range(4) if a != b
    ]
    findings = list(
        check_network(
            {rank: {"links": [each for each in links if each[0] == rank]} for rank in hosts}, hosts
        )
    )
    assert [(finding.status, finding.where) for finding in findings] == [
        ("warn", ("node2 → node1",))
    ]
    names = {rank: f"rank {rank} on {host}" for rank, host in hosts.items()}
    speeds: Any = {rank: {"tflops": 10.0 if rank == 3 else 100.0} for rank in range(4)}
    assert [finding.where for finding in check_devices(speeds, names, "cuda")] == [
        ("rank 3 on node3",)
    ]
    assert compare_clocks({0: 100.0, 1: 100.01, 2: 97.0}, names).where == ("rank 2 on node2",)


@pytest.mark.parametrize("count", [2, 3, 5, 8])
def test_every_host_and_the_next_are_measured_once(count: int) -> None:
    pairs = neighbours(range(count))
    ring = {frozenset((host, (host + 1) % count)) for host in range(count)}
    assert sorted(map(sorted, pairs)) == sorted(map(sorted, ring))
    first = pairs[: count // 2]
    assert len({host for pair in first for host in pair}) == 2 * len(first), (
        "measured at the same time"
    )
