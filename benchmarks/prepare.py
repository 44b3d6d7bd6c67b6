"""How fast text becomes tokens: lmforge's preparation compared with `tokenizers` alone,
`datasets.map` and datatrove.

All take the same JSON lines and the same tokenizer.json. `tokenizers` encodes texts that lie in
memory, in batches, with a thread on each core: it neither reads nor writes, so it is an upper bound
for the others. lmforge reads the file, tokenizes it in processes, and writes shards with checksums
in a keyed order. `datasets.map` reads it, tokenizes it in processes, and writes Arrow; datatrove,
in an environment of its own, writes files of ids. Starting processes counts for all three. On a
busy machine CPU seconds say more than seconds: all of them keep every core at work but for starting
and ending.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from itertools import count
from pathlib import Path
from typing import Any

from lmforge.core.data.tokenizer import EOS_TOKEN, train_tokenizer
from lmforge.core.distributed.rank_info import threads_per_rank
from lmforge.text.prepare.prepare import prepare
from lmforge.text.sources.text_sources import open_text_source

BATCH_CHARACTERS = 1 << 20
DATATROVE = ("datatrove==0.10.1", "loguru==0.7.3", "orjson==3.13.0", "humanize==4.17.0")
CONTENDERS = ("tokenizers", "lmforge", "datasets.map", "datatrove")


def respelt(text: str, number: int) -> str:
    """A text with other words, made by permuting vowels and permuting consonants."""
    letters = []
    for kind, by in (("aeiou", number % len("aeiou")), ("bcdfghjklmnpqrstvwxyz", number // len("aeiou"))):
        letters.append((kind, kind[by:] + kind[:by]))
    return text.translate({ord(old): new for kind, other in letters for old, new in zip(kind, other, strict=True)})


def write_corpus(folder: Path, megabytes: int) -> int:
    """The standard library's files as JSON lines, respelt in each repetition, to so many megabytes.

    Returns the bytes of text.

    All tokenizers cache repeated words, so a corpus that is repeated unchanged would have too few
    different words.
    """
    texts = [text for unit in open_text_source("stdlib").units() for text in unit.read() if text.strip()]
    written, sample = 0, []
    (folder / "corpus").mkdir()
    for repetition in count():
        with open(folder / "corpus" / f"{repetition:03d}.jsonl", "w", encoding="utf-8") as file:
            for number, text in enumerate(texts):
                text = respelt(text, repetition)
                file.write(json.dumps({"text": text}) + "\n")
                written += len(text.encode())
                if number % 10 == repetition:
                    sample.append(text)
                if written >= megabytes * 10**6:
                    train_tokenizer(sample, 8192).save(folder / "tokenizer")
                    return written
    raise AssertionError


def corpus_files(folder: Path) -> list[Path]:
    return sorted((folder / "corpus").iterdir())


Seconds = tuple[float, float]  # wall-clock seconds and CPU seconds


def now() -> Seconds:
    """Wall-clock seconds, and CPU seconds of this process and of those that it started and waited
    for.
    """
    used = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return time.perf_counter(), sum(each.ru_utime + each.ru_stime for each in used)


def since(began: Seconds) -> Seconds:
    clock, cpu = now()
    return clock - began[0], cpu - began[1]


def run_tokenizers(folder: Path, out: Path, workers: int) -> Seconds:
    """Seconds of encoding alone."""
    os.environ["RAYON_NUM_THREADS"], os.environ["TOKENIZERS_PARALLELISM"] = str(workers), "true"
    from lmforge.core.data.tokenizer import Tokenizer

    tokenizer = Tokenizer.open(folder / "tokenizer")
    batches: list[list[str]] = [[]]
    size = 0
    for path in corpus_files(folder):
        for line in path.read_text(encoding="utf-8").splitlines():
            batches[-1].append(json.loads(line)["text"])
            size += len(batches[-1][-1])
            if size > workers * BATCH_CHARACTERS:
                batches.append([])
                size = 0
    began = now()
    for batch in batches:
        tokenizer.encode_batch(batch)
    return since(began)


def run_lmforge(folder: Path, out: Path, workers: int) -> Seconds:
    """Seconds from the file to shards."""
    began = now()
    prepare(str(folder / "corpus"), out, tokenizer=folder / "tokenizer", workers=workers)
    return since(began)


def run_datasets(folder: Path, out: Path, workers: int) -> Seconds:
    """Seconds from the file to a saved dataset of ids."""
    os.environ.update(HF_HOME=str(out / "home"), TOKENIZERS_PARALLELISM="false", HF_DATASETS_DISABLE_PROGRESS_BARS="1")
    from datasets import load_dataset
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer" / "tokenizer.json"))

    def encode(rows: dict[str, Any]) -> dict[str, Any]:
        return {"input_ids": [each.ids for each in tokenizer.encode_batch_fast(rows["text"])]}

    began = now()
    dataset = load_dataset("json", data_files=[str(path) for path in corpus_files(folder)], split="train")
    dataset = dataset.map(encode, batched=True, batch_size=200, num_proc=workers, remove_columns=["text"])
    dataset.save_to_disk(str(out / "saved"), num_proc=workers)
    return since(began)


def run_datatrove(folder: Path, out: Path, workers: int) -> Seconds:
    """Seconds from the files to files of ids, each shuffled in itself."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    from datatrove.executor.local import LocalPipelineExecutor
    from datatrove.pipeline.readers import JsonlReader
    from datatrove.pipeline.tokens import DocumentTokenizer

    began = now()
    write = DocumentTokenizer(
        str(out / "tokens"), str(folder / "tokenizer" / "tokenizer.json"), eos_token=EOS_TOKEN, batch_size=200, seed=0
    )
    read = JsonlReader(str(folder / "corpus"))
    tasks = len(corpus_files(folder))
    # Spawned by this process: what a fork server starts would not be among the processes whose CPU
    # time is counted.
    log = str(out / "log")
    LocalPipelineExecutor([read, write], tasks=tasks, workers=workers, logging_dir=log, start_method="spawn").run()
    return since(began)


RUNS = dict(zip(CONTENDERS, (run_tokenizers, run_lmforge, run_datasets, run_datatrove), strict=True))


def measure(folder: Path, names: list[str], workers: int, rounds: int) -> dict[str, list[Seconds]]:
    """Seconds of each contender in each round, each in a process of its own, one after another."""
    from setting import make_environment

    python = dict.fromkeys(names, sys.executable)
    if "datatrove" in names:
        python["datatrove"], problem = make_environment(folder / "environment", DATATROVE)
        if problem:
            raise SystemExit(f"datatrove {problem}")
    seconds: dict[str, list[Seconds]] = {name: [] for name in names}
    for _ in range(rounds):
        for name in names:
            with tempfile.TemporaryDirectory(dir=folder) as out:
                command = [python[name], __file__, "--contender", name, str(folder), str(workers), f"{out}/out"]
                ended = subprocess.run(command, capture_output=True, text=True, check=True)
            wall, cpu = map(float, ended.stdout.splitlines()[-1].split())
            seconds[name].append((wall, cpu))
    return seconds


def table(record: dict[str, Any]) -> str:
    """The record, to be read by people."""
    from setting import machine_lines

    lines = ["# Preparation beside tokenizers alone", "", *machine_lines(record["machine"]), f"- {record['what']}", ""]
    lines += [
        "| | MB of text a second | of tokenizers alone | MB a CPU second | of tokenizers alone |",
        "|---|---|---|---|---|",
    ]
    for name, row in record["contenders"].items():
        cells = []
        for of in ("second", "cpu_second"):
            speed, ratio = row[of]["megabytes"], row[of]["ratio"]
            cells.append(f"{speed['median']:.2f} ({speed['min']:.2f}–{speed['max']:.2f})")
            cells.append(f"{ratio['median']:.0%} ({ratio['min']:.0%}–{ratio['max']:.0%})")
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> int:
    arguments = sys.argv[1:]
    if arguments[:1] == ["--contender"]:
        name, folder, workers, out = arguments[1:]
        print(*RUNS[name](Path(folder), Path(out), int(workers)))
        return 0
    # Imported here, since it imports torch, which a contender's worker process would import too.
    from setting import RESULTS, machine, summarize, write_result

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=int, default=100, help="text to prepare (default: 100)")
    parser.add_argument(
        "--beside",
        nargs="+",
        default=CONTENDERS[1:3],
        choices=CONTENDERS[1:],
        help="beside tokenizers (default: all but datatrove)",
    )
    parser.add_argument("--rounds", type=int, default=3, help="measurements of each (default: 3)")
    parser.add_argument("--workers", type=int, default=threads_per_rank(1), help="processes or threads (default: the cores)")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the result (default: benchmarks/results)")
    chosen = parser.parse_args()
    if min(chosen.megabytes, chosen.rounds, chosen.workers) < 1:
        parser.error("--megabytes, --rounds, --workers: at least 1")
    environment = machine()
    with tempfile.TemporaryDirectory(prefix="prepare-") as name:
        written = write_corpus(Path(name), chosen.megabytes)
        seconds = measure(Path(name), ["tokenizers", *chosen.beside], chosen.workers, chosen.rounds)
    what = (
        f"{written / 1e6:,.0f} MB of Python code as JSON lines, a vocabulary of 8,192, {chosen.workers} processes or threads,"
        f" {chosen.rounds} rounds; median (lowest–highest)"
    )
    contenders: dict[str, Any] = {name: {} for name in seconds}
    for place, of in enumerate(("second", "cpu_second")):
        for name, rounds in seconds.items():
            ratios = [alone[place] / each[place] for alone, each in zip(seconds["tokenizers"], rounds, strict=True)]
            speeds = [written / 1e6 / each[place] for each in rounds]
            contenders[name][of] = {"megabytes": summarize(speeds), "ratio": summarize(ratios)}
    record = {"benchmark": "prepare", "machine": environment, "what": what, "contenders": contenders}
    readable = table(record)
    print(f"{readable}\n\nwritten to {write_result('prepare', record, readable, chosen.out)} and .json beside it")
    return 0


if __name__ == "__main__":
    sys.exit(main())
