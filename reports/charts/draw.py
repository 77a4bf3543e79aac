"""Draw Vega-Lite specs, read as a JSON list from stdin, as a JSON list of SVG documents on stdout.

``svg.draw`` runs this file as a process of its own.
"""

from __future__ import annotations

import json
import sys

import vl_convert

if __name__ == "__main__":
    json.dump([vl_convert.vegalite_to_svg(spec) for spec in json.load(sys.stdin)], sys.stdout)
