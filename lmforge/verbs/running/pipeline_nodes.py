"""A pipeline on several nodes: the first node carries out the stages, and tells the others which ones to start too. A training
stage is started on all nodes, whose launchers then connect (`cluster/node_group.py`). Any other verb runs only on the first
node. Stages exchange files, so before a stage all nodes compare its input files.
"""

import json
import os
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType

import xxhash

from lmforge.cluster.environment import ADDRESS_VARIABLE, NODES_VARIABLE, STATUS_VARIABLE
from lmforge.cluster.folder_marker import FolderMarker
from lmforge.cluster.node_group import READ_SECONDS, NodeGroup, NodeStore, write_status
from lmforge.cluster.rendezvous import free_port
from lmforge.cluster.waiting import LAST_PAUSE_SECONDS, wait_until
from lmforge.config.load import STAGES, parse_config
from lmforge.config.mixture import is_remote
from lmforge.config.stage import PretrainConfig, StageConfig
from lmforge.config.tuning import TunedConfig
from lmforge.errors import RunFailed, UserError
from lmforge.runs import parse_location

# A network file system may show a new file late to other hosts.
VISIBLE_SECONDS = 30.0
ANSWER_SECONDS = VISIBLE_SECONDS + 60.0
# Variables of launchers, which are removed for a stage that runs only on the first node.
LAUNCHER_PREFIXES = ("SLURM_STEP", "PMI_", "PMIX_", "OMPI_", "MPI_LOCAL", "PALS_", NODES_VARIABLE, ADDRESS_VARIABLE)

RunCommand = Callable[[list[str], dict[str, str]], tuple[int, int]]


class PipelineNodes:
    """The nodes of a pipeline, on the first of them. Raises PeerLost where another one does not join or does not answer."""

    def __init__(self, group: NodeGroup, folder: Path) -> None:
        """`folder` holds the runs. Raises UserError naming the nodes that do not share it."""
        self._group, self._node_store = group, NodeStore(group)
        self._node_store.check_in(0)
        self._number = 0
        marker = FolderMarker(folder)
        try:
            self._node_store.put("marker", json.dumps([str(folder), marker.shared_name]))
            others = [rank for rank, answer in self._answers("marker").items() if answer != "seen"]
        finally:
            marker.remove()
        if others:
            self.end(UserError.exit_status)
            raise UserError(
                f"{folder}: not the same folder on {group.names[0]} and {group.describe(others)}; the stages of a pipeline hand"
                " over files; use folders that all nodes share, or one node"
            )

    def start_stage(self, words: list[str]) -> dict[str, str]:
        """Make the other nodes start a command line. Returns the environment in which this node must start it.

        Raises UserError naming the nodes that do not see its inputs as this node does.
        """
        if words[0] not in STAGES:
            return environment_of_first_node()
        key = f"stage/{self._number}"
        self._number += 1
        port, inputs = free_port(), describe_inputs(words)
        self._node_store.put(key, json.dumps({"words": words, "port": port, "inputs": inputs}))
        problems = {rank: answer for rank, answer in self._answers(key).items() if answer}
        self._node_store.put(f"{key}/go", "" if problems else "go")
        if problems:
            path = next(iter(problems.values()))
            raise UserError(
                f"{path}: not the same on {self._group.names[0]} and {self._group.describe(list(problems))}; the stages of a"
                " pipeline hand over files; put them into a folder that all nodes share"
            )
        return _environment_of_stage(self._group, port)

    def _answers(self, key: str) -> dict[int, str]:
        others = range(1, len(self._group.names))
        return {rank: self._node_store.get(f"{key}/{rank}", ANSWER_SECONDS, rank) for rank in others}

    def end(self, status: int) -> None:
        """Make the other nodes end with a status, and wait briefly until they have read it, since the store ends with this
        process."""
        self._node_store.put("end", str(status))
        others = len(self._group.names) - 1
        wait_until(lambda: self._node_store.call(lambda store: bool(store.add("ended", 0) >= others)), READ_SECONDS)


def coordinate_nodes(group: NodeGroup | None, folder: Path, run_stages: Callable[[PipelineNodes | None], int]) -> int:
    """On the first node, carry out a pipeline: `run_stages` is called with None if there are no other nodes. Returns its exit
    status, with which the other nodes end too."""
    nodes, status = None, 1
    try:
        nodes = PipelineNodes(group, folder) if group is not None and len(group.names) > 1 else None
        status = run_stages(nodes)
        return status
    except (UserError, RunFailed) as problem:
        status = problem.exit_status
        raise
    finally:
        if nodes is not None:
            nodes.end(status)
        if group is not None:
            write_status(group, status)


def run_as_worker_node(group: NodeGroup, run_command: RunCommand) -> int:
    """On the other nodes: start the stages that the first node announces, until it ends. Returns its status. Raises PeerLost if
    the first node is lost."""
    node_store, number = NodeStore(group), 0
    received: list[int] = []

    def interrupt(signal_number: int, frame: FrameType | None) -> None:
        received.append(signal_number)

    for each in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
        signal.signal(each, interrupt)
    node_store.check_in(0)
    folder, name = json.loads(node_store.get("marker", ANSWER_SECONDS))
    own = FolderMarker(Path(folder))
    own.remove()
    sees = bool(name) and wait_until(lambda: own.sees(name), VISIBLE_SECONDS)
    node_store.put(f"marker/{group.rank}", "seen" if sees else "absent")
    while not received:
        if node_store.has("end"):
            status = int(node_store.get("end", 0))
            node_store.call(lambda store: store.add("ended", 1))
            return status
        if node_store.has(f"stage/{number}"):
            received += _start_stage(node_store, f"stage/{number}", run_command)
            number += 1
        time.sleep(LAST_PAUSE_SECONDS)
    return 128 + received[0]


def _start_stage(node_store: NodeStore, key: str, run_command: RunCommand) -> list[int]:
    """Start a stage if all nodes see its inputs. Returns the signal that interrupted it, if one did."""
    group, stage = node_store.group, json.loads(node_store.get(key, 0))
    node_store.put(f"{key}/{group.rank}", _first_difference(stage["inputs"]))
    if not node_store.get(f"{key}/go", len(group.names) * ANSWER_SECONDS):
        return []
    _, interrupted = run_command(stage["words"], _environment_of_stage(group, stage["port"]))
    return [interrupted] if interrupted else []


def environment_of_first_node() -> dict[str, str]:
    """The environment of a stage that runs only on the first node."""
    return {name: value for name, value in environment_of_stage().items() if not name.startswith(LAUNCHER_PREFIXES)}


def _environment_of_stage(group: NodeGroup, port: int) -> dict[str, str]:
    return {**environment_of_stage(), ADDRESS_VARIABLE: f"{group.address}:{port}"}


def environment_of_stage() -> dict[str, str]:
    """The environment without the file for the job's status, which belongs to the pipeline and not to a stage."""
    return {name: value for name, value in os.environ.items() if name != STATUS_VARIABLE}


def describe_inputs(words: Sequence[str]) -> dict[str, str]:
    """A digest, by path, of each local path that a training command line reads, as this node sees it."""
    config: StageConfig = parse_config(STAGES[words[0]], list(words[1:]))
    paths = [config.model.source] if config.model.source is not None else []
    if isinstance(config, PretrainConfig):
        paths += [parse_location(source.folder) for source in config.data.all_sources if not is_remote(source.folder)]
    elif isinstance(config, TunedConfig):
        paths += [path for source in config.data.file_sources for path in (*source.files, *source.validation_files)]
    # A missing path is refused by the stage itself, or is the name of a model.
    return {str(path): _digest(path) for path in paths if path.exists()}


def _digest(path: Path) -> str:
    """The names in a folder, or the size of a file: they differ for a copy, or for another folder of that name."""
    try:
        held: object = sorted(each.name for each in path.iterdir() if not each.name.startswith("."))
    except NotADirectoryError:
        held = path.stat().st_size
    except OSError:
        return "absent"
    return xxhash.xxh3_64_hexdigest(repr(held).encode())


def _first_difference(inputs: dict[str, str]) -> str:
    """The first path whose digest differs from the first node's; empty where there is none."""
    for path, digest in inputs.items():
        if not wait_until(lambda path=path, digest=digest: _digest(Path(path)) == digest, VISIBLE_SECONDS):  # type: ignore[misc]
            return path
    return ""
