"""`lmforge top` for real runs: as JSON, as a page on a real terminal, and for hosts that answer,
are slow, or do not exist.
"""

import json
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lmforge.cli import run as lmforge_here
from tests.conftest import Refusal
from tests.distributed.conftest import Recipe
from tests.distributed.test_watch import Going, going
from tests.ops.cluster.laboratory import Laboratory
from tests.support.terminal import Terminal, terminal, wait_for_screen  # noqa: F401 - a fixture

# A stand-in for ssh: a host is what its name says.
SHELL = """#!/bin/sh
for line; do host=$before; before=$line; done
case "$*" in
    *" silent -- "*) exec sleep 60 ;;
    *" refuses -- "* | *"::"*) echo "Permission denied (publickey)." >&2; exit 255 ;;
    *" greets -- "*) echo "Welcome to node7 [N/A]" ;;
esac
exec sh -c "$line"
"""
# As `lmforge launch --hosts` takes them too.
ADDRESSES = ("[2001:db8::7]", "user@[fe80::1]", "fe80::1%eth0")


def answer(capsys: pytest.CaptureFixture[str], *words: object) -> dict[str, Any]:
    capsys.readouterr()
    assert lmforge_here(["top", "--once", "--output", "json", *map(str, words)]) == 0
    return dict(json.loads(capsys.readouterr().out))


@pytest.fixture(scope="module")
def stuck(recipe: Recipe, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Going]:
    """A run on two ranks that goes on: rank 1 sleeps before the batch of step 7, and rank 0 waits
    for it.
    """
    folder = tmp_path_factory.mktemp("stuck")
    with going(recipe, folder, FAULT="data", SLEEP="0.5", AWAKE=str(folder / "awake")) as run:
        run.wait_for(r"all stacks: ")
        yield run


@pytest.mark.slow
def test_a_live_run_is_read_from_its_directory_alone(
    stuck: Going, capsys: pytest.CaptureFixture[str]
) -> None:
    result = answer(capsys, stuck.run.path)
    assert result["hosts"] == []
    [run] = result["runs"]
    assert (run["state"], run["attempt"], run["step"], run["steps"]) == ("stalled", 1, 7, 100_000)
    assert run["metrics"]["loss"] > 0
    ranks = [(rank["rank"], rank["phase"], rank["verdict"]) for rank in run["ranks"]]
    assert ranks == [(0, "reduce", "waits"), (1, "data", "stuck")]
    assert all(rank["heartbeat_age_seconds"] < 10 for rank in run["ranks"])
    # One rank of each host publishes what the host does.
    [host] = run["hosts"]
    assert host["memory_total_bytes"] > host["memory_used_bytes"] > 0
    assert host["cores"] == os.cpu_count()
    assert [path.name for path in stuck.run.health_folder.glob("host-*")] == ["host-of-rank-0.json"]


@pytest.mark.needs("tmux")
def test_the_page_on_a_terminal_names_the_stuck_rank_first_at_80_and_160_columns_until_q_is_pressed(
    stuck: Going,
    terminal: Terminal,  # noqa: F811 - its fixture
) -> None:
    command = (
        f"{sys.executable} -m lmforge top {shlex.quote(str(stuck.run.path))}; echo left; sleep 60"
    )
    command = f"TERM=screen {command}"
    assert terminal("new-session", "-d", "-x", 80, "-y", 24, command).returncode == 0
    for columns in (80, 160):
        assert terminal("resize-window", "-x", columns, "-y", 24).returncode == 0
        page = wait_for_screen(
            terminal,
            r"(?s)^lmforge top"
            r" .*/watched\s+attempt\s+1,\s+2\s+ranks\s+on\s+1\s+host:\s+STALLED.*answers",
        )
        assert max(map(len, page)) <= columns
        table = next(at for at, line in enumerate(page) if line.split()[:2] == ["rank", "host"])
        assert [line.split()[0] for line in page[table + 1 : table + 3]] == ["1", "0"]
        assert re.search(r"^ +1 .* data .* stuck$", page[table + 1])
        assert re.search(r"^ +0 .* reduce .* waits for others$", page[table + 2])
        assert any(line.startswith("step 7 of 100,000 ") for line in page)
        assert any(
            re.match(r"ranks +(d data 1 +r reduce 1|r reduce 1 +d data 1)$", line) for line in page
        )
        assert "    0  rd" in page
    terminal("send-keys", "q")
    # The page is gone, and what was there before is back.
    assert wait_for_screen(terminal, "^left")[0] == "left"


@pytest.mark.slow
def test_a_host_that_does_not_answer_neither_counts_nor_holds_up_the_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shell = tmp_path / "ssh"
    shell.write_text(SHELL)
    shell.chmod(0o755)
    hosts = tmp_path / "hosts"
    hosts.write_text(
        "# my cluster\nsilent slots=8\nrefuses\n\ngreets\nrefuses\n" + "\n".join(ADDRESSES)
    )
    python = f"{sys.executable} -m lmforge"
    words = (hosts, "--ssh_command", shell, "--remote_command", python, "--timeout_seconds", 5)
    results = {host["name"]: host for host in answer(capsys, *words)["hosts"]}
    assert re.fullmatch(r"no answer for \d+ s", results["silent"]["error"])
    assert {results[name]["error"] for name in ("refuses", *ADDRESSES)} == {
        "Permission denied (publickey)."
    }
    assert results["greets"]["error"] == ""
    assert results["greets"]["usage"]["cpu_percent"] is not None
    assert results["silent"]["usage"] is results["refuses"]["usage"] is None


def test_an_unknown_host_has_its_own_row(capsys: pytest.CaptureFixture[str]) -> None:
    assert lmforge_here(["top", "nowhere.invalid", "--once", "--timeout_seconds", "20"]) == 0
    page = capsys.readouterr().out.splitlines()
    assert "0 of 1 host answers" in page
    assert any(line.startswith("nowhere.inv") and "no answer" in line for line in page), page


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("runs/nothing", "runs/nothing: no such run, nor a file of host names, nor a host name"),
        ("-oProxyCommand=x", "-oProxyCommand=x: "),
        ("a;b", "a;b: no such run, nor a file of host names, nor a host name"),
    ],
)
def test_what_is_neither_a_run_nor_a_host_is_refused(
    refused: Refusal, word: str, message: str
) -> None:
    assert refused("top", word, "--once").startswith(message)


def test_a_folder_or_a_file_of_something_else_is_refused(tmp_path: Path, refused: Refusal) -> None:
    assert (
        refused("top", tmp_path, "--once") == f"{tmp_path}: a folder of no known kind; give a run"
    )
    (tmp_path / "hosts").write_text("node1\n$(reboot)\n")
    assert refused("top", tmp_path / "hosts").startswith(
        f"{tmp_path / 'hosts'}: line 2: expected one host, such as "
    )


@pytest.mark.slow
def test_two_hosts_are_asked_over_ssh_and_slurm_and_one_that_is_cut_off_is_marked(
    laboratory: Laboratory,
) -> None:
    def top(*words: object) -> dict[str, Any]:
        command = [sys.executable, "-m", "lmforge", "top", "--once", "--output", "json", *words]
        command += ["--ssh_command", f"ssh -F {laboratory.ssh_config}", "--timeout_seconds", "8"]
        done = subprocess.run(
            list(map(str, command)),
            env={**os.environ, **laboratory.environment},
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == 0, done.stderr
        return {host["name"]: host for host in json.loads(done.stdout)["hosts"]}

    for name, host in top("node1", "node2").items():
        assert host["error"] == ""
        assert host["usage"]["host"] == name
    with laboratory.without_network("node2"):
        result = top("node1", "node2")
        assert result["node1"]["error"] == ""
        assert result["node2"]["usage"] is None
        assert re.match(r"no answer for|ssh: connect to host", result["node2"]["error"])
    submitted = laboratory.run(
        "login", ["sbatch", "-N2", "--parsable", "--output=/dev/null", "--wrap", "sleep 300"]
    )
    job = submitted.stdout.strip()
    deadline = time.monotonic() + 60
    while (
        laboratory.run("login", ["squeue", "--noheader", f"--jobs={job}", "--format=%T"]).stdout
        != "RUNNING\n"
    ):
        assert time.monotonic() < deadline
        time.sleep(0.2)
    try:
        result = top("--slurm_job", job)
        assert {name: host["usage"]["host"] for name, host in result.items()} == {
            "node1": "node1",
            "node2": "node2",
        }
    finally:
        laboratory.run("login", ["scancel", job])
