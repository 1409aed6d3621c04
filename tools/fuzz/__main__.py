"""``python -m tools.fuzz --inputs 2000000``: fuzzes on all cores, prints the seed, and writes a report in JSON."""

from __future__ import annotations

import argparse
import json
import os
import platform
import secrets
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path

from tools.fuzz.campaign import Found, run


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.fuzz", description=__doc__)
    parser.add_argument("--inputs", type=int, default=2_000_000)
    parser.add_argument("--shards", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--seed", default=secrets.token_hex(4))
    parser.add_argument("--json", type=Path, help="where the report goes")
    parser.add_argument("--shard", type=int, help=argparse.SUPPRESS)
    parsed = parser.parse_args()
    if parsed.shard is not None:
        print(json.dumps(asdict(run(parsed.inputs, f"{parsed.seed}/{parsed.shard}"))))
        return 0
    print(f"seed {parsed.seed}", flush=True)
    began, found = time.time(), Found()
    command = [sys.executable, "-m", "tools.fuzz", "--seed", parsed.seed]
    share = -(-parsed.inputs // parsed.shards)
    shards = [
        subprocess.Popen([*command, "--inputs", str(share), "--shard", str(i)], stdout=subprocess.PIPE, text=True)
        for i in range(parsed.shards)
    ]
    for shard in shards:
        out, _ = shard.communicate()
        if shard.returncode:
            found.crashes.append({"target": "?", "input": "", "trace": f"a shard ended with {shard.returncode}"})
        else:
            found.add(Found(**json.loads(out)))
    report = {
        "date": time.strftime("%F %T", time.gmtime(began)),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}",
        "seed": parsed.seed,
        "shards": parsed.shards,
        **asdict(found),
    }
    if parsed.json:
        parsed.json.write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps({**report, "crashes": len(found.crashes)}, indent=1))
    for crash in found.crashes[:5]:
        print(f"{crash['target']}: {crash['input'][:200]}\n{crash['trace']}", file=sys.stderr)
    return 1 if found.crashes else 0


if __name__ == "__main__":
    sys.exit(main())
