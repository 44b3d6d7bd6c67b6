"""Rollouts sampled by `lmforge serve`: the same numbers as in process, servers that fail, and
mistakes that are refused.
"""

import json
import os
import re
import shutil
import socket
import socketserver
import stat
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import xxhash

from lmforge.cli import run as command
from lmforge.core.files.own_folders import TOKEN_NAME, make_own_folder
from lmforge.core.model.build import build_model
from lmforge.core.model.init_weights import init_weights
from lmforge.hf.export import export_folder
from lmforge.post.rl.engines.policy_weights import FOLDERS_NAME, MAX_FOLDERS
from lmforge.post.rl.engines.rollout_server import RolloutServer, ServerProblem
from lmforge.post.rl.sampler import SampleRequest, SamplingSettings
from lmforge.serve.decoding.model_loading import load_model
from lmforge.serve.decoding.sampling import SamplingParams
from tests.conftest import Command, Refusal, only_line
from tests.ops.cluster.laboratory import Laboratory
from tests.serve.conftest import KEY, Server
from tests.support.grids import parametrize
from tests.support.preloaded import preloaded
from tests.support.rounding import assert_rounding_apart, other_rounding


@pytest.fixture(scope="module")
def rollout_server(serving: Callable[..., Server], models: Path) -> Server:
    return serving(models / "noise", "--weight_updates", "--max_batch_size", 8, "--max_length", 32)


STARTED = ["--rollout.engine", "lmforge", "--rollout.engine_start"]


def by(*urls: str, engine: str = "lmforge") -> list[str]:
    return ["--rollout.engine", engine, "--rollout.engine_urls", *urls]


def numbers(run: Path) -> list[dict[str, Any]]:
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    names = ("step", "loss", "reward", "ratio", "entropy", "grad_norm", "val/reward")
    return [
        {name: record[name] for name in names if record.get(name) is not None} for record in records
    ]


def weights(run: Path) -> dict[str, torch.Tensor]:
    return load_model(run, torch.device("cpu"), torch.float32).model.state_dict()


def train_inside(words: Callable[..., list[str]], *options: object, steps: int) -> None:
    """The runs `inside`, of one process that samples itself, and `rounded`, the same with other
    rounding in training.
    """
    assert command(words("inside", *options, steps=steps)) == 0
    with other_rounding(sampling=False):
        assert command(words("rounded", *options, steps=steps)) == 0


def assert_learned_the_same(folder: Path) -> None:
    """The run `outside` is `inside`.

    Its completions were sampled in other batches, which depend on the time when requests come: the
    last bits of their log-probabilities differ.
    """
    inside, outside, rounded = (
        {record["step"]: record for record in numbers(folder / name)}
        for name in ("inside", "outside", "rounded")
    )
    assert inside.keys() == outside.keys() == rounded.keys()
    # The terms of a gradient cancel, since the advantages of a group sum to 0: its norm is small
    # beside what is rounded.
    norms, *others = (
        torch.tensor([record.pop("grad_norm") for record in records.values()]).double()
        for records in (inside, outside, rounded)
    )
    assert_rounding_apart(
        *({"gradient_norm": float((each - norms).norm() / norms.norm())} for each in others)
    )
    for step, ours in inside.items():
        if "val/reward" not in ours:
            outside[step].pop("val/reward", None)  # where it was stopped
        assert outside[step] == pytest.approx(ours, rel=2e-6, abs=2e-6)
    other_weights = weights(folder / "outside")
    for name, tensor in weights(folder / "inside").items():
        assert torch.allclose(tensor, other_weights[name], rtol=0, atol=1e-5), name


def test_twenty_steps_sampled_by_a_server_equal_those_in_process_bit_for_bit(
    grpo: Callable[..., list[str]], rollout_server: Server, tmp_path: Path
) -> None:
    assert command(grpo("inside", steps=20)) == 0
    assert command(grpo("outside", *by(rollout_server.url), steps=20)) == 0
    assert len(numbers(tmp_path / "inside")) == 20
    assert numbers(tmp_path / "inside") == numbers(tmp_path / "outside")
    theirs = weights(tmp_path / "outside")
    assert all(
        torch.equal(tensor, theirs[name]) for name, tensor in weights(tmp_path / "inside").items()
    )


@pytest.mark.slow
def test_a_policy_with_more_rows_than_its_tokenizer_has_ids_is_sampled_by_a_server(
    grpo: Callable[..., list[str]], serving: Callable[..., Server], models: Path, tmp_path: Path
) -> None:
    config = load_model(models / "noise", torch.device("cpu"), torch.float32).config
    padded = build_model(replace(config, vocab_size=320))
    export_folder(
        init_weights(padded, 1),
        padded.config,
        tmp_path / "padded",
        tokenizer_folder=models / "noise",
    )
    server = serving(tmp_path / "padded", "--weight_updates", "--max_length", 32)
    words = [
        word.replace(str(models / "noise"), str(tmp_path / "padded"))
        for word in grpo("run", *by(server.url), steps=1)
    ]
    assert command(words) == 0


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["ddp", "fsdp2"])
def test_two_ranks_that_share_servers_learn_what_one_process_does(
    engine: str,
    grpo: Callable[..., list[str]],
    rollout_server: Server,
    serving: Callable[..., Server],
    models: Path,
    lmforge: Command,
    tmp_path: Path,
) -> None:
    second = serving(
        models / "noise", "--weight_updates", "--max_batch_size", 8, "--max_length", 32
    )
    # A step that follows the size of the gradient, also where it is all rounding.
    even = ["--optimizer.eps", 1e-3]
    train_inside(grpo, *even, steps=5)
    words = grpo(
        "outside", *even, *by(rollout_server.url, second.url), "--parallel.engine", engine, steps=5
    )
    done = lmforge(*words, ranks=2)
    assert done.returncode == 0, done.stdout + done.stderr
    assert_learned_the_same(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    "split",
    ["tensor", "context", "pipeline"],
)
@pytest.mark.parametrize("loss", ["grpo", "gspo"])
def test_a_policy_that_ranks_split_learns_from_servers_what_one_process_does(
    split: str,
    loss: str,
    grpo: Callable[..., list[str]],
    rollout_server: Server,
    lmforge: Command,
    tmp_path: Path,
) -> None:
    # So that what fp32 rounds grows little in these steps.
    options = ["--optimizer.eps", 1e-3, "--optimizer.lr", 2e-4, "--rollout.loss_type", loss]
    train_inside(grpo, *options, steps=20)
    options += [*by(rollout_server.url), f"--parallel.{split}_parallel_degree", 2]
    # A pipeline needs two micro-batches.
    done = lmforge(*grpo("outside", *options, "--train.micro_batch_size", 4, steps=20), ranks=2)
    assert done.returncode == 0, done.stdout + done.stderr
    assert_learned_the_same(tmp_path)


@pytest.mark.slow
def test_in_a_pipeline_servers_get_the_weights_and_adapters_of_all_stages(
    grpo: Callable[..., list[str]], rollout_server: Server, lmforge: Command, tmp_path: Path
) -> None:
    options = ["--optimizer.eps", 1e-3, "--lora.rank", 4, "--train.micro_batch_size", 4]
    train_inside(grpo, *options, steps=3)
    words = grpo(
        "outside",
        *options,
        *by(rollout_server.url),
        "--parallel.pipeline_parallel_degree",
        2,
        steps=3,
    )
    done = lmforge(*words, ranks=2)
    assert done.returncode == 0, done.stdout + done.stderr
    assert_learned_the_same(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_a_pipeline_resumes_amid_a_set_with_the_probabilities_of_its_first_use(
    ranks: int,
    grpo: Callable[..., list[str]],
    rollout_server: Server,
    lmforge: Command,
    tmp_path: Path,
) -> None:
    """On four ranks two pipelines shard each stage."""
    options = [
        "--optimizer.eps",
        1e-3,
        "--train.micro_batch_size",
        2,
        "--schedule.name",
        "constant",
    ]
    options += [
        "--rollout.num_iterations",
        2,
        "--rollout.importance_sampling_mode",
        "token_truncate",
    ]
    train_inside(grpo, *options, steps=6)
    options += [
        *by(rollout_server.url),
        "--parallel.pipeline_parallel_degree",
        2,
        "--train.threads",
        1,
    ]
    for steps in (3, 6):
        done = lmforge(*grpo("outside", *options, steps=steps), ranks=ranks)
        assert done.returncode == 0, done.stdout + done.stderr
    assert_learned_the_same(tmp_path)


@pytest.mark.slow
def test_adapters_are_merged_into_the_weights_that_servers_get(
    grpo: Callable[..., list[str]], rollout_server: Server, lmforge: Command, tmp_path: Path
) -> None:
    options = ["--lora.rank", 4, "--optimizer.eps", 1e-3]
    train_inside(grpo, *options, steps=5)
    done = lmforge(*grpo("outside", *options, *by(rollout_server.url), steps=5))
    assert done.returncode == 0, done.stdout + done.stderr
    assert_learned_the_same(tmp_path)


# --- servers that fail ----------------------------------------------------------------------------


def change(name: str, value: object) -> Callable[[dict[str, Any]], None]:
    """A change of the first entry of a field of a choice: of "token_ids", or of a field of
    "logprobs" or "weight_versions".
    """

    def spoil(choice: dict[str, Any]) -> None:
        if name == "token_ids":
            choice["token_ids"][0] = choice["logprobs"]["content"][0]["token_id"] = value
        else:
            (choice["logprobs"]["content"] if name == "logprob" else choice["weight_versions"])[0][
                name
            ] = value

    return spoil


def append(count: int) -> Callable[[dict[str, Any]], None]:
    def spoil(choice: dict[str, Any]) -> None:
        choice["token_ids"] += [97] * count
        choice["logprobs"]["content"] += [{"token_id": 97, "logprob": -1.0}] * count
        choice["weight_versions"][-1]["end"] += count

    return spoil


def shift(choice: dict[str, Any]) -> None:
    for token in choice["logprobs"]["content"]:
        token["logprob"] -= 1.0


# How answers with sampled tokens are spoiled, and what is said of it. The policy has 261 ids, and
# 12 tokens are requested.
WRONG: dict[str, tuple[Callable[[dict[str, Any]], None], str]] = {
    "an id beyond the vocabulary": (
        change("token_ids", 261),
        "answers with the id 261, and the policy has 261 ids",
    ),
    "an id below 0": (
        change("token_ids", -1),
        "token_ids[0]: expected a number of at least 0, got -1",
    ),
    "an id of 2^70": (
        change("token_ids", 2**70),
        "token_ids[0]: expected a number below 2147483648, got 11805916207174113",
    ),
    "a token more": (append(1), "answers with 13 tokens, and at most 12 were requested"),
    "5,000 tokens": (append(4988), "answers with 5,000 tokens, and at most 12 were requested"),
    "a span below 0": (change("start", -5), "its versions are not those of each token"),
    "a span of 10^11": (change("end", 10**11), "its versions are not those of each token"),
    "half a span": (change("end", 6), "tokens without a version"),
    "a long version": (change("version", "1" * 5000), "weight_versions[0].version: "),
    "a logarithm above 0": (change("logprob", 0.5), "expected a number of at most 0.001, got 0.5"),
    "NaN": (change("logprob", float("nan")), "not valid JSON"),
    "minus infinity": (change("logprob", -1e300), "expected a number of at least -10000.0"),
    "no end": (
        lambda choice: choice.update(finish_reason="stop"),
        "its answer does not end with its first stop token",
    ),
    "two ends": (change("token_ids", 260), "its answer does not end with its first stop token"),
    "nothing": (lambda choice: choice.clear(), "token_ids: missing"),
}


@contextmanager
def faulty(url: str, fault: str | Callable[[dict[str, Any]], None]) -> Iterator[str]:
    """The address of something that stands before a server and spoils each answer with sampled
    tokens, which may be a change of its choice, or the first refusal of weights.
    """
    refused_weights = threading.Event()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            self.forward(
                urllib.request.Request(url + self.path, body, {"content-type": "application/json"})
            )

        def do_GET(self) -> None:
            self.forward(urllib.request.Request(url + self.path))

        def forward(self, request: urllib.request.Request) -> None:
            if "authorization" in self.headers:
                request.add_header("authorization", self.headers["authorization"])
            is_check = (
                request.data is not None
                and json.loads(bytes(request.data)).get("sampling_params", {}).get("max_tokens")
                == 1
            )
            try:
                with urllib.request.urlopen(request) as answer:
                    status, content = answer.status, answer.read()
            except urllib.error.HTTPError as refusal:
                status, content = refusal.code, refusal.read()
            spoils = self.path == "/inference/v1/generate" and not is_check
            if spoils and fault == "refuses":
                self.refuse_and_cut()
                return
            if (
                self.path.startswith("/pause")
                and fault == "refuses weights once"
                and not refused_weights.is_set()
            ):
                refused_weights.set()
                self.refuse_and_cut()
                return
            if spoils and fault == "hangs":
                released.wait()
            if spoils and callable(fault):
                spoiled = json.loads(content)
                fault(spoiled["choices"][0])
                content = json.dumps(spoiled).encode()
            with suppress(OSError):  # the client has left
                self.send_response(status)
                self.send_header("content-length", str(len(content)))
                for part in ("headers", "content"):
                    while spoils and fault == f"drips {part}":
                        self.wfile.write(b"x")
                        time.sleep(0.01)
                    if part == "headers":
                        self.end_headers()
                self.wfile.write(
                    content[: len(content) // 2] if spoils and fault == "cuts" else content
                )

        def refuse_and_cut(self) -> None:
            self.send_response(500)
            self.send_header("transfer-encoding", "chunked")
            self.end_headers()
            self.wfile.write(b"ff\r\nhalf a cause")

        def log_message(self, *_: object) -> None:
            """Nothing."""

    released = threading.Event()

    class Proxy(ThreadingHTTPServer):
        request_queue_size = 64  # all requests of a set come at once

    server: socketserver.BaseServer = Proxy(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        released.set()
        server.shutdown()
        thread.join()


@parametrize(
    ("fault", "words"),
    [
        ("cuts", "not valid JSON"),
        ("refuses", "its answer broke off (status 500)"),
        (change("version", "default"), "answers with other weights"),
        ("hangs", "no whole answer within 4 s"),
        (change("end", 10**11), "its versions are not those of each token"),
    ],
    fast=(0, 2),
)
def test_requests_of_a_server_that_fails_go_to_others(
    fault: str | Callable[[dict[str, Any]], None],
    words: str,
    grpo: Callable[..., list[str]],
    rollout_server: Server,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    with faulty(rollout_server.url, fault) as url:
        assert (
            command(
                grpo("run", *by(rollout_server.url, url), "--rollout.engine_timeout_seconds", 4)
            )
            == 0
        )
    printed = "".join(capfd.readouterr())
    assert re.search(f"{url}.*{re.escape(words)}", printed)
    assert "its requests go to others" in printed
    assert len(numbers(tmp_path / "run")) == 2
    for table in (tmp_path / "run" / "completions").glob("set-*"):
        assert len(table.read_text().splitlines()) == 8  # none is missing, and none is there twice


@pytest.mark.parametrize("wrong", WRONG)
def test_an_answer_that_fits_no_request_is_a_line_about_its_server(
    wrong: str, rollout_server: Server
) -> None:
    settings, (fault, words) = (
        SamplingSettings(1.0, 1.0, 261, 32, frozenset({260}), 1),
        WRONG[wrong],
    )
    with faulty(rollout_server.url, fault) as url:
        server = RolloutServer(url, "lmforge", settings, 60.0, *KEY.values())
        with pytest.raises(ServerProblem, match=f"^{url}.*{re.escape(words)}"):
            server.sample(SampleRequest(0, [97, 98], 12, 3), SamplingParams())


@pytest.mark.parametrize("part", ["headers", "content"])
def test_a_server_that_sends_a_byte_now_and_then_holds_nobody_longer_than_the_time_of_an_answer(
    part: str, rollout_server: Server
) -> None:
    settings = SamplingSettings(1.0, 1.0, 261, 32, frozenset(), 1)
    with faulty(rollout_server.url, f"drips {part}") as url:
        server = RolloutServer(url, "lmforge", settings, 0.5, *KEY.values())
        with pytest.raises(ServerProblem, match=f"^{url}: no whole answer within 0.5 s$"):
            server.sample(SampleRequest(0, [97, 98], 12, 3), SamplingParams())


def test_the_key_of_a_server_does_not_follow_a_redirect_to_another_host() -> None:
    statuses = [301, 302, 303, 307, 308]
    reached: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            reached.append(f"{self.path} {self.headers['authorization']}")
            self.send_response(statuses[len(reached) % len(statuses)])
            self.send_header("location", f"http://127.0.0.2:{server.server_port}/elsewhere")
            self.end_headers()

        do_POST = do_GET

        def log_message(self, *_: object) -> None:
            """Nothing."""

    settings = SamplingSettings(1.0, 1.0, 261, 32, frozenset(), 1)
    with ThreadingHTTPServer(("", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        asked = RolloutServer(
            f"http://127.0.0.1:{server.server_port}", "vllm", settings, 60.0, "secret"
        )
        for _ in statuses:
            for ask in (
                asked.version,
                lambda: asked.sample(SampleRequest(0, [97], 1, 0), SamplingParams()),
            ):
                with pytest.raises(
                    ServerProblem,
                    match=rf"^{asked.url}: /\S+: redirects to http://127.0.0.2:\d+/elsewhere; ",
                ):
                    ask()
        server.shutdown()
    assert reached == ["/weight_info Bearer secret", "/inference/v1/generate Bearer secret"] * len(
        statuses
    )


@pytest.mark.slow
def test_a_server_that_refuses_weights_and_is_cut_off_gets_them_again_while_a_run_samples_ahead(
    grpo: Callable[..., list[str]], rollout_server: Server, capfd: pytest.CaptureFixture[str]
) -> None:
    with faulty(rollout_server.url, "refuses weights once") as url:
        assert command(grpo("run", *by(url), "--rollout.max_staleness", 1)) == 0
    printed = "".join(capfd.readouterr())
    assert (
        f"{url}: /pause: its answer broke off (status 500); it is left out until it has the weights"
        in printed
    )
    assert f"{url}: has the current weights, and is used again" in printed


def test_tokens_of_a_version_that_there_is_not_yet_are_not_learned_from_while_a_run_samples_ahead(
    grpo: Callable[..., list[str]], rollout_server: Server, capfd: pytest.CaptureFixture[str]
) -> None:
    claims = iter(["999"])

    def claim_later_weights(choice: dict[str, Any]) -> None:
        span = choice["weight_versions"][0]
        attempt, _, version = span["version"].rpartition("-")
        span["version"] = f"{attempt}-{next(claims, version)}"

    # It is the only server, since one of several may get every request of a short run; it is taken
    # back.
    with faulty(rollout_server.url, claim_later_weights) as url:
        assert command(grpo("run", *by(url), "--rollout.max_staleness", 1)) == 0
    assert (
        f"{url}: answers with other weights than it was given; its requests go to others"
        in capfd.readouterr().err
    )


@pytest.mark.slow
def test_tables_of_completions_are_named_by_data_parallel_ranks_as_show_data_reads_them(
    grpo: Callable[..., list[str]], rollout_server: Server, lmforge: Command, tmp_path: Path
) -> None:
    words = [*by(rollout_server.url), "--parallel.tensor_parallel_degree", 2, "--train.threads", 1]
    words += ["--rollout.scale_rewards", "none"]
    done = lmforge(*grpo("run", *words, steps=2, reward="far_apart"), ranks=4)
    assert done.returncode == 1, done.stdout + done.stderr
    tables = sorted((tmp_path / "run" / "completions").glob("set-000000-*"))
    assert [table.name for table in tables] == [
        "set-000000-rank-0.jsonl",
        "set-000000-rank-1.jsonl",
    ]
    shown = lmforge("show", "data", min((tmp_path / "run" / "bad").iterdir()))
    assert shown.returncode == 0, shown.stderr
    answers = [
        json.loads(line)["completion"]
        for table in tables
        for line in table.read_text().splitlines()
    ]
    texts = [
        line for line in shown.stdout.splitlines() if line.startswith(("'", '"'))
    ]  # prompts and answers by turns
    assert texts[1::2] == [*map(repr, answers)]


def test_a_server_with_other_probabilities_is_warned_of_and_corrected_for(
    grpo: Callable[..., list[str]],
    rollout_server: Server,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    corrects = [
        "--rollout.importance_sampling_mode",
        "token_truncate",
        "--rollout.importance_sampling_clip_max",
        2.5,
    ]
    with faulty(rollout_server.url, shift) as url:
        assert (
            command(grpo("run", *by(url), *corrects, "--rollout.num_iterations", 2, steps=3)) == 0
        )
    assert capfd.readouterr().err.count("differ from the trainer's by 1.00 nats on average") == 1
    for record in map(json.loads, (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()):
        # e to the 1 is more than 2.5. The second step of a set has the probabilities of its first.
        assert record["importance_sampling_ratio"] == 2.5
        assert record["sampling_logp_difference/mean"] == pytest.approx(1.0, abs=1e-5)
        assert record["sampling_logp_difference/max"] == pytest.approx(1.0, abs=1e-4)
        assert (record["ratio"] == pytest.approx(1.0, abs=1e-5)) == (record["step"] != 2)


def test_the_difference_of_trainer_and_sampling_is_measured_at_the_first_use_of_a_set(
    grpo: Callable[..., list[str]], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert command(grpo("run", "--rollout.num_iterations", 2, steps=3)) == 0
    records = [
        json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    ]
    assert [record.get("sampling_logp_difference/max", 1.0) < 1e-4 for record in records] == [
        True,
        False,
        True,
    ]
    assert "sampling off by" in "".join(capfd.readouterr())


def test_a_server_that_a_killed_trainer_has_left_paused_samples_for_the_next_run(
    grpo: Callable[..., list[str]], rollout_server: Server
) -> None:
    assert rollout_server.ask("/pause?mode=keep", {})[0] == 200
    assert command(grpo("run", *by(rollout_server.url), steps=1)) == 0


@pytest.mark.slow
def test_weights_are_in_a_new_folder_of_the_user_alone_and_what_a_killed_trainer_left_of_its_own_is_removed(
    grpo: Callable[..., list[str]], rollout_server: Server, tmp_path: Path
) -> None:
    """Where the name of the folder could be computed, somebody has put a link to a folder of the
    user's.
    """
    theirs, thesis = tmp_path / "theirs", tmp_path / "theirs" / "chapters" / "1.tex"
    thesis.parent.mkdir(parents=True)
    thesis.write_text("years of work")
    computed = (
        Path("/dev/shm")
        / f"lmforge-weights-{xxhash.xxh3_64_hexdigest(str(tmp_path / 'run').encode())}"
    )
    computed.symlink_to(theirs)
    (tmp_path / "output").mkdir()
    try:
        process = preloaded().start(
            grpo("run", *by(rollout_server.url), steps=100_000), tmp_path / "output"
        )
        metrics, record = tmp_path / "run" / "metrics.jsonl", tmp_path / "run" / FOLDERS_NAME
        while not metrics.exists() or not metrics.read_text():
            assert process.poll() is None, process.errors.read_text()
            time.sleep(0.05)
        process.kill()
        process.wait(timeout=60)
        assert thesis.read_text() == "years of work"
        [[host, left, token]] = json.loads(record.read_text())
        assert stat.S_IMODE(Path(left).stat().st_mode) == 0o700
        # The link has the token of one, but is none; what other hosts have is not known here.
        (theirs / TOKEN_NAME).write_text(token)
        elsewhere = ["another-host", str(computed), token]
        stays = [
            host,
            str(make_own_folder(tmp_path, "stays-")[0]),
            "which its token does not allow to remove",
        ]
        record.write_text(
            json.dumps(
                [*[elsewhere] * 100, [host, left, token], [host, str(computed), token], stays]
            )
        )
        given = tmp_path / "given"
        assert (
            command(
                grpo("run", *by(rollout_server.url), "--rollout.weights_folder", given, steps=1)
            )
            == 0
        )
        assert not Path(left).exists()
        assert thesis.read_text() == "years of work"
        assert json.loads(record.read_text())[:-1] == [*[elsewhere] * (MAX_FOLDERS - 2), stays]
        assert list(given.iterdir()) == []
    finally:
        computed.unlink()


def test_a_run_ends_with_one_line_when_no_server_is_left(
    grpo: Callable[..., list[str]], models: Path, tmp_path: Path, refused: Refusal
) -> None:
    server = started(models / "noise", tmp_path)
    (tmp_path / f"victim-{server.process.pid}").touch()
    line = refused(
        *grpo("run", *by(server.url), steps=3, reward="variety_after_the_end_of_the_server"),
        status=1,
    )
    assert (
        f"rollout.engine_urls: no server has the current weights: {server.url}: nothing answers"
        in line
    )
    assert server.process.wait(timeout=60) != 0


def test_a_server_that_is_restarted_during_a_run_is_used_again_with_the_weights_of_its_step(
    grpo: Callable[..., list[str]],
    rollout_server: Server,
    models: Path,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    assert command(grpo("inside", steps=5)) == 0
    victim = started(models / "noise", tmp_path)
    (tmp_path / f"victim-{victim.process.pid}").touch()

    def restart() -> Server:
        victim.process.wait(timeout=120)
        # The second set was sampled without it.
        while (tmp_path / "calls").read_text() not in ("2", "3"):
            time.sleep(0.02)
        again = started(models / "noise", tmp_path, port=int(victim.url.rpartition(":")[2]))
        (tmp_path / "restarted").touch()
        return again

    with ThreadPoolExecutor(1) as pool:
        restarting = pool.submit(restart)
        words = grpo(
            "run",
            *by(rollout_server.url, victim.url),
            steps=5,
            reward="variety_while_a_server_is_restarted",
        )
        assert command(words) == 0
        again = restarting.result()
    printed = "".join(capfd.readouterr())
    assert re.search(f"{victim.url}: nothing answers .*; it is left out until it has them", printed)
    assert f"{victim.url}: has the current weights, and is used again" in printed
    # Its first weights are those of the first step: had it answered with them, rewards and ratios
    # would be others.
    for inside, record in zip(numbers(tmp_path / "inside"), numbers(tmp_path / "run"), strict=True):
        assert record == pytest.approx(inside, rel=1e-4, abs=1e-5)
    status, answer = again.ask("/weight_info")
    assert (status, answer["weight_version"].rpartition("-")[2]) == (200, "5")
    again.process.kill()
    assert again.process.wait(timeout=60) != 0


def started(model: Path, folder: Path, port: int = 0) -> Server:
    """A server that a test ends itself."""
    words = (
        "serve",
        model,
        "--weight_updates",
        "--max_length",
        32,
        "--port",
        port,
        "--device",
        "cpu",
        "--dtype",
        "fp32",
    )
    folder /= f"server-{port}"
    folder.mkdir()
    process = preloaded().start(words, folder)
    while "\n" not in (printed := process.out.read_text()):
        assert process.poll() is None, process.errors.read_text()
        time.sleep(0.02)
    return Server(printed.split()[0], process, *KEY.values())


# --- servers that the run starts ------------------------------------------------------------------


def addresses(run: Path) -> list[tuple[str, int]]:
    """Where the servers were that a run has started."""
    texts = [path.read_text() for path in sorted((run / "logs").glob("server-*.log"))]
    return [
        (host, int(port))
        for text in texts
        for host, port in re.findall(r"^lmforge-server (\S+) (\d+)$", text, re.M)
    ]


def listens(address: tuple[str, int]) -> bool:
    with suppress(OSError), socket.create_connection(address, timeout=5):
        return True
    return False


@pytest.mark.slow  # interpreters start
@pytest.mark.parametrize("ranks", [1, 2])
def test_servers_that_a_run_starts_sample_for_it_and_end_with_it(
    ranks: int, grpo: Callable[..., list[str]], lmforge: Command, tmp_path: Path
) -> None:
    even = ["--optimizer.eps", 1e-3]
    train_inside(grpo, *even, steps=5)
    done = lmforge(*grpo("outside", *even, *STARTED, "cpu", "cpu", steps=5), ranks=ranks)
    assert done.returncode == 0, done.stdout + done.stderr
    assert_learned_the_same(tmp_path)
    assert len(addresses(tmp_path / "outside")) == 2
    assert not any(map(listens, addresses(tmp_path / "outside")))


@pytest.mark.slow
def test_servers_that_a_run_starts_end_when_it_is_killed(
    grpo: Callable[..., list[str]], tmp_path: Path
) -> None:
    (tmp_path / "output").mkdir()
    process = preloaded().start(grpo("run", *STARTED, "cpu", steps=100_000), tmp_path / "output")
    metrics = tmp_path / "run" / "metrics.jsonl"
    while not metrics.exists() or not metrics.read_text():
        assert process.poll() is None, process.errors.read_text()
        time.sleep(0.05)
    [address] = addresses(tmp_path / "run")
    assert listens(address)
    process.kill()
    while listens(address):  # the time of the test bounds it
        time.sleep(0.05)


def kill_server(process: subprocess.Popen[str]) -> None:
    """Kill -9 the server that a run has started, when it answers, and wait until it is gone."""
    while True:  # the time of the test bounds it
        assert process.poll() is None
        for child in psutil.Process(process.pid).children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                words = child.cmdline()
                if "serve" in words and listens(
                    ("127.0.0.1", int(words[words.index("--port") + 1]))
                ):
                    child.kill()
                    child.wait()
                    return
        time.sleep(0.05)


def count_steps(run: Path) -> int:
    metrics = run / "metrics.jsonl"
    return metrics.read_text().count("\n") if metrics.exists() else 0


def wait_for_steps(run: Path, count: int) -> None:
    while count_steps(run) < count:  # the time of the test bounds it
        time.sleep(0.02)


@pytest.mark.slow
@pytest.mark.parametrize("staleness", [0, 1])
def test_a_started_server_that_is_killed_is_started_again_and_the_run_goes_on(
    staleness: int, grpo: Callable[..., list[str]], tmp_path: Path
) -> None:
    steps = 60
    words = grpo("outside", *STARTED, "cpu", "--rollout.max_staleness", staleness, steps=steps)
    process = subprocess.Popen(
        [sys.executable, "-m", "lmforge", *map(str, words)], stderr=subprocess.PIPE, text=True
    )
    wait_for_steps(tmp_path / "outside", 2)
    kill_server(process)
    _, errors = process.communicate()
    assert process.returncode == 0, errors
    assert "rollout.engine_start: cpu: its server ended with status 137" in errors
    assert "it is started again (1 of 3)" in errors
    first, second = addresses(tmp_path / "outside")
    assert first == second
    assert not listens(first)
    if not staleness:
        assert command(grpo("inside", steps=steps)) == 0
        for inside, outside in zip(
            numbers(tmp_path / "inside"), numbers(tmp_path / "outside"), strict=True
        ):
            assert outside == pytest.approx(inside, rel=1e-4, abs=1e-5)


@pytest.mark.slow
def test_a_started_server_that_ends_again_and_again_ends_the_run(
    grpo: Callable[..., list[str]], tmp_path: Path
) -> None:
    words = grpo("run", *STARTED, "cpu", "--rollout.engine_timeout_seconds", 90, steps=100_000)
    process = subprocess.Popen(
        [sys.executable, "-m", "lmforge", *map(str, words)], stderr=subprocess.PIPE, text=True
    )
    for _ in range(4):
        wait_for_steps(tmp_path / "run", count_steps(tmp_path / "run") + 1)
        kill_server(process)
    _, errors = process.communicate()
    assert process.returncode == 1
    assert re.findall(r"started again \((\d) of 3\)", errors) == ["1", "2", "3"]
    assert "it is left out, since it was started again 3 times" in errors
    assert "rollout.engine_urls: no server" in errors.splitlines()[-1]


def test_a_server_that_does_not_come_up_is_a_line_with_the_end_of_its_log(
    grpo: Callable[..., list[str]], refused: Refusal, tmp_path: Path
) -> None:
    words = [
        "--rollout.engine",
        "vllm",
        "--rollout.engine_start",
        "cpu",
        "--rollout.weights_folder",
        tmp_path / "weights",
    ]
    line = refused(*grpo("run", *words))
    assert not [*(tmp_path / "weights").iterdir()]  # the model for the server
    log = tmp_path / "run" / "logs" / "server-0.log"
    assert line.startswith("rollout.engine_start: cpu: ended with status 127 before it answered: ")
    assert line.endswith(f"vllm: command not found; its log is {log}")
    assert "vllm: command not found" in log.read_text()


@pytest.mark.slow  # ranks start
def test_a_server_that_does_not_come_up_ends_all_ranks_with_the_status_of_bad_input(
    grpo: Callable[..., list[str]], lmforge: Command, tmp_path: Path
) -> None:
    done = lmforge(
        *grpo("run", "--rollout.engine", "vllm", "--rollout.engine_start", "cpu"), ranks=2
    )
    assert done.returncode == 2
    assert only_line(done.stderr).startswith(
        "rollout.engine_start: cpu: ended with status 127 before it answered: "
    )


@pytest.fixture
def ssh_folder(laboratory: Laboratory, tmp_path: Path) -> Path:
    """A folder with an `ssh` that knows the hosts of the laboratory."""
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "ssh").write_text(
        f'#!/bin/sh\nexec {shutil.which("ssh")} -F {laboratory.ssh_config} "$@"\n'
    )
    (folder / "ssh").chmod(0o755)
    return folder


@pytest.mark.slow
def test_servers_on_other_hosts_sample_for_a_run_and_end_with_it_when_it_is_killed_too(
    grpo: Callable[..., list[str]], laboratory: Laboratory, ssh_folder: Path, tmp_path: Path
) -> None:
    assert command(grpo("inside", steps=2)) == 0
    path = f"{ssh_folder}{os.pathsep}{os.environ['PATH']}"

    def words(name: str, host: str, steps: int) -> list[str]:
        return [sys.executable, "-m", "lmforge", *grpo(name, *STARTED, f"{host}:cpu", steps=steps)]

    def serves() -> bool:
        return "lmforge serve" in laboratory.run("node2", ["ps", "axo", "args"]).stdout

    done = laboratory.run("node1", words("outside", "node2", 2), PATH=path)
    assert done.returncode == 0, done.stdout + done.stderr
    for inside, outside in zip(
        numbers(tmp_path / "inside"), numbers(tmp_path / "outside"), strict=True
    ):
        assert outside == pytest.approx(inside, rel=1e-4, abs=1e-5)
    assert [host for host, _ in addresses(tmp_path / "outside")] == [laboratory.addresses["node2"]]
    assert not serves()

    process = laboratory.start("node1", words("killed", "node2", 100_000), PATH=path)
    metrics = tmp_path / "killed" / "metrics.jsonl"
    while not metrics.exists() or not metrics.read_text():
        assert process.poll() is None
        time.sleep(0.05)
    assert serves()
    process.kill()
    process.wait()
    while serves():  # the time of the test bounds it
        time.sleep(0.05)

    refused = laboratory.run("node1", words("lost", "node7", 2), PATH=path)
    assert refused.returncode == 2
    assert "rollout.engine_start: node7:cpu: ended with status 255" in only_line(refused.stderr)


# --- bad input ------------------------------------------------------------------------------------


def test_servers_that_cannot_serve_a_run_are_refused_at_its_start(
    grpo: Callable[..., list[str]], serving: Callable[..., Server], models: Path, refused: Refusal
) -> None:
    nowhere = "http://127.0.0.1:1"
    assert f"rollout.engine_urls: {nowhere}: nothing answers" in refused(
        *grpo("nowhere", *by(nowhere))
    )
    plain = serving(models / "noise", "--max_length", 32)
    lacks = refused(*grpo("plain", *by(plain.url)))
    assert (
        f"{plain.url}: has no /weight_info; start it with lmforge serve --weight_updates" in lacks
    )
    assert "VLLM_SERVER_DEV_MODE=1" in refused(*grpo("plain", *by(plain.url, engine="vllm")))
    short = serving(models / "noise", "--weight_updates", "--max_length", 24)
    assert "this server was started with --max_length 24" in refused(*grpo("short", *by(short.url)))
    other = serving(models / "endless", "--weight_updates", "--max_length", 32)
    assert f"{other.url}: serves another model (hidden_size 262, the policy's is 32)" in refused(
        *grpo("other", *by(other.url))
    )


@pytest.mark.slow  # an interpreter starts
def test_a_server_on_a_gpu_sees_that_one_only(
    grpo: Callable[..., list[str]], refused: Refusal, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the first one that CUDA shows it, which here is none."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    line = refused(*grpo("run", *STARTED, "cuda:99"))
    assert line.startswith(
        "rollout.engine_start: cuda:99: ended with status 2 before it answered: lmforge: device ="
        " cuda: "
    )


@pytest.mark.slow
def test_a_server_gets_a_key_of_its_own_by_its_environment_and_gpus_that_the_run_may_use(
    grpo: Callable[..., list[str]],
    refused: Refusal,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """The program named vllm writes down its arguments and keys, says which GPU it sees, and
    ends.
    """
    dump = 'cat /proc/$$/cmdline > words; echo "$VLLM_API_KEY $LMFORGE_API_KEY" > keys'
    (tmp_path / "vllm").write_text(
        f'#!/bin/sh\ncd {tmp_path}; {dump}\necho "sees $CUDA_VISIBLE_DEVICES"\nexit 3\n'
    )
    (tmp_path / "vllm").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    words = grpo("run", "--rollout.engine", "vllm", "--rollout.engine_start")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,GPU-5f2a")
    assert "cuda:1: ended with status 3 before it answered: sees GPU-5f2a;" in refused(
        *words, "cuda:1"
    )
    key, same = (tmp_path / "keys").read_text().split()
    assert key == same
    assert len(key) >= 20
    assert key not in KEY.values()  # the trainer's
    files = [
        tmp_path / "words",
        *(path for path in (tmp_path / "run").rglob("*") if path.is_file()),
    ]
    assert len(files) > 2
    assert not [path for path in files if key.encode() in path.read_bytes()]
    # Never a GPU that the run may not use.
    for visible, count in (("3,GPU-5f2a", "2 GPUs"), ("", "0 GPUs")):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        line = refused(*words, "cuda:2")
        assert (
            line
            == f"rollout.engine_start: cuda:2: CUDA_VISIBLE_DEVICES = {visible!r} has {count}, and"
            " the first is cuda:0"
        )


def test_options_of_servers_need_an_engine_and_addresses(
    grpo: Callable[..., list[str]], refused: Refusal
) -> None:
    assert "rollout.engine_urls: for servers" in refused(
        *grpo("run", "--rollout.engine_urls", "http://127.0.0.1:1")
    )
    assert "rollout.engine_start: gpu1: expected cpu or cuda:NUMBER" in refused(
        *grpo("run", *STARTED, "cpu", "gpu1")
    )
    assert "give the servers' addresses in rollout.engine_urls" in refused(
        *grpo("run", "--rollout.engine", "vllm")
    )
    assert "expected http://HOST:PORT" in refused(*grpo("run", *by("127.0.0.1:8000")))


def test_on_several_ranks_one_line_says_what_a_server_lacks_and_no_rank_waits(
    grpo: Callable[..., list[str]], rollout_server: Server, lmforge: Command
) -> None:
    nowhere = "http://127.0.0.1:1"
    done = lmforge(*grpo("nowhere", *by(rollout_server.url, nowhere)), ranks=2)
    assert done.returncode == 2
    assert f"rollout.engine_urls: {nowhere}: nothing answers" in only_line(done.stderr)
