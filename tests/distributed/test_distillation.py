"""Complete runs of distillation: the same on any ranks and from where it was stopped, and what is
refused.
"""

import json
import os
import random
import shutil
import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from lmforge.core.data.tokenizer import byte_tokenizer
from lmforge.core.distributed.distributed import init_distributed
from lmforge.core.errors import UserError
from lmforge.core.options.load import parse_config
from lmforge.core.records.runs import Run
from lmforge.core.stages.inputs import RunInputs
from lmforge.hf.pretrained import find_pretrained
from lmforge.lab.bench.bounds import FP32
from lmforge.post.distillation.stored import (
    StoredPacking,
    begin_stored,
    distilled_datasets,
    record_dtype,
)
from lmforge.post.distillation.teacher import open_distill_inputs
from lmforge.post.distillation.teacher_server import TeacherServer
from lmforge.post.options.tuning import DistillConfig
from lmforge.post.reference import chunk_checksum, chunk_paths
from lmforge.post.rl.engines.rollout_server import ServerProblem
from tests.conftest import Command, Refusal
from tests.distributed.conftest import Recipe, losses, run_cases, weights
from tests.serve.conftest import Server, serving  # noqa: F401 - a fixture
from tests.support.grids import parametrize

STEPS = 4
PADDING = 7  # ids more in the teacher's head
SAMPLED = (
    "--distill.lmbda",
    0.5,
    "--data.packing",
    "none",
    "--distill.max_completion_length",
    12,
    "--train.seed",
    4,
)
RECORD = record_dtype(8)


def stored(folder: Path, k: int = 8) -> tuple[object, ...]:
    return "--distill.logprobs", folder, "--distill.top_k", k


def drawn(folder: Path) -> tuple[object, ...]:
    return *stored(folder), "--distill.stored", "sampled", "--distill.beta", 0


@dataclass(frozen=True)
class World:
    """Where everything is: a student, a teacher of the same tokenizer, conversations, and runs by
    name.
    """

    folder: Path
    slow: dict[int, list[list[str]]] = field(default_factory=dict)

    def run(self, name: str) -> Run:
        """A finished run; those of slow tests are made when the first of them is used."""
        if not (self.folder / name).exists():
            for ranks, lines in self.slow.items():
                run_cases(ranks, lines, self.folder)
        return Run(self.folder / name)

    def words(
        self,
        name: str,
        *more: object,
        teacher: str = "teacher",
        steps: int = STEPS,
        verb: str = "distill",
    ) -> list[str]:
        chosen = {
            "model.source": self.folder / "student",
            "run.folder": self.folder,
            "run.name": name,
            "data.files": self.folder / "chats.jsonl",
            "data.folder": self.folder / "examples",
            "data.sequence_length": 64,
            "train.steps": steps,
            "train.global_batch_size": 12,
            "train.dtype": "fp32",
            "train.compile": "off",
            "train.device": "cpu",
            "train.threads": 1,
            "optimizer.lr": 2e-3,
            # A step that follows the size of the gradient: see the recipe fixture.
            "optimizer.eps": 1e-3,
            "schedule.name": "constant",
            "log.every_steps": 1,
            "checkpoint.every_steps": 3,
            "validation.sequences": 4,
        }
        if verb == "distill":
            chosen |= {"distill.teacher": self.folder / teacher, "distill.kd_ratio": 0.7}
        return [
            verb,
            *(str(word) for pair in chosen.items() for word in (f"--{pair[0]}", pair[1])),
            *map(str, more),
        ]


@pytest.fixture(scope="module")
def world(recipe: Recipe, lmforge: Command, tmp_path_factory: pytest.TempPathFactory) -> World:
    folder = tmp_path_factory.mktemp("distillation")
    world, chance = World(folder), random.Random(1)
    with (folder / "chats.jsonl").open("w") as file:
        for _ in range(160):
            one, other = chance.sample(("apple", "bread", "chair", "door", "engine", "flute"), 2)
            question = {"role": "user", "content": f"Which is first, {one} or {other}?"}
            file.write(
                json.dumps(
                    {"messages": [question, {"role": "assistant", "content": min(one, other)}]}
                )
                + "\n"
            )
    larger = ("--model.hidden_size", "48", "--model.num_hidden_layers", "4", "--train.steps", "12")
    run_cases(1, [recipe(folder, "student"), recipe(folder, "teacher", *larger)], folder)
    assert lmforge("export", folder / "teacher", folder / "padded").returncode == 0
    pad_vocabulary(folder / "padded")
    alone = [
        world.words("online"),
        world.words("online padded", teacher="padded", steps=2),
        world.words("text", "--distill.kd_ratio", 0, steps=2),
        world.words("sft", steps=2, verb="sft"),
        # Stopped after three steps, and continued.
        world.words("online resumed", "--train.steps", 3),
        world.words("online resumed"),
        world.words("stored all", *stored(folder / "all", 10_000), steps=2),
        # The second run computes what the first has written no more, and continues with what is
        # missing.
        world.words("stored", *stored(folder / "few"), "--train.steps", 1),
        world.words("drawn", *drawn(folder / "draws")),
        world.words("sampled", *SAMPLED, "--log.predict", "true"),
    ]
    run_cases(1, alone, folder)
    (folder / "few" / "train" / "000000000.npy").unlink()
    shutil.copytree(folder / "draws", folder / "draws continued")
    (folder / "draws continued" / "train" / "000000064.npy").unlink()
    context = ("--parallel.context_parallel_degree", 2)
    tensor = ("--parallel.tensor_parallel_degree", 2)
    two = [
        world.words("drawn fsdp2", *drawn(folder / "draws fsdp2"), *context, steps=2),
        world.words("stored", *stored(folder / "few")),
        world.words("sampled fsdp2", *SAMPLED, steps=2),
        world.words("online fsdp2"),
        world.words("online padded tensor", *tensor, teacher="padded", steps=2),
    ]
    run_cases(2, two, folder)
    world.slow[1] = [
        world.words("reverse", "--distill.beta", 1, "--distill.temperature", 2, "--lora.rank", 4),
        world.words("sampled resumed", *SAMPLED, "--train.steps", 3),
        world.words("sampled resumed", *SAMPLED),
    ]
    world.slow[2] = [
        world.words("drawn tensor", *drawn(folder / "draws continued"), *tensor, steps=2),
        world.words("stored tensor", *stored(folder / "tensor"), *tensor, steps=2),
        world.words("online ddp", "--parallel.engine", "ddp", steps=2),
        world.words("online fsdp1", "--parallel.engine", "fsdp1", steps=2),
        world.words("online tensor", *tensor),
        world.words("online context", *context, steps=2),
    ]
    return world


def pad_vocabulary(folder: Path) -> None:
    """Give the model of a Hugging Face folder more ids, of which its head is very sure."""
    [file], config = folder.glob("*.safetensors"), json.loads((folder / "config.json").read_text())
    tensors = load_file(file)
    for name in {"model.embed_tokens.weight", "lm_head.weight"} & tensors.keys():
        tensors[name] = torch.cat(
            [tensors[name], torch.full((PADDING, tensors[name].shape[1]), 5.0)]
        )
    save_file(tensors, file, {"format": "pt"})
    config["vocab_size"] += PADDING
    (folder / "config.json").write_text(json.dumps(config))


def test_a_line_warns_where_what_is_stored_is_little_of_the_teacher(world: World) -> None:
    logs = {name: world.run(name).log_path(1, 0).read_text() for name in ("stored", "stored all")}
    assert "likeliest tokens hold 0." in logs["stored"]
    assert "likeliest tokens hold" not in logs["stored all"]


def test_a_run_that_samples_is_not_predicted_and_says_so_where_it_is_asked(world: World) -> None:
    assert (
        "predicted  distill.lmbda = 0.5 is not predicted"
        in world.run("sampled").log_path(1, 0).read_text()
    )
    assert "predicted  " not in world.run("text").log_path(1, 0).read_text()


@parametrize(
    ("name", "elsewhere"),
    [
        ("online", "online fsdp2"),
        ("online", "online padded"),
        ("online", "online padded tensor"),
        ("online", "stored all"),
        ("drawn", "drawn fsdp2"),
        ("online", "online ddp"),
        ("online", "online fsdp1"),
        ("online", "online tensor"),
        ("online", "online context"),
        ("stored", "stored tensor"),
        ("drawn", "drawn tensor"),
    ],
    fast=range(5),
)
def test_ranks_and_ids_that_pad_a_teacher_do_not_show_in_the_losses(
    world: World, name: str, elsewhere: str
) -> None:
    theirs = losses(world.run(elsewhere))
    assert set(theirs) == set(range(1, max(theirs) + 1))
    for step, loss in theirs.items():
        assert loss == pytest.approx(losses(world.run(name))[step], rel=2 * FP32.loss), step


@parametrize("name", ["online", "sampled"], fast=(0,))
def test_stopped_and_continued_a_distillation_ends_in_the_same_bits(
    world: World, name: str
) -> None:
    assert losses(world.run(f"{name} resumed")) == losses(world.run(name))
    theirs = weights(world.run(name))
    assert all(
        torch.equal(value, theirs[tensor])
        for tensor, value in weights(world.run(f"{name} resumed")).items()
    )


def test_a_fraction_of_batches_has_answers_that_the_student_samples_the_same_on_any_ranks(
    world: World,
) -> None:
    one, text = losses(world.run("sampled")), losses(world.run("sampled"), "lm_loss")
    assert 0 < len(text) < len(one) == STEPS, "no batch, or every batch, is of the data"
    others = losses(world.run("sampled fsdp2"))
    assert others == pytest.approx({step: one[step] for step in others}, rel=FP32.loss)
    assert losses(world.run("sampled"), "kd_loss")[STEPS] > 0


def test_what_is_stored_of_a_teacher_is_computed_once_and_continued_where_it_was_stopped(
    world: World,
) -> None:
    logs = [
        (world.run("stored").path / "logs" / f"attempt-{n}" / "rank-0.log").read_text()
        for n in (1, 2)
    ]
    assert [log.count("computing") for log in logs] == [2, 1]
    assert losses(world.run("stored"))[STEPS] < losses(world.run("stored"))[1]


def test_64_stored_tokens_take_less_than_a_50th_of_32000_logits_in_fp32() -> None:
    assert record_dtype(64).itemsize == 516 <= 0.02 * 4 * 32_000


def test_stored_files_have_what_is_scored_and_nothing_else(world: World) -> None:
    for path in (world.folder / "few").glob("*/*.npy"):
        counts, records, checksum = parts_of(path)
        assert counts.sum() == len(records)
        assert len(checksum) == 16


def parts_of(path: Path) -> tuple[np.ndarray, np.ndarray, bytes]:
    """A stored file: counts by sequence, records of tokens, and the checksum."""
    content = path.read_bytes()
    return (
        np.frombuffer(content[:256], "<i4").copy(),
        np.frombuffer(content[256:-16], RECORD).copy(),
        content[-16:],
    )


@parametrize(
    ("by", "elsewhere"),
    [("drawn fsdp2", "draws fsdp2"), ("drawn tensor", "draws continued")],
    fast=(0,),
)
def test_the_same_tokens_are_drawn_on_any_ranks_and_in_a_pass_that_continues(
    world: World, by: str, elsewhere: str
) -> None:
    assert world.run(by).read_metrics()
    paths = sorted((world.folder / "draws").glob("*/*.npy"))
    assert len(paths) > 2
    for path in paths:
        theirs = world.folder / elsewhere / path.parent.name / path.name
        one, other = parts_of(path)[1], parts_of(theirs)[1]
        assert np.array_equal(one["ids"], other["ids"])
        assert one["logprobs"] == pytest.approx(other["logprobs"], abs=1e-4)


def test_drawn_tokens_take_the_bytes_of_as_many_likeliest_ones_and_are_learnt(world: World) -> None:
    sizes = [
        sorted(path.stat().st_size for path in (world.folder / name).glob("*/*.npy"))
        for name in ("draws", "few")
    ]
    assert sizes[0] == sizes[1]
    assert losses(world.run("drawn"))[STEPS] < losses(world.run("drawn"))[1]
    assert "likeliest tokens hold" not in world.run("drawn").log_path(1, 0).read_text()


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (
            ["--distill.stored", "sampled", "--distill.beta", 0],
            "written for another distill.stored",
        ),
        (
            ["--distill.stored", "sampled"],
            "drawn tokens give the forward KL divergence only; give distill.beta = 0 too",
        ),
        (["--distill.top_k", 9], "written for another distill.top_k"),
        (["--distill.temperature", 2], "written for another distill.temperature"),
        (["--data.sequence_length", 48], "written for other data"),
        (["--teacher", "padded"], "written for another teacher"),
        (["--distill.logprobs", "{}/student"], "there is something else"),
        (["--distill.lmbda", 0.5, "--data.packing", "none"], "not with distill.logprobs"),
    ],
)
def test_what_was_stored_for_something_else_is_refused(
    world: World, refused: Refusal, changed: list[object], message: str
) -> None:
    given = [str(word).replace("{}", str(world.folder)) for word in changed]
    teacher = "padded" if given[0] == "--teacher" else "teacher"
    more = [*stored(world.folder / "few"), *(given if teacher == "teacher" else [])]
    assert message in refused(*world.words("refused", *more, teacher=teacher))


def change(path: Path, damage: Callable[[np.ndarray, np.ndarray], object], signed: bool) -> None:
    """Damage counts and records of a stored file; `signed`: with the checksum of what is wrong."""
    counts, records, checksum = parts_of(path)
    damage(counts, records)
    if signed:
        digest = chunk_checksum(path)
        digest.update(counts.tobytes() + records.tobytes())
        checksum = digest.digest()
    path.write_bytes(counts.tobytes() + records.tobytes() + checksum)


def flip_a_bit(counts: np.ndarray, records: np.ndarray) -> None:
    records.view(np.uint8)[12345] ^= 1


def swap_records(counts: np.ndarray, records: np.ndarray) -> None:
    records[[0, 1]] = records[[1, 0]]


def set_ids(ids: object) -> Callable[[np.ndarray, np.ndarray], None]:
    return lambda counts, records: records["ids"].__setitem__(5, ids)


def set_logprob(value: float) -> Callable[[np.ndarray, np.ndarray], None]:
    return lambda counts, records: records["logprobs"].__setitem__((5, 2), value)


def set_count(value: int) -> Callable[[np.ndarray, np.ndarray], None]:
    return lambda counts, records: counts.__setitem__(7, value)


CUT = "has not as many tokens as it says"
ALL = "does not hold what was written (its checksum differs)"


@pytest.mark.parametrize(
    ("damage", "signed", "words"),
    [
        (flip_a_bit, False, ALL),
        (swap_records, False, ALL),
        (lambda counts, records: counts.__setitem__([0, 1], counts[[1, 0]] + [1, -1]), False, ALL),
        (set_ids(10**6), False, ALL),
        (set_ids(10**6), True, "holds an id that the tokenizer, of 512 ids, lacks"),
        (set_ids(-5), True, "holds an id that the tokenizer, of 512 ids, lacks"),
        (set_ids(65), True, "holds one id twice for a token"),
        (set_logprob(0.5), True, "holds a log-probability that is above 0"),
        (
            lambda counts, records: records["logprobs"].__setitem__((5, 8), np.nan),
            True,
            "holds a log-probability that is above 0",
        ),
        (set_count(10**9), True, CUT),
        (set_count(-1), True, CUT),
    ],
)
def test_a_stored_file_that_is_damaged_is_named_when_it_is_read(
    world: World,
    tmp_path: Path,
    damage: Callable[[np.ndarray, np.ndarray], object],
    signed: bool,
    words: str,
) -> None:
    shutil.copytree(world.folder / "few", tmp_path / "few")
    config = parse_config(DistillConfig, world.words("damaged", *stored(tmp_path / "few"))[1:])
    inputs = open_distill_inputs(config, 1)
    dataset = distilled_datasets(inputs)["train"]
    path, *others = chunk_paths(tmp_path / "few" / "train", dataset)
    change(path, damage, signed)
    packing = StoredPacking(dataset.packing, (path, *others), 8, inputs.tokenizer.vocab_size)
    with pytest.raises(UserError) as caught:
        replace(dataset, packing=packing, shuffle=False).sequences(0, 1)
    assert str(caught.value).startswith(f"sample 0: {path}: {words}")
    assert str(caught.value).endswith(
        "; delete it, and name the teacher, distill.teacher, which is asked again"
    )


def test_a_run_that_reads_a_damaged_stored_file_fails_in_one_line(
    world: World, refused: Refusal, tmp_path: Path
) -> None:
    shutil.copytree(world.folder / "few", tmp_path / "few")
    path = tmp_path / "few" / "train" / "000000000.npy"
    change(path, flip_a_bit, signed=False)
    assert refused(*world.words("damaged", *stored(tmp_path / "few")), status=1).startswith(
        f"{path}: {ALL}; "
    )


def test_each_stored_file_is_verified_once(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = open_distill_inputs(
        parse_config(DistillConfig, world.words("often", *stored(world.folder / "few"))[1:]), 1
    )
    dataset, verified = distilled_datasets(inputs)["train"], list[Path]()
    paths = chunk_paths(world.folder / "few" / "train", dataset)
    monkeypatch.setattr(StoredPacking, "_verify", lambda self, file, path: verified.append(path))
    count = dataset.packing.num_sequences
    for _ in range(2):
        packing = replace(
            dataset,
            packing=StoredPacking(dataset.packing, tuple(paths), 8, inputs.tokenizer.vocab_size),
        )
        packing.sequences(0, 2 * count)
        assert sorted(verified) == paths
        verified.clear()


@pytest.mark.parametrize("kept", [0, 60, 256, 700])
def test_a_stored_file_that_is_cut_is_named(
    world: World, refused: Refusal, tmp_path: Path, kept: int
) -> None:
    shutil.copytree(world.folder / "few", tmp_path / "few")
    cut = tmp_path / "few" / "train" / "000000000.npy"
    cut.write_bytes(cut.read_bytes()[:kept])
    said = refused(*world.words(f"cut {kept}", *stored(tmp_path / "few"), steps=1))
    assert (
        said
        == f"{cut}: {CUT}; delete it, and name the teacher, distill.teacher, which is asked again"
    )


def test_a_folder_that_was_stored_without_checksums_is_refused(
    world: World, refused: Refusal, tmp_path: Path
) -> None:
    shutil.copytree(world.folder / "few", tmp_path / "few")
    manifest = tmp_path / "few" / "manifest.json"
    manifest.write_text(json.dumps({**json.loads(manifest.read_text()), "format": 1}))
    said = refused(*world.words("earlier", *stored(tmp_path / "few"), steps=1))
    assert "written for a version of lmforge that stores no checksums; name another folder" in said


def test_a_place_where_nothing_can_be_stored_is_named(
    world: World, refused: Refusal, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    said = refused(*world.words("nowhere", *stored(tmp_path / "file" / "new"), steps=1))
    where = (
        f"{tmp_path / 'file' / 'new'}: cannot be made a folder (there is a file where a folder"
        " would be)"
    )
    assert said == f"{where}; choose another distill.logprobs"


def test_a_folder_that_another_run_has_begun_meanwhile_is_refused(
    world: World, tmp_path: Path
) -> None:
    def inputs_of(temperature: int) -> tuple[DistillConfig, RunInputs]:
        words = world.words(
            "meanwhile", *stored(tmp_path / "new"), "--distill.temperature", temperature
        )
        config = parse_config(DistillConfig, words[1:])
        return config, open_distill_inputs(config, 1)

    alone, digest = init_distributed("cpu"), "of one teacher"
    (config, inputs), (other, other_inputs) = inputs_of(1), inputs_of(2)  # both find the folder new
    begin_stored(config, inputs, digest, alone)
    begin_stored(config, inputs, digest, alone)
    with pytest.raises(UserError, match=r"written for another distill\.temperature"):
        begin_stored(other, other_inputs, digest, alone)


def test_a_copied_teacher_is_the_same_one_and_other_weights_of_its_shape_are_not(
    world: World, tmp_path: Path
) -> None:
    shutil.copytree(world.folder / "padded", tmp_path / "copy", copy_function=shutil.copyfile)
    [file] = (tmp_path / "copy").glob("*.safetensors")
    os.utime(file, (1, 1))
    theirs = find_pretrained(world.folder / "padded").content_digest
    assert find_pretrained(tmp_path / "copy").content_digest == theirs
    save_file({name: -tensor for name, tensor in load_file(file).items()}, file, {"format": "pt"})
    assert find_pretrained(tmp_path / "copy").content_digest != theirs


@pytest.mark.slow
def test_what_a_server_says_is_stored_as_what_the_teacher_itself_says_and_asked_for_once(
    world: World,
    lmforge: Command,
    serving: Callable[..., Server],  # noqa: F811 - its fixture
) -> None:
    server = serving(world.folder / "teacher", "--max_length", 66)
    words = world.words("served", *stored(world.folder / "served logprobs"), teacher="teacher")
    words[words.index("--distill.teacher") + 1] = server.url
    done = lmforge(*words, "--train.steps", 1)
    assert done.returncode == 0, done.stderr
    for path in (world.folder / "few").glob("*/*.npy"):
        ours = world.folder / "served logprobs" / path.parent.name / path.name
        assert ours.stat().st_size == path.stat().st_size
        told, here = (parts_of(each)[1][-10:] for each in (ours, path))
        assert told["logprobs"] == pytest.approx(here["logprobs"], abs=2e-4)
        assert (told["ids"] == here["ids"]).mean() > 0.9  # equally likely ones may change places
    (world.folder / "served logprobs" / "train" / "000000064.npy").unlink()
    again = lmforge(*words)
    assert again.returncode == 0, again.stderr
    logs = [
        (world.run("served").path / "logs" / f"attempt-{n}" / "rank-0.log").read_text()
        for n in (1, 2)
    ]
    assert [log.count("computing") for log in logs] == [2, 1]
    for step, loss in losses(world.run("stored")).items():
        assert losses(world.run("served"))[step] == pytest.approx(loss, rel=1e-5)


class NoTeacher(BaseHTTPRequestHandler):
    """Has nothing."""

    def do_GET(self) -> None:
        self.send_error(404)

    def log_message(self, *arguments: object) -> None: ...


def ranked(*said: tuple[object, float]) -> list[object]:
    """What a server says of two tokens: nothing of the first."""
    return [
        None,
        {str(id): {"logprob": logprob, "rank": at} for at, (id, logprob) in enumerate(said)},
    ]


@pytest.mark.parametrize(
    ("said", "words"),
    [
        (ranked((7, -0.1), (256, -3.0)), "256 is no id of the tokenizer, which has 256"),
        (ranked((7, -0.1), (-1, -3.0)), "expected a number of at least 0, got "),
        (ranked((7, -0.1), (2**70, -3.0)), "expected a number below 2147483648, got "),
        (
            ranked((7, 0.5), (8, -3.0)),
            "prompt_logprobs[1].7.logprob: expected a number of at most 0.001, got 0.5",
        ),
        (ranked((7, 0.0), (8, 0.0)), "the probabilities of tokens of one place add up to 2"),
        (ranked((7, float("nan")), (8, -1.0)), "not valid JSON"),
        (ranked((7, -1.0), ("07", -1.0)), "says less than 2 tokens of each place"),
        ([None, None, None], "says less than 2 tokens of each place"),
        (None, "/inference/v1/generate: redirects to http://127.0.0.2/; "),
    ],
)
def test_a_teacher_that_says_what_no_model_can_is_a_line_about_its_server(
    said: object, words: str
) -> None:
    class Says(NoTeacher):
        def do_POST(self) -> None:
            content = json.dumps({"prompt_logprobs": said}).encode()
            self.send_response(307 if said is None else 200)
            self.send_header("location", "http://127.0.0.2/")
            self.send_header("content-length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

    with HTTPServer(("127.0.0.1", 0), Says) as server:
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        with pytest.raises(ServerProblem) as caught:
            TeacherServer(f"http://127.0.0.1:{server.server_port}", 2).top_logprobs([5, 6], 256)
        server.shutdown()
    assert words in str(caught.value)


def test_a_server_that_cannot_teach_is_refused(
    world: World,
    refused: Refusal,
    lmforge: Command,
    serving: Callable[..., Server],  # noqa: F811 - its fixture
    tmp_path: Path,
) -> None:
    def said_of(url: str, *more: object) -> str:
        words = world.words("refused", *(more or stored(tmp_path / "new")))
        words[words.index("--distill.teacher") + 1] = url
        return refused(*words)

    assert "distill.teacher: http://127.0.0.1:9: nothing answers (" in said_of("http://127.0.0.1:9")
    assert "name a folder for them, distill.logprobs" in said_of(
        "http://127.0.0.1:9", "--distill.beta", 0
    )
    assert "says its likeliest tokens only" in said_of(
        "http://127.0.0.1:9", *drawn(tmp_path / "new")
    )
    assert "a server reports at temperature 1" in said_of(
        "http://127.0.0.1:9", *stored(tmp_path / "new"), "--distill.temperature", 2
    )
    with HTTPServer(("127.0.0.1", 0), NoTeacher) as empty:
        threading.Thread(target=empty.serve_forever, daemon=True).start()
        said = said_of(f"http://127.0.0.1:{empty.server_port}")
        empty.shutdown()
    assert (
        "has no /v1/models; start it with lmforge serve, or vllm serve --enable-scale-out"
        " --max-logprobs 8" in said
    )
    other = tmp_path / "other"
    assert lmforge("export", world.folder / "teacher", other).returncode == 0
    byte_tokenizer().save(other)
    assert "distill.teacher: another tokenizer at http://" in said_of(
        serving(other, "--max_length", 66).url
    )
    short = serving(world.folder / "teacher", "--max_length", 32).url
    assert (
        "66 tokens of prompt and answer, and this server was started with --max_length 32"
        in said_of(short)
    )
    assert not (world.folder / "refused" / "recipe.toml").exists()


def test_without_its_teacher_what_is_stored_of_it_is_enough(
    world: World, lmforge: Command, refused: Refusal
) -> None:
    words = world.words("without", *stored(world.folder / "few"), steps=1)
    place = words.index("--distill.teacher")
    words[place : place + 2] = []
    done = lmforge(*words)
    assert done.returncode == 0, done.stderr
    assert losses(world.run("without"))[1] == pytest.approx(
        losses(world.run("stored"))[1], rel=FP32.loss
    )
    words[words.index("--distill.logprobs") + 1] = str(world.folder / "nothing")
    assert "name the teacher" in refused(*words, "--run.name", "other")


@parametrize("name", ["online", "reverse"], fast=(0,))
def test_what_a_teacher_says_is_learnt(world: World, name: str) -> None:
    run = losses(world.run(name), "kd_loss")
    assert 0 < run[STEPS] < run[1]
    assert losses(world.run(name), "val/kd_loss")[STEPS] > 0


def test_without_a_share_of_the_teacher_it_is_fine_tuning(world: World) -> None:
    assert losses(world.run("text")) == pytest.approx(losses(world.run("sft")), rel=FP32.loss)
    assert losses(world.run("text"), "lm_loss") == losses(world.run("text"))


def test_a_teacher_that_cannot_teach_is_refused(
    world: World, refused: Refusal, lmforge: Command, tmp_path: Path
) -> None:
    def words(*more: object, teacher: str) -> list[str]:
        return world.words("refused", *more, teacher=teacher)

    other = tmp_path / "other"
    assert lmforge("export", world.folder / "teacher", other).returncode == 0
    byte_tokenizer().save(other)
    said = refused(*words(teacher=str(other)))
    assert f'another tokenizer at {other}: "The" is [' in said
    assert "take a teacher with the student's tokenizer" in said
    assert "distill.teacher" in refused(*words(teacher="nowhere"))
    assert "its head has" in refused(*words(teacher=str(short_vocabulary(world, tmp_path))))
    assert not (world.folder / "refused" / "recipe.toml").exists()
    assert refused("distill", "--model.source", other, "--data.files", "a.jsonl").startswith(
        "distill.teacher: name the model"
    )


def short_vocabulary(world: World, folder: Path) -> Path:
    """A teacher with the tokenizer, whose head lacks ids of it."""
    short = folder / "short"
    short.mkdir()
    for file in (world.folder / "padded").iterdir():
        (short / file.name).write_bytes(file.read_bytes())
    [file], config = short.glob("*.safetensors"), json.loads((short / "config.json").read_text())
    config["vocab_size"] -= PADDING + 1
    tensors = load_file(file)
    for name in {"model.embed_tokens.weight", "lm_head.weight"} & tensors.keys():
        tensors[name] = tensors[name][: config["vocab_size"]].clone()
    save_file(tensors, file, {"format": "pt"})
    (short / "config.json").write_text(json.dumps(config))
    return short
