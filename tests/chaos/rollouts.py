"""Rollouts that are sampled ahead while trainer, ranks, servers and environments fail: what is lost
or learned twice?

    python -m tests.chaos.rollouts --faults 200 [--seed N] [--minutes M] [--output FILE.json]

A life is a run from its first to its last step. Two real servers sample for it behind proxies,
which spoil answers. After each attempt and at the end everything that the run has written is
compared with what the servers really said.
"""

import argparse
import json
import os
import re
import secrets
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import torch
from safetensors.torch import load_file

from lmforge.core.data.tokenizer import train_tokenizer
from lmforge.core.model.build import build_model
from lmforge.core.model.config import ModelConfig
from lmforge.core.model.init_weights import init_weights
from lmforge.core.records.runs import Run
from lmforge.hf.export import export_folder
from lmforge.serve.decoding.model_loading import load_model
from tests.chaos.processes import descendants
from tests.chaos.servers import KEY, SPOILS, Proxy, SampledSpan, Server
from tests.support.preloaded import Forked, preloaded, rank_variables

STEPS, EVERY = 16, 2
TIMEOUT_SECONDS = 6.0  # of a server
# Longer without an end is a hang: a request and its repetitions on servers that hang in turn, on a
# busy machine.
HANG_SECONDS = 90.0
KILLS = ("kill the trainer", "kill a rank")
# How often each is drawn.
KINDS = {
    **dict.fromkeys(KILLS, 6),
    "kill a server": 4,
    "halt a server": 3,
    "kill an environment": 4,
    **dict.fromkeys(SPOILS, 5),
}
TEMPLATE = (
    "{% for m in messages %}{{ '<|' + m.role + '|>' + m.content + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
USER_CODE = """
from lmforge import Environment, Reply

class Talk(Environment):
    reply_roles = ["user"]

    def reset(self, limit, prompt, **row):
        self.left = limit
        return prompt

    def step(self, message):
        self.left -= 1
        reward = len(set(message["content"])) / 10
        return Reply([{"role": "user", "content": "Again."}], reward=reward, done=not self.left)

def variety(prompts, completions):
    return [len(set(text)) / 10 for text in completions]
"""


class Life:
    """A run under `folder` of which everything is drawn by `chance`."""

    def __init__(self, material: Path, folder: Path, chance: Random, kinds: dict[str, int]) -> None:
        self._material, self._folder, self._chance, self._kinds = material, folder, chance, kinds
        self._staleness = chance.choice((1, 2, 2, 3))
        self._plays = chance.random() < 0.4  # with an environment
        self._iterations = chance.choice((1, 1, 2))
        self._ranks, self._stays = chance.choice((1, 2)), chance.random() < 0.6
        self._attempts = 0
        # Files of the journal, once their set has been learned from.
        self._learned: dict[str, bytes] = {}
        self.faults: Counter[str] = Counter()
        self.findings: list[dict[str, str]] = []
        self.run = Run(folder / "run")
        folder.mkdir()
        model = material / ("talks" if self._plays else "noise")
        self._servers = [Server(model, folder, number) for number in range(2)]
        self._proxies = [Proxy(server) for server in self._servers]

    def __str__(self) -> str:
        how = "an environment" if self._plays else "prompts"
        return (
            f"staleness {self._staleness}, {self._iterations} iterations, {how}, {self._ranks}"
            f" ranks, attempt {self._attempts}"
        )

    def lead(self, goes_on: Callable[[int], bool]) -> None:
        """Disturb the run while `goes_on`, until it is at its end; then look at what it has learned
        from.
        """
        try:
            while not self._attempted(goes_on):
                if self.findings:
                    return
                if self._attempts > 60:
                    self._find("a run that does not come to its end", "")
                    return
                if not self._stays and self._chance.random() < 0.4:
                    self._ranks = 3 - self._ranks
            self._check_journal()
            if self._stays:
                self._check_replay()
        finally:
            for proxy in self._proxies:
                proxy.close()
            for server in self._servers:
                server.kill()

    def _words(self, folder: Path) -> list[str]:
        rewards = (
            []
            if self._plays
            else ["--rollout.reward_functions", f"{self._material}/own.py:variety"]
        )
        if self._plays:
            rewards = [
                "--rollout.environment",
                f"{self._material}/own.py:Talk",
                "--rollout.temperature",
                "0.12",
            ]
        options = {
            "method": "grpo",
            "model.source": self._material / ("talks" if self._plays else "noise"),
            "data.files": self._material / "prompts.jsonl",
            "data.sequence_length": 80,
            "rollout.num_generations": 2,
            "rollout.num_iterations": self._iterations,
            "rollout.max_completion_length": 40,
            "rollout.engine": "lmforge",
            "rollout.max_staleness": self._staleness,
            "rollout.engine_timeout_seconds": TIMEOUT_SECONDS,
            "run.folder": folder,
            "run.name": "run",
            "train.steps": STEPS,
            "train.global_batch_size": 8,
            "train.device": "cpu",
            "train.dtype": "fp32",
            "train.compile": "off",
            "train.threads": 1,
            "optimizer.lr": "1e-3",
            "log.every_steps": 1,
            "validation.every_steps": 100,
            "checkpoint.every_steps": EVERY,
            "checkpoint.keep_last": 100,
            "watch.timeout_seconds": 60,
            "launch.max_restarts": 0,
        }
        words = [str(word) for option, value in options.items() for word in (f"--{option}", value)]
        return [
            "align",
            *words,
            *rewards,
            "--rollout.engine_urls",
            *(proxy.url for proxy in self._proxies),
        ]

    def _start(self, folder: Path) -> list[Forked]:
        variables = rank_variables(self._ranks) if self._ranks > 1 else [{}]
        said = self._folder / f"said-{self._attempts}"
        said.mkdir(exist_ok=True)
        return [
            preloaded().start(self._words(folder), said, variables=each | KEY) for each in variables
        ]

    # --- an attempt -------------------------------------------------------------------------------

    def _attempted(self, goes_on: Callable[[int], bool]) -> bool:
        """One attempt at the run. Whether it has come to its end."""
        self._attempts += 1
        for server in self._servers:
            server.start()
        ranks = self._start(self._folder)
        killed, deadline, drawn = "", time.monotonic() + HANG_SECONDS, set[str]()
        for proxy in self._proxies:
            proxy.begin_attempt()
        before = self._trained()
        next_fault = time.monotonic() + 0.3 * self._chance.random()
        while any(rank.poll() is None for rank in ranks):
            time.sleep(0.02)
            for server in self._servers:
                server.start_if_due()
            if time.monotonic() > deadline:
                self._find(
                    f"hang: {HANG_SECONDS:g} s after the last fault it has not ended",
                    self._said(ranks),
                )
                self._kill(ranks)
            running = self._trained() > before and all(rank.poll() is None for rank in ranks)
            if (
                killed
                or time.monotonic() < next_fault
                or not running
                or not goes_on(self.faults.total())
            ):
                continue
            next_fault = time.monotonic() + 1.2 * self._chance.random()
            kind = self._chance.choices(list(self._kinds), [*self._kinds.values()])[0]
            if self._hurt(kind, ranks):
                self.faults[kind] += 1
                drawn.add(kind)
                deadline = time.monotonic() + HANG_SECONDS
                killed = kind if kind in KILLS else ""
        self._look_over(ranks, killed, drawn)
        return {rank.poll() for rank in ranks} == {0}

    def _trained(self) -> int:
        """The lines of metrics.jsonl."""
        return (
            len(self.run.metrics_path.read_bytes().splitlines())
            if self.run.metrics_path.exists()
            else 0
        )

    def _kill(self, ranks: list[Forked]) -> None:
        for rank in ranks:
            rank.kill()

    def _hurt(self, kind: str, ranks: list[Forked]) -> bool:
        """Do one harm, if there is what it harms."""
        if kind == "kill the trainer":
            self._kill(ranks)
        elif kind == "kill a rank":
            if len(ranks) == 1:
                return False
            self._chance.choice(ranks).kill()
        elif kind == "kill a server":
            server = self._chance.choice(self._servers)
            server.kill()
            server.start_after(0.5 + 2 * self._chance.random())
        elif kind == "halt a server":
            server = self._chance.choice(self._servers)
            server.halt()
            server.start_after(8 * self._chance.random())
        elif kind == "kill an environment":
            found = [pid for rank in ranks for pid in descendants(rank.pid) if _is_environment(pid)]
            if not found:
                return False
            with suppress(ProcessLookupError):
                os.kill(self._chance.choice(found), signal.SIGKILL)
        else:
            older = self._staleness + 1 + self._chance.randrange(3)
            self._chance.choice(self._proxies).spoil(
                kind, self._chance.randint(1, 4), 3 * self._chance.random(), older
            )
        return True

    def _said(self, ranks: list[Forked]) -> str:
        logs = sorted(
            self.run.logs_folder.glob("attempt-*"),
            key=lambda path: int(path.name.rpartition("-")[2]),
        )[-1:]
        files = [file for log in logs for file in sorted(log.glob("*.log"))]
        return "\n".join(
            path.read_text(errors="replace") for rank in ranks for path in (rank.out, rank.errors)
        ) + "\n".join(file.read_text(errors="replace") for file in files)

    def _look_over(self, ranks: list[Forked], killed: str, drawn: set[str]) -> None:
        said, statuses = self._said(ranks), [rank.poll() for rank in ranks]
        if "Traceback" in re.sub(r"(?ms)^.*\.log.*$", "", said) and not killed:
            self._find("a traceback", said)
        if not killed and set(statuses) != {0}:
            # Both servers may be out at a time, or an environment be killed while it starts again:
            # one line says so, and the run can be resumed.
            by_servers = re.search(r"^lmforge: .*rollout\.engine_urls: ", said, re.M)
            by_environment = re.search(
                r"^lmforge: .*its process died while it was opened", said, re.M
            )
            causes = (
                {"kill a server", "halt a server", *SPOILS}
                if by_servers
                else {"kill an environment"}
            )
            if not ((by_servers or by_environment) and set(statuses) <= {1, 2} and drawn & causes):
                self._find(f"ended with {statuses} after {sorted(drawn)}", said)
        if killed == "kill a rank" and not re.search(
            r"^lmforge: .*(another rank was lost|rank \d+|died)", said, re.M
        ):
            self._find(f"nobody said that a rank was lost: {statuses}", said)
        if not killed:
            for proxy in self._proxies:
                # One that fails while it is left out already is not named again.
                named = [
                    line
                    for line in said.splitlines()
                    if proxy.url in line and ("go to others" in line or "left out" in line)
                ]
                words = [SPOILS[proxy.spoiled], SPOILS["a server hangs"]] if proxy.spoiled else []
                if words and not any(word in line for line in named for word in words):
                    self._find(f"{proxy.spoiled} was not named", said)
        for file in sorted((self.run.path / "rollouts").glob("set-*")):
            # A file of a set that was learned from stays as it is.
            content, of_step = (
                file.read_bytes(),
                int(file.name.split("-")[1]) * self._iterations + 1,
            )
            if self._learned.get(file.name, content) != content:
                self._find(f"{file.name} was written again after it had been learned from", said)
            if any(record["step"] >= of_step for record in self.run.read_metrics()):
                self._learned[file.name] = content

    # --- at the end -------------------------------------------------------------------------------

    def _check_journal(self) -> None:
        """Each step has learned from its own prompts, and from tokens that servers sampled with the
        versions that they have.
        """
        rows = [
            json.loads(line) for line in (self._material / "prompts.jsonl").read_text().splitlines()
        ]
        records = {record["step"]: record for record in self.run.read_metrics()}
        if sorted(records) != [*range(1, STEPS + 1)]:
            self._find(f"the steps of the run are {sorted(records)}", "")
        genuine = Counter[SampledSpan]()
        for proxy in self._proxies:
            genuine.update(proxy.sampled)
        seen: list[str] = []
        for set_index in range(STEPS // self._iterations):
            parts = self._parts_of(set_index)
            if not parts:  # before the oldest checkpoint
                continue
            rewards = [part["reward"][:, 0].unflatten(0, (self._iterations, -1)) for part in parts]
            for iteration in range(self._iterations):
                mean = torch.cat([each[iteration] for each in rewards]).nanmean().item()
                step = set_index * self._iterations + iteration + 1
                if abs(records[step].get("reward", mean) - mean) > 1e-5:
                    self._find(
                        f"step {step} learned from rewards of {records[step]['reward']}, the"
                        f" journal has {mean}",
                        "",
                    )
            for part in parts:
                for span in spans_of(part):
                    if min(span.versions) < set_index * self._iterations - self._staleness:
                        self._find(f"set {set_index} has tokens of versions {span.versions}", "")
                    if span not in genuine:
                        self._find(f"set {set_index} has tokens that no server sampled: {span}", "")
            prompts = self._prompts_of(set_index)
            groups = prompts[::2]
            if len(prompts) != 8 * self._iterations or any(
                a != b for a, b in zip(prompts[::2], prompts[1::2], strict=True)
            ):
                self._find(f"set {set_index} has the prompts {prompts}", "")
            seen += groups
        known = Counter(json.dumps(row["prompt"]) for row in rows)
        for prompt, count in Counter(seen).items():
            if count > known[prompt]:
                self._find(f"{prompt} was learned from {count} times", "")

    def _parts_of(self, set_index: int) -> list[dict[str, torch.Tensor]]:
        """The parts of the attempt that completed a set, in the order of its ranks."""
        files = list((self.run.path / "rollouts").glob(f"set-{set_index:06d}-rank-*"))
        by_ranks: dict[int, list[Path]] = {}
        for file in files:
            by_ranks.setdefault(int(file.stem.rpartition("-")[2]), []).append(file)
        complete = [sorted(each) for ranks, each in by_ranks.items() if len(each) == ranks]
        if len(complete) > 1:
            self._find(f"set {set_index} was completed twice: {complete}", "")
        if files and not complete:
            self._find(f"set {set_index} is not complete: {files}", "")
        return [load_file(file) for file in complete[0]] if complete else []

    def _prompts_of(self, set_index: int) -> list[str]:
        ranks = len(self._parts_of(set_index))
        tables = [
            self.run.path / "completions" / f"set-{set_index:06d}-rank-{rank}.jsonl"
            for rank in range(ranks)
        ]
        return [
            json.dumps(json.loads(line)["prompt"])
            for table in tables
            for line in table.read_text().splitlines()
        ]

    def _check_replay(self) -> None:
        """From the first checkpoint the journal leads to the same weights, and nothing is
        sampled.
        """
        again = self._folder / "again"
        shutil.copytree(self.run.path, again / "run")
        first, *later = Run(again / "run").checkpoint_steps()
        for step in later:
            shutil.rmtree(Run(again / "run").checkpoint_path(step))
        shutil.rmtree(again / "run" / "completions")
        self._attempts += 1
        for server in self._servers:
            server.start()
        for proxy in self._proxies:
            proxy.begin_attempt()
        ranks = self._start(again)
        deadline = time.monotonic() + HANG_SECONDS
        while any(rank.poll() is None for rank in ranks) and time.monotonic() < deadline:
            time.sleep(0.02)
        if {rank.poll() for rank in ranks} != {0}:
            self._kill(ranks)
            self._find(f"the journal could not be replayed from step {first}", self._said(ranks))
            return
        if tables := [*(again / "run" / "completions").glob("set-*")]:
            self._find(f"sampled again: {tables}", "")
        ours, theirs = (_weights(folder) for folder in (self.run.path, again / "run"))
        if any(not torch.equal(tensor, theirs[name]) for name, tensor in ours.items()):
            self._find(f"other weights after a replay from step {first}", "")

    def _find(self, what: str, said: str) -> None:
        self.findings.append({"what": what, "where": str(self), "said": said[-6000:]})
        print(f"FOUND {what} · {self}", flush=True)


def spans_of(part: dict[str, torch.Tensor]) -> list[SampledSpan]:
    """The spans of sampled tokens in a part of the journal, of completions that have kept their
    labels.
    """
    spans = []
    for labels, versions in zip(part["labels"].tolist(), part["versions"].tolist(), strict=True):
        if len(labels) != len(versions):
            continue  # one column stands for all: nothing of this part is learned from
        at = [index for index, version in enumerate(versions) if version >= 0]
        if not at or any(labels[index] == -100 for index in at):
            continue
        ends = [place for place, (left, right) in enumerate(pairwise(at), 1) if right != left + 1]
        for begin, end in pairwise([0, *ends, len(at)]):
            inside = at[begin:end]
            spans.append(
                SampledSpan(
                    tuple(labels[i] for i in inside), tuple(int(versions[i]) for i in inside)
                )
            )
    return spans


def _weights(run: Path) -> dict[str, torch.Tensor]:
    return load_model(run, torch.device("cpu"), torch.float32).model.state_dict()


def _is_environment(pid: int) -> bool:
    with suppress(OSError):
        return b"lmforge.post.environments.server" in Path(f"/proc/{pid}/cmdline").read_bytes()
    return False


def make_material(folder: Path) -> None:
    """Two models, prompts, and the user's code."""
    tokenizer = train_tokenizer([""], 261)
    tokenizer.save(folder / "tokenizer")
    (folder / "tokenizer" / "chat_template.jinja").write_text(TEMPLATE)
    torch.manual_seed(0)
    shape = {
        "vocab_size": 261,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "initializer_range": 0.4,
    }
    noise = ModelConfig(**shape, hidden_size=32, intermediate_size=48, num_hidden_layers=2)
    export_folder(
        model := init_weights(build_model(noise), 1),
        model.config,
        folder / "noise",
        tokenizer_folder=folder / "tokenizer",
    )
    talks = ModelConfig(
        vocab_size=261,
        hidden_size=262,
        intermediate_size=2,
        num_hidden_layers=1,
        num_attention_heads=1,
        head_dim=2,
    )
    model = init_weights(build_model(talks), 0)
    assistant, end = (tokenizer.token_to_id(token) for token in ("<|assistant|>", "<|end|>"))
    assert assistant is not None
    assert end is not None
    successors = dict(pairwise([assistant, *tokenizer.encode("abc"), end]))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if not name.endswith("norm.weight"):
                parameter.zero_()
        model.embeddings[0].weight.fill_diagonal_(1.0)
        for token in range(261):
            model.lm_head.weight[successors.get(token, token), token] += 1.0
    export_folder(model, model.config, folder / "talks", tokenizer_folder=folder / "tokenizer")
    (folder / "own.py").write_text(USER_CODE)
    chance = Random(1)
    rows = [
        {
            "prompt": [{"role": "user", "content": "".join(chance.choices("abcdefgh", k=7))}],
            "limit": chance.randint(1, 3),
        }
        for _ in range(400)
    ]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.chaos.rollouts", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--faults", type=int, default=200, help="so many, at least")
    parser.add_argument(
        "--seed", type=int, default=None, help="repeats a plan (default: a fresh one, printed)"
    )
    parser.add_argument(
        "--minutes", type=float, default=None, help="begin no further fault after so long"
    )
    parser.add_argument(
        "--kind", action="append", help="only faults of this kind (more than once: of these)"
    )
    parser.add_argument("--output", type=Path, default=None, help="file for the figures, as JSON")
    chosen = parser.parse_args()
    seed = chosen.seed if chosen.seed is not None else secrets.randbits(32)
    print(f"seed {seed}", flush=True)
    kinds = {kind: KINDS[kind] for kind in chosen.kind or KINDS}
    until = time.monotonic() + 60 * chosen.minutes if chosen.minutes else float("inf")
    faults, findings, lives, attempts, began = (
        Counter[str](),
        list[dict[str, Any]](),
        0,
        0,
        time.monotonic(),
    )
    with tempfile.TemporaryDirectory(prefix="chaos-", ignore_cleanup_errors=True) as folder:
        make_material(Path(folder))
        while faults.total() < chosen.faults and time.monotonic() < until:
            met = faults.total()
            life = Life(
                Path(folder), Path(folder) / f"life-{lives}", Random(f"{seed} {lives}"), kinds
            )
            life.lead(
                lambda so_far, met=met: met + so_far < chosen.faults and time.monotonic() < until
            )
            faults, lives, attempts = faults + life.faults, lives + 1, attempts + life._attempts
            findings += life.findings
            shutil.rmtree(Path(folder) / f"life-{lives - 1}", ignore_errors=True)
            print(
                f"{lives} lives ({life}): {faults.total()} of {chosen.faults} faults,"
                f" {len(findings)} findings",
                flush=True,
            )
    rows = {
        "faults": faults.total(),
        **dict(faults.most_common()),
        "lives": lives,
        "attempts": attempts,
    }
    print("\n".join(f"{name:<22}  {value}" for name, value in rows.items()))
    for each in findings:
        print(f"\nFOUND {each['what']}\n  {each['where']}\n{each['said']}")
    if chosen.output:
        record = {
            "benchmark": "chaos of rollouts",
            "seed": seed,
            "seconds": round(time.monotonic() - began),
            **rows,
        }
        chosen.output.write_text(json.dumps({**record, "findings": findings}, indent=1) + "\n")
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
