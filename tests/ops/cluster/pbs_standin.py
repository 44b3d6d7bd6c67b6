"""Stand-ins for qsub, qstat, qsig and qdel, since PBS is in no distribution's packages: `python
pbs_standin.py qsub …`.

They do what `lmforge launch` counts on: qsub runs the script with PBS's variables without waiting
for it, qstat says whether it still runs, qsig and qdel send signals to all of its processes.
STANDIN_FOLDER keeps the jobs, STANDIN_HOSTS names the nodes.
"""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

FOLDER = Path(os.environ["STANDIN_FOLDER"])


def submit(script: Path) -> int:
    """Run a script of bash as a job, or refuse it as qsub does. Prints the id."""
    directives = re.findall(r"^#PBS (.+)$", script.read_text(), re.M)
    queue = next((line.split()[1] for line in directives if line.startswith("-q ")), "")
    if queue == "nowhere":
        print("qsub: Unknown queue", file=sys.stderr)
        return 170
    number = os.getpid()  # of no other job here: ranks meet at a port that follows from it
    nodes = FOLDER / f"{number}.nodes"
    nodes.write_text("".join(f"{host}\n" for host in os.environ["STANDIN_HOSTS"].split()))
    variables = {
        "PBS_JOBID": f"{number}.server",
        "PBS_NODEFILE": str(nodes),
        "PBS_ENVIRONMENT": "PBS_BATCH",
    }
    process = subprocess.Popen(
        ["bash", str(script)],
        env={**os.environ, **variables},
        cwd="/",
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=(FOLDER / f"{number}.errors").open("w"),
        start_new_session=True,
    )
    (FOLDER / f"{number}.pid").write_text(str(process.pid))
    (FOLDER / f"{number}.directives").write_text("\n".join(directives))
    print(f"{number}.server")
    return 0


def processes(job: str) -> list[int]:
    """The processes of a job's session; empty where it has ended."""
    session = (FOLDER / f"{job.partition('.')[0]}.pid").read_text()
    result = subprocess.run(
        ["ps", "-o", "pid=,stat=", "-s", session], capture_output=True, text=True
    ).stdout
    return [int(line.split()[0]) for line in result.splitlines() if "Z" not in line.split()[1]]


def main(name: str, *arguments: str) -> int:
    if name == "qsub":
        return submit(Path(arguments[-1]))
    job = arguments[-1]
    if not (alive := processes(job)):
        print(f"{name}: Unknown Job Id {job}", file=sys.stderr)
        return 153
    if name == "qstat":
        print(f"Job Id: {job}\n    job_state = R")
        return 0
    number = signal.SIGKILL if name == "qdel" else signal.Signals[arguments[1]]
    for process in alive:
        os.kill(process, number)
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
