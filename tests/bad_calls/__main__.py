"""Print what comes of bad calls, by callable: ``python -m tests.bad_calls [part of a name ...]``."""

import argparse
import collections
import json
import os
import tempfile
import time

os.environ.setdefault("JAX_PLATFORMS", "cpu")

from tests.bad_calls.outcomes import ACCEPTED, CLEAR, DEEP, OWN, SLOW, UNNAMED, WRONG
from tests.bad_calls.sweep import cases, swept

SORTS = (CLEAR, ACCEPTED, OWN, UNNAMED, DEEP, WRONG, SLOW)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="only callables with one of these in their name")
    parser.add_argument("--json", help="write every call that ended badly to this file")
    parser.add_argument("--sample", type=int, help="so many calls at random instead of all")
    parser.add_argument("--show", type=int, default=0, help="examples of each bad sort to print")
    args = parser.parse_args()
    os.chdir(tempfile.mkdtemp())  # what is taken for a path is written here
    tables: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    bad: dict[str, list[tuple[str, ...]]] = collections.defaultdict(list)
    spent: dict[str, float] = collections.defaultdict(float)
    for name, argument, label, result, seconds in swept(cases(args.names, args.sample)):
        tables[name][result.sort] += 1
        spent[name] += seconds
        if result.sort in (UNNAMED, DEEP, WRONG, SLOW):
            bad[result.sort].append((name, argument, label, result.detail))
    width = max(map(len, tables), default=0)
    print(f"{'':{width}} {' '.join(f'{sort:>16}' for sort in SORTS)} {'seconds':>8}")
    for name, counts in tables.items():
        print(f"{name:{width}} {' '.join(f'{counts[sort]:16d}' for sort in SORTS)} {spent[name]:8.1f}")
    total: collections.Counter[str] = sum(tables.values(), collections.Counter())
    print(f"{'all':{width}} {' '.join(f'{total[sort]:16d}' for sort in SORTS)} {sum(spent.values()):8.1f}")
    count = sum(total.values())
    print(
        f"{count} calls, {sum(total[s] for s in (CLEAR, ACCEPTED, OWN)) / max(count, 1):.2%} clear or rightly accepted"
    )
    for sort, found in bad.items():
        for case in found[: args.show]:
            print(sort, *case, sep=" | ")
    if args.json:
        with open(args.json, "w") as file:
            json.dump(bad, file, indent=1)


if __name__ == "__main__":
    start = time.perf_counter()
    main()
    print(f"{time.perf_counter() - start:.0f} s")
