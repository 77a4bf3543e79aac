"""What a stream in flight costs in memory: the slope of the generator's resident memory between two
loads.

    python -m benchmarks.load.stream_memory

The mock server (see README.md) sends a token every 100 ms, so that an answer of 128 lasts 12.85 s
and a rate of R requests/s has 12.85 R of them in flight. Prompts have 16 tokens.
"""

import tempfile
from pathlib import Path

from benchmarks.load.clients import ROOT, Load, ampacity
from benchmarks.load.meter import run_metered
from benchmarks.load.mock import mock_server
from benchmarks.options import parser

TTFT_S, ITL_S, OUTPUT_TOKENS = 0.05, 0.1, 128
ANSWER_S = TTFT_S + (OUTPUT_TOKENS - 1) * ITL_S + ITL_S


def resident_mb(rate_rps: float, duration_s: float) -> float:
    """Return the peak of resident memory of all the tool's processes under load, MB."""
    client, load = ampacity(), Load(rate_rps, duration_s, output_tokens=OUTPUT_TOKENS)
    with tempfile.TemporaryDirectory(prefix="ampacity-bench-") as directory:
        out = Path(directory) / "run"
        with mock_server(1, False, ttft_ms=TTFT_S * 1e3, itl_ms=ITL_S * 1e3) as mock:
            metered = run_metered(
                client.command(mock.url, load, out),
                core=0,
                ahead=False,
                cwd=ROOT,
                timeout_s=duration_s + 180,
            )
        if metered.returncode:
            raise SystemExit(metered.stderr.strip()[-300:])
        assert client.read is not None
        seen = client.read(out).seen
    arrivals_ns = [s.arrival_ns for name in seen for s in mock.served.get(name, [])]
    found = metered.resident_mb(min(arrivals_ns), max(arrivals_ns))
    assert found is not None
    return found


def main() -> None:
    given = parser(__doc__)
    given.add_argument("--rates", type=float, nargs=2, default=[20.0, 140.0], help="requests/s")
    given.add_argument("--duration", type=float, default=20.0, help="seconds")
    options = given.parse_args()
    low, high = sorted(options.rates)
    most = {rate: resident_mb(rate, options.duration) for rate in (low, high)}
    for rate, mb in most.items():
        print(f"{rate:g} requests/s, {rate * ANSWER_S:,.0f} in flight: {mb:.1f} MB")
    print(f"{(most[high] - most[low]) * 1e3 / ((high - low) * ANSWER_S):.1f} KB a stream (bar: 20)")


if __name__ == "__main__":
    main()
