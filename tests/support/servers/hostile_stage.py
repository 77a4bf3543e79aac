"""Run one stage against hostile endings: ``python -m tests.support.servers.hostile_stage NAME...``.

Printed is JSON: [{name: status}, growth of the peak memory in MiB, seconds].
"""

import json
import sys
import time

from ampacity.loadgen.plan import Limits
from tests.support.processes.command_lines import peak_mib
from tests.support.stage_driving import served_stage

TIMES = 3  # each ending


def main(names: list[str]) -> None:
    served_stage([0.0] * 10)  # what a good stage needs
    before_mib, began_s = peak_mib(), time.monotonic()
    faults = names * TIMES
    limits = Limits(total_s=6.0, idle_s=5.0)
    result, _ = served_stage([0.05 * i for i in range(len(faults))], faults, limits=limits)
    statuses = {faults[r.request_id]: r.status for r in result.records}
    print(json.dumps([statuses, peak_mib() - before_mib, time.monotonic() - began_s]))


if __name__ == "__main__":
    main(sys.argv[1:])
