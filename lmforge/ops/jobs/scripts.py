"""The scripts of a job: `job.sh`, which a launcher runs once (ssh: on each host), and `node.sh`,
which it runs on each node.

They are meant to be read: they look like scripts written by hand, and can be submitted by hand.
"""

import shlex
from collections.abc import Mapping

from lmforge import __version__
from lmforge.core.distributed.environment import (
    ADDRESS_VARIABLE,
    JOB_VARIABLE,
    NODE_RANK_VARIABLE,
    NODES_VARIABLE,
    STATUS_VARIABLE,
)
from lmforge.core.errors import EXIT_PEER_LOST
from lmforge.core.options.operation import JobOptions, LaunchOptions
from lmforge.ops.jobs.job import JOB_SCRIPT, NODE_SCRIPT, STOP_FILE, JobPlan

# What a node needs; torch itself takes seconds to import.
IMPORT_CHECK = (
    'import importlib.util, lmforge.cli; importlib.util.find_spec("torch") or exit("torch is not'
    ' installed")'
)
# Files with the output of doctor on each node, and its exit status.
PRINTED_PREFIX = "printed"
STATUS_PREFIX = "ended"
# The status of the first rank of mpiexec that failed. mpiexec's own status is unreliable: with some
# it is that of another rank, which mpiexec ended because of the failure, or 0 after a signal.
FIRST_STATUS_FILE = "first-status"
# A shell's exit status for a command that was ended by SIGABRT, SIGBUS, SIGFPE, SIGKILL or SIGSEGV.
KILLED_STATUSES = "134 | 135 | 136 | 137 | 139"
# After the status of a run is known, its other nodes get this time to end.
END_SECONDS = 60
# mpiexec passes it on to its processes; for SIGTERM it kills them.
MPI_STOP_SIGNAL = "USR1"
# The first node writes the status of all into a file.
SET_STATUS_FILE = f'export {STATUS_VARIABLE}="$folder/node-status"\nrm -f "${STATUS_VARIABLE}"\n'
READ_STATUS_FILE = f'[ -s "${STATUS_VARIABLE}" ] && status=$(cat "${STATUS_VARIABLE}")\n'
# How the script for a scheduler ends.
END_LINES = """\
[ $status = 127 ] && echo "lmforge: a node does not see $folder: all nodes need the folder of the run" >&2
echo $status >"$folder/status"
exit $status
"""


def _forward_signals(terminate: str = "TERM") -> str:
    """A function of the shell that runs a command and passes signals on, for which a shell would
    wait for its end first.

    SIGUSR1, SIGUSR2 and SIGXCPU mean that the time limit is near. SIGTERM comes from `lmforge
    stop`; the command gets `terminate` instead.
    """
    return f"""\
# Run a command, pass signals on to it, and keep its exit status.
times_up=
run() {{
    "$@" </dev/null &
    child=$!
    for signal in USR1 USR2 XCPU; do
        trap "times_up=SIG$signal; kill -USR1 $child 2>/dev/null" $signal
    done
    trap 'kill -{terminate} $child 2>/dev/null' TERM INT HUP
    wait $child; status=$?
    while kill -0 $child 2>/dev/null; do wait $child; status=$?; done
    trap - USR1 USR2 XCPU TERM INT HUP
}}
"""


def node_script(plan: JobPlan) -> str:
    """What runs on each node, or with mpi for each rank; its argument is a recipe."""
    return f"""\
{_node_preamble(plan)}exec {plan.python_command()} -m lmforge {plan.verb} "$1"
"""


def rank_script(plan: JobPlan) -> str:
    """The script of a rank that mpiexec starts, as `node_script` is of a node; the status of the
    first rank that ends with another than 0 is kept.
    """
    return f"""\
{_node_preamble(plan)}
{_forward_signals()}
run {plan.python_command()} -m lmforge {plan.verb} "$1"
if [ $status != 0 ] && (set -o noclobber; echo $status >{shlex.quote(str(plan.folder / FIRST_STATUS_FILE))}) 2>/dev/null; then
    case $status in {KILLED_STATUSES}) signal=SIG$(kill -l $((status - 128)))
        echo "lmforge: rank ${{OMPI_COMM_WORLD_RANK:-$PMI_RANK}} on $(hostname) was killed by $signal" >&2 ;;
    esac
fi
exit $status
"""


def examination_script(plan: JobPlan) -> str:
    """What runs on each node for `lmforge doctor`, or with mpi for each rank: what it prints and
    its status go into files.

    Its own exit status is always 0: for another one, mpiexec and srun would end the other nodes and
    print an error.
    """
    own = f'{shlex.quote(str(plan.folder))}/"{{}}.$(hostname).$$"'
    return f"""\
{_node_preamble(plan)}
{_forward_signals()}
run {plan.python_command()} -m lmforge doctor {shlex.join(plan.arguments)} >{own.format(PRINTED_PREFIX)}
echo $status >{own.format(STATUS_PREFIX)}
"""


def _node_preamble(plan: JobPlan) -> str:
    directory = shlex.quote(str(plan.directory))
    python = plan.python_command()
    setup = "".join(f"{line}\n" for line in plan.options.setup)
    return f"""\
#!/bin/bash
# One node of the job {plan.name}, started by {JOB_SCRIPT}; its argument is a recipe. Written by lmforge {__version__}.
cd {directory} || {{ echo "lmforge: $(hostname): no folder {directory} here; all nodes need it" >&2; exit 2; }}
export {JOB_VARIABLE}={shlex.quote(str(plan.folder))}
export TTY_COMPATIBLE=0  # some of mpiexec are a terminal to their ranks: no progress bar in a log
{setup}reason=$({python} -c {shlex.quote(IMPORT_CHECK)} 2>&1) || {{
    echo "lmforge: $(hostname): {python} does not run lmforge here (${{reason##*$'\\n'}});" \\
        "see launch.python and launch.setup" >&2
    exit 2
}}
"""


def _given(values: Mapping[str, object]) -> list[str]:
    """Each prefix with its value, without those that have none."""
    return [f"{prefix}{value}" for prefix, value in values.items() if value]


def slurm_script(plan: JobPlan) -> str:
    """The script for sbatch.

    Slurm sends SIGUSR1 to it before the time limit, and runs it again when a node has failed.
    """
    options = plan.options
    lines = [
        f"--job-name={plan.name}",
        f"--nodes={plan.nodes}",
        "--ntasks-per-node=1",
        *_given(
            {
                "--gpus-per-node=": plan.gpus,
                "--cpus-per-task=": options.cpus,
                "--time=": options.time,
                "--account=": options.account,
                "--partition=": options.partition,
                "--signal=B:USR1@": options.time and options.signal_seconds,
            }
        ),
        "--requeue",
        "--open-mode=append",
        f"--output={plan.log}",
        *options.directive_options,
    ]
    # srun does not inherit the number of CPUs from the job.
    cpus = ""
    if options.cpus:
        cpus = f" --cpus-per-task={options.cpus}"
    tasks = f"--nodes={plan.nodes} --ntasks={plan.nodes}{cpus}"
    return f"""\
#!/bin/bash
{"".join(f"#SBATCH {line}" + chr(10) for line in lines)}
# Written by lmforge {__version__} launch. On each node one task starts the ranks of that node ({NODE_SCRIPT}).
{_common_lines(plan)}
echo "${{SLURM_RESTART_COUNT:-0}}" >"$folder/requeues"
{_rendezvous_lines(options, 'scontrol show hostnames "$SLURM_JOB_NODELIST"')}

{_forward_signals()}
# When a node ends, srun kills the others and gives their status: the first node writes that of all.
{SET_STATUS_FILE}# srun would wait for a lost node until Slurm notices.
(
    while [ ! -s "${STATUS_VARIABLE}" ]; do sleep 2; done
    sleep {END_SECONDS}
    [ "$(cat "${STATUS_VARIABLE}")" = 0 ] && exit  # a node is slow to end: its work is done
    echo "lmforge: a node is lost: the job does not wait for Slurm to notice" >&2
    pkill -KILL -P $$ -x srun
) &
watcher=$!
run srun --kill-on-bad-exit=1 {tasks} bash "$folder/{NODE_SCRIPT}" "$recipe"
srun_status=$status
kill $watcher 2>/dev/null
{READ_STATUS_FILE}{_requeue_lines(options)}{END_LINES}"""


def _requeue_lines(options: LaunchOptions) -> str:
    """Lines that let Slurm queue the job again: after a signal before the time limit, when the run
    has saved, or after a rank was lost for good on a node that Slurm takes for healthy.
    """
    limit = ""
    if options.time:
        limit = f" of {options.time}"
    return f"""\
case $srun_status in {KILLED_STATUSES})
    signal=SIG$(kill -l $((srun_status - 128)))
    [ $status != {EXIT_PEER_LOST} ] && echo "lmforge: the launcher of a node was killed by $signal" >&2
    [ $status -gt 128 ] && status={EXIT_PEER_LOST} ;;
esac
again=
if [ "$times_up" ] && [ $status -gt 128 ]; then
    echo "lmforge: $times_up came before the time limit{limit}: job $SLURM_JOB_ID is queued again, and continues the run" >&2
    again=1
fi
if [ $status = {EXIT_PEER_LOST} ]; then
    echo >>"$folder/lost"
    [ $(wc -l <"$folder/lost") -le {options.max_restarts} ] && again=1
    [ "$again" ] || echo "lmforge: lost $(wc -l <"$folder/lost") times (launch.max_restarts): not queued again" >&2
fi
[ "$again" ] && scontrol requeue "$SLURM_JOB_ID" && exit
"""


def pbs_script(plan: JobPlan) -> str:
    """The script for qsub.

    Before the time limit it sends SIGUSR1 to itself, and submits itself again once the run is
    saved.
    """
    options = plan.options
    folder = plan.folder
    limit = plan.options.time_seconds
    select = [f"select={plan.nodes}", *_given({"ncpus=": options.cpus, "ngpus=": plan.gpus})]
    lines = [
        f"-N {plan.name[:15]}",
        f"-l {':'.join(select)}:mpiprocs=1",
        "-l place=scatter",
        *_given(
            {
                "-l walltime=": limit and _hours(limit),
                "-A ": options.account,
                "-q ": options.partition,
            }
        ),
        "-j oe",
        f"-o {folder}/pbs.log",
        "-r y",
        "-V",
        *options.directive_options,
    ]
    setup = "".join(f"{line}\n" for line in options.setup)
    rendezvous = _rendezvous_lines(options, "awk '!seen[$0]++' \"$PBS_NODEFILE\"")
    alarm = again = ""
    if limit:
        seconds = limit - options.signal_seconds
        alarm = (
            f"(trap 'kill $nap' TERM; sleep {seconds} & nap=$!; wait $nap && kill -USR1 $$)"
            " &\nalarm=$!\n"
        )
        again = f"""
kill $alarm 2>/dev/null
# The time was up: the run has saved, and continues in another job.
if [ "$times_up" ] && [ $status -gt 128 ] && [ ! -e "$folder/{STOP_FILE}" ]; then
    echo "lmforge: $times_up came before the time limit of {options.time}: another job continues the run" >&2
    next=$(qsub "$folder/{JOB_SCRIPT}") && echo "$next" >"$folder/next-job" && exit
    echo "lmforge: this node may not submit; to continue: qsub $folder/{JOB_SCRIPT}" >&2
fi"""
    return f"""\
#!/bin/bash
{"".join(f"#PBS {line}" + chr(10) for line in lines)}
# Written by lmforge {__version__} launch. On each node one process starts the ranks of that node ({NODE_SCRIPT}).
{_common_lines(plan)}
exec >>"$folder/output.log" 2>&1
echo $(($(cat "$folder/requeues" 2>/dev/null || echo -1) + 1)) >"$folder/requeues"
{setup}{rendezvous}

{_forward_signals(MPI_STOP_SIGNAL)}
# One process per node, which may use all of its cores, with the options of the mpiexec at hand.
case $(mpiexec --version 2>&1) in
    *"Open MPI"* | *OpenRTE*) place="--map-by ppr:1:node --bind-to none" ;;
    *HYDRA* | *Intel*) place="-ppn 1" ;;
    *) place="--ppn 1 --cpu-bind none" ;;
esac
{alarm}# After a signal the status of mpiexec says little: the first node writes its own.
{SET_STATUS_FILE}run mpiexec -n {plan.nodes} $place bash "$folder/{NODE_SCRIPT}" "$recipe"
{READ_STATUS_FILE}{again}
{END_LINES}"""


def session_script(plan: JobPlan) -> str:
    """What runs without a terminal on this machine, or on each host that ssh reaches."""
    start = f'run bash "$folder/{NODE_SCRIPT}" "$recipe"'
    return _without_scheduler(plan, "It starts the ranks of this node", _forward_signals(), start)


def mpi_script(plan: JobPlan, command: list[str]) -> str:
    """What runs without a terminal on this machine: mpiexec (`command`) starts every rank itself,
    and again if one is lost.
    """
    most = plan.options.max_restarts
    functions = f"""\
{_forward_signals(MPI_STOP_SIGNAL)}
start() {{
    for number_of_start in $(seq {most + 1}); do
        rm -f "$folder/{FIRST_STATUS_FILE}"
        run {shlex.join(command)} bash "$folder/{NODE_SCRIPT}" "$recipe"
        [ -s "$folder/{FIRST_STATUS_FILE}" ] && status=$(cat "$folder/{FIRST_STATUS_FILE}")
        case $status in {EXIT_PEER_LOST} | {KILLED_STATUSES}) ;; *) return ;; esac
        status=1
        [ $number_of_start -le {most} ] && echo "lmforge: all ranks are started again ($number_of_start of {most})" >&2
    done
}}
"""
    return _without_scheduler(plan, "mpiexec starts every rank", functions, "start")


def _without_scheduler(plan: JobPlan, what: str, functions: str, start: str) -> str:
    """A script that says `what` it does, defines functions of the shell, and starts the run by one
    line.
    """
    return f"""\
#!/bin/bash
# Written by lmforge {__version__} launch. {what} ({NODE_SCRIPT}).
folder={shlex.quote(str(plan.folder))}

{functions}
recipe={shlex.quote(str(plan.recipe))}
{start}
# The status of the first host counts: the launchers of all hosts end with the same one.
[ "${{{NODE_RANK_VARIABLE}:-0}}" = 0 ] && echo $status >"$folder/status"
exit $status
"""


def _rendezvous_lines(options: JobOptions, list_nodes: str) -> str:
    """Lines of a scheduler's script that set the nodes of the job and the address of the first,
    which takes a free port where none is given. `list_nodes` is a command that prints the nodes,
    one per line.
    """
    address = shlex.quote(options.address) if options.address else f"${{{NODES_VARIABLE}%%,*}}"
    return (
        f"export {NODES_VARIABLE}=$({list_nodes} | paste -sd,)\nexport"
        f" {ADDRESS_VARIABLE}={address}:{options.port or 0}"
    )


def _common_lines(plan: JobPlan) -> str:
    """Folder and recipe of the job, whose status is not known yet."""
    folder = shlex.quote(str(plan.folder))
    recipe = shlex.quote(str(plan.recipe))
    return f'folder={folder}\nrecipe={recipe}\nrm -f "$folder/status"'


def _hours(seconds: int) -> str:
    minutes, seconds = divmod(seconds, 60)
    return f"{minutes // 60:02d}:{minutes % 60:02d}:{seconds:02d}"
