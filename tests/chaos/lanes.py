"""Several lives at a time, each lane a process with its own disk; and their figures as a table."""

import json
import os
import subprocess
import sys
import time
import traceback
from pathlib import Path

# Imported once, for all ranks that are forked from here.
import lmforge.core.parallel.ddp
import lmforge.core.parallel.fsdp1
import lmforge.core.parallel.fsdp2
import lmforge.core.run  # noqa: F401
from lmforge.core.records.runs import describe_environment
from lmforge.text.prepare.prepare import prepare
from tests.chaos import plan
from tests.chaos.life import Figures, Life
from tests.chaos.processes import in_a_child
from tests.support.text import write_documents

DISK_BYTES = 48 * 2**20


def lead_lanes(
    folder: Path, seed: int, faults: int, lanes: int, until: float, may_mount: bool
) -> Figures:
    """Run lives in this many lanes until they have had this many faults together, or until the time
    `until` (time.monotonic).
    """
    in_a_child(_prepare, str(folder))
    children = {}
    for lane in range(lanes):
        child = os.fork()
        if child == 0:
            status = 1
            try:
                quota = faults // lanes + (lane < faults % lanes)
                figures = _lead_lane(folder, seed, quota, lane, lanes, until, may_mount)
                (folder / f"lane-{lane}.json").write_text(json.dumps(vars(figures)))
                status = 0
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                os._exit(status)
        children[lane] = child
    total = Figures()
    failed = [lane for lane, child in children.items() if os.waitpid(child, 0)[1]]
    if failed:
        raise RuntimeError(f"lanes {failed} failed")
    for lane in children:
        result = json.loads((folder / f"lane-{lane}.json").read_text())
        result["faults"], result["moments"] = (
            type(total.faults)(result[name]) for name in ("faults", "moments")
        )
        total.add(Figures(**result))
    return total


def _lead_lane(
    folder: Path, seed: int, quota: int, lane: int, lanes: int, until: float, may_mount: bool
) -> Figures:
    disk = folder / f"lane-{lane}"
    disk.mkdir()
    if may_mount:
        subprocess.run(
            ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "chaos", str(disk)], check=True
        )
    figures, number = Figures(), lane
    try:
        while figures.faults.total() < quota and time.monotonic() < until:
            met = figures.faults.total()
            life = Life(
                folder / "tokens",
                disk,
                folder / "references",
                seed,
                number,
                disk if may_mount else None,
            )
            figures.add(
                life.lead(
                    lambda so_far, met=met: (
                        met + so_far.faults.total() < quota and time.monotonic() < until
                    )
                )
            )
            print(
                f"life {number}: {figures.faults.total()} of {quota} faults,"
                f" {len(figures.findings)} findings",
                flush=True,
            )
            number += lanes
    finally:
        if may_mount:
            subprocess.run(["umount", "--lazy", str(disk)], check=True)
    return figures


def _prepare(folder: str) -> None:
    text = Path(folder) / "text"
    write_documents(text)
    prepare(str(text), Path(folder) / "tokens", vocab_size=512, validation_ratio=0.1, workers=1)


def report(figures: Figures, seed: int, seconds: float) -> dict[str, object]:
    """Print the figures, and return them with what they were measured on."""
    counts = {
        name: value
        for name, value in vars(figures).items()
        if name not in ("faults", "moments", "findings")
    }
    rows = {
        "faults": figures.faults.total(),
        **dict(figures.faults.most_common()),
        **counts,
        "seconds": round(seconds),
    }
    width = max(map(len, rows))
    print("\n".join(f"{name.replace('_', ' '):<{width}}  {value}" for name, value in rows.items()))
    for result in figures.findings:
        print(f"\nFOUND {result['what']}\n  {result['where']}\n{result['said']}")
    return {
        "benchmark": "chaos",
        "machine": describe_environment(),
        "seed": seed,
        "seconds": round(seconds),
        "kinds": list(plan.KINDS),
        "faults": figures.faults.total(),
        "by_kind": dict(figures.faults.most_common()),
        "by_moment": dict(figures.moments.most_common()),
        **counts,
        "findings": figures.findings,
    }
