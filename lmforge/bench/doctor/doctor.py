"""`lmforge doctor`: checks, before a run starts, whether this machine or all ranks of a launcher have what it needs.

With `--parity` it compares the strategies instead: see `parity_table.py`. Checks of one machine are in `machine_checks.py`,
checks of all ranks together in `examine_ranks.py`.
"""

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict

from lmforge.bench.doctor.finding import Finding
from lmforge.bench.doctor.machine_checks import examine_machine
from lmforge.cluster.rank_info import read_rank_info
from lmforge.config.load import read_config
from lmforge.config.verbs.examine import DoctorOptions
from lmforge.errors import RunFailed, name_some


def doctor(options: DoctorOptions) -> int:
    """Examine the ranks of this process group, and print the findings on rank 0; or compare the strategies. Returns 1 on all
    ranks where a required check fails. Raises UserError for a recipe that cannot be read, and RunFailed on a rank that cannot
    reach rank 0.
    """
    if options.parity:
        from lmforge.bench.parity_table import check_parity

        return check_parity(options)
    info = read_rank_info()
    config = read_config(options.recipe) if options.recipe is not None else None
    findings = list(examine_machine(options.device)) if info.local_rank == 0 else []
    if any(finding.name == "torch" and finding.status == "fail" for finding in findings):
        _print_findings(findings, options.output)
        return 1
    from lmforge.bench.doctor.examine_ranks import Examination  # with torch

    try:
        examination = Examination(info, config, options.device, options.timeout_seconds, findings)
        return examination.examine(lambda judged: _print_findings(judged, options.output))
    except RunFailed as problem:
        if info.is_rank0:
            raise
        print(f"lmforge: {problem}", file=sys.stderr, flush=True)  # rank 0 does not know it
        return 1


def _print_findings(findings: Sequence[Finding], output: str) -> None:
    failed = [finding for finding in findings if finding.status == "fail"]
    if output == "json":
        print(json.dumps([asdict(finding) for finding in findings], indent=1), flush=True)
        return
    width = max(len(finding.name) for finding in findings)
    for finding in findings:
        where = f"{name_some(finding.where)}: " if finding.where else ""
        todo = f"; {finding.todo}" if finding.todo else ""
        print(f"{finding.status}  {finding.name:<{width}}  {where}{finding.description}{todo}")
    warned = sum(finding.status == "warn" for finding in findings)
    verdict = f"{len(failed)} of {len(findings)} fail: lmforge cannot train here" if failed else "lmforge can train here"
    print(f"{verdict}{f'; {warned} to look at' if warned else ''}", flush=True)
