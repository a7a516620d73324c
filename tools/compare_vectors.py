"""Prove that two commits have the same recorded frames and snapshots: ``python tools/compare_vectors.py OLD [NEW]``.

Every frame of the traces in ``tests/vectors/data/session`` and ``loop`` is serialised by the wire code of its own
commit. The traces of both commits must contain the same bytes in the same order, whatever the traces, calls and states
are called. The snapshots that the traces save and restore must be the same JSON. The exit status is 1 if they differ.
"""

from __future__ import annotations

import argparse
import collections
import hashlib
import io
import json
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
WIRE, DATA = "runtime/moa_runtime/wire", "tests/vectors/data"

#: Runs in an interpreter of its own: two versions of one Protocol Buffers package cannot live in one process.
_READ = f"""
import base64, gzip, json, sys
from pathlib import Path
root = Path(sys.argv[1])
sys.path.insert(0, str(root / "runtime/moa_runtime/wire"))
from google.protobuf.json_format import ParseDict
from moa.v1 import session_pb2 as wire

def frame_bytes(said, kind):
    if set(said) == {{"bytes"}}:
        return base64.b64decode(said["bytes"])
    return ParseDict(said, kind()).SerializeToString(deterministic=True)

def frames(step):
    args = step.get("args", {{}})
    for name in ("data", "frame"):
        if isinstance(args.get(name), dict):
            yield "down", frame_bytes(args[name], wire.ServerMessage).hex()
    for frame in step.get("frames", ()):
        yield "up", frame_bytes(frame, wire.ClientMessage).hex()

for path in sorted((root / "{DATA}").glob("*/*.jsonl.gz")):
    if path.parent.name not in ("session", "loop"):
        continue
    for line in gzip.decompress(path.read_bytes()).decode().splitlines():
        trace = json.loads(line)
        snapshots = [step.get("returns") for step in trace["steps"] if step.get("call") == "snapshot"]
        snapshots += [step["args"]["snapshot"] for step in trace["steps"] if step.get("call") == "restore"]
        sent = [frame for step in trace["steps"] for frame in frames(step)]
        print(json.dumps([trace["name"], sent, snapshots], sort_keys=True))
"""


class Recording:
    """The frames and snapshots of the traces at one commit.

    Raises:
        SystemExit: the commit is unknown, or has no vectors.
    """

    def __init__(self, commit: str) -> None:
        archive = subprocess.run(["git", "archive", commit, WIRE, DATA], cwd=ROOT, capture_output=True, check=False)
        if archive.returncode:
            sys.exit(f"{commit}: {archive.stderr.decode().strip()}")
        with tempfile.TemporaryDirectory() as folder:
            with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as tar:
                tar.extractall(folder, filter="data")
            read = subprocess.run([sys.executable, "-c", _READ, folder], capture_output=True, text=True, check=False)
        if read.returncode or not read.stdout:
            sys.exit(f"{commit}: the vectors cannot be read: {read.stderr.strip() or 'there are none'}")
        #: Number of traces with the same frames and snapshots, by digest; and the name of one of them.
        self.traces: collections.Counter[str] = collections.Counter()
        self.names: dict[str, str] = {}
        self.frames = self.bytes = self.snapshots = 0
        for line in read.stdout.splitlines():
            name, frames, snapshots = json.loads(line)
            content = hashlib.sha256(json.dumps([frames, snapshots], sort_keys=True).encode()).hexdigest()
            self.traces[content] += 1
            self.names.setdefault(content, name)
            self.frames += len(frames)
            self.bytes += sum(len(data) // 2 for _, data in frames)
            self.snapshots += len(snapshots)

    def __str__(self) -> str:
        count = sum(self.traces.values())
        return f"{count} traces, {self.frames} frames of {self.bytes} bytes, {self.snapshots} snapshots"


def main() -> None:
    parser = argparse.ArgumentParser(description="compare the recorded frames and snapshots of two commits")
    parser.add_argument("old", help="a commit, such as 9bb5272")
    parser.add_argument("new", nargs="?", default="HEAD", help="a commit; HEAD by default")
    options = parser.parse_args()
    old, new = Recording(options.old), Recording(options.new)
    print(f"{options.old}: {old}\n{options.new}: {new}")
    for title, missing in ((f"only in {options.old}", old.traces - new.traces), ("new", new.traces - old.traces)):
        for content in missing:
            print(f"{title}: {(old if content in old.names else new).names[content]}")
    if old.traces != new.traces:
        sys.exit("the recorded frames or snapshots differ")
    print("every recorded frame and snapshot is the same")


if __name__ == "__main__":
    main()
