"""Draw Vega-Lite specs: ``{"specs", "runtime"}`` on stdin, ``{"svg", "runtime"}`` on stdout.

``svg.draw`` runs this file as a process of its own. ``runtime``, where asked for, is the JavaScript
with which a page draws such specs itself (window.vegaEmbed).
"""

import json
import os
import sys
from contextlib import suppress

import vl_convert

EXPORT = "window.vegaEmbed = vegaEmbed;"

if __name__ == "__main__":
    with suppress(AttributeError, OSError):  # the engine's threads wait for each other by spinning
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
    asked = json.load(sys.stdin)
    done = {"svg": [vl_convert.vegalite_to_svg(spec) for spec in asked["specs"]]}
    json.dump(
        done | {"runtime": asked["runtime"] and vl_convert.javascript_bundle(EXPORT)}, sys.stdout
    )
