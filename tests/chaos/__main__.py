"""The command: lanes that each run one life after another on a separate small disk, and the total
figures.
"""

import argparse
import json
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

IN_A_NAMESPACE = "LMFORGE_CHAOS_MAY_MOUNT"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description="Random faults over runs, and what they cost.")
    parser.add_argument("--faults", type=int, default=200, help="so many, at least")
    parser.add_argument("--seed", type=int, default=None, help="repeats a plan (default: a fresh one, printed)")
    parser.add_argument("--minutes", type=float, default=None, help="begin no further fault after so long")
    parser.add_argument("--kind", action="append", help="only faults of this kind (more than once: of these)")
    parser.add_argument("--lanes", type=int, default=2, help="lives at a time")
    parser.add_argument("--output", type=Path, default=None, help="file for the figures, as JSON")
    chosen = parser.parse_args()
    if IN_A_NAMESPACE not in os.environ:
        os.environ["OMP_NUM_THREADS"] = "1"
        # With mounts of its own, where that is allowed: a disk that fills is a real one.
        may = (
            subprocess.run(["unshare", "-rm", "true"], capture_output=True).returncode == 0
            if shutil.which("unshare")
            else False
        )
        os.environ[IN_A_NAMESPACE] = "yes" if may else "no"
        command = [sys.executable, "-m", "tests.chaos", *sys.argv[1:]]
        os.execvp("unshare" if may else command[0], ["unshare", "-rm", *command] if may else command)
    seed = chosen.seed if chosen.seed is not None else secrets.randbits(32)
    print(f"seed {seed}", flush=True)
    from tests.chaos import plan
    from tests.chaos.lanes import lead_lanes, report

    if chosen.kind:
        plan.KINDS = {kind: plan.KINDS[kind] for kind in chosen.kind}
    with tempfile.TemporaryDirectory(prefix="chaos-", ignore_cleanup_errors=True) as folder:
        began = time.monotonic()
        until = began + 60 * chosen.minutes if chosen.minutes else float("inf")
        figures = lead_lanes(Path(folder), seed, chosen.faults, chosen.lanes, until, os.environ[IN_A_NAMESPACE] == "yes")
        result = report(figures, seed, time.monotonic() - began)
    if chosen.output:
        chosen.output.write_text(json.dumps(result, indent=1) + "\n")
    return 1 if figures.findings else 0


if __name__ == "__main__":
    sys.exit(main())
