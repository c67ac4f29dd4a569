"""`python -m bench` runs every benchmark, `python -m bench NAME...` those named; `--list` names them.

A benchmark is a module `bench/bench_NAME.py` with a docstring and a function `main(out: Path) -> None`, which
prints its table and writes `out / "NAME.json"`.
"""

import argparse
import importlib
import sys
from pathlib import Path

HERE = Path(__file__).parent
OUT = HERE / "out"


def main() -> int:
    """Run the chosen benchmarks one after another."""
    known = [file.stem.removeprefix("bench_") for file in sorted(HERE.glob("bench_*.py"))]
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"one of: {', '.join(known) or 'none yet'}")
    parser.add_argument("--list", action="store_true", help="name the benchmarks and stop")
    chosen = parser.parse_args()
    unknown = [name for name in chosen.names if name not in known]
    if unknown:
        parser.error(f"no such benchmark: {', '.join(unknown)}; there are: {', '.join(known) or 'none'}")
    if chosen.list:
        print("\n".join(known))
        return 0
    OUT.mkdir(exist_ok=True)
    for name in chosen.names or known:
        benchmark = importlib.import_module(f"bench.bench_{name}")
        print(f"== {name}: {(benchmark.__doc__ or '').strip().splitlines()[0]}", flush=True)
        benchmark.main(OUT)
    return 0


if __name__ == "__main__":
    sys.exit(main())
