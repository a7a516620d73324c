"""Keep what ``moa-export`` proved of a shipped drafter's bundle beside its weights: ``keep_proof.py BUNDLE``."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from moa_drafter.config import drafter_fingerprint
from moa_drafter.pretrained import shipped_checkpoint
from moa_export.built_bundle import PROOF_FILE, proof_of
from moa_runtime.bundle import Bundle


def main() -> int:
    """Return 0, or 1 if the bundle is of another drafter, or failed a check or had none."""
    manifest = Bundle.open(Path(sys.argv[1])).manifest
    checkpoint = shipped_checkpoint(manifest.architecture)
    proof = proof_of(manifest)
    statuses = {check["status"] for graph in proof["graphs"].values() for check in graph["checks"].values()}
    if manifest.fingerprints.drafter != drafter_fingerprint(checkpoint) or statuses != {"passed"}:
        print(f"keep_proof: {sys.argv[1]} is no proven bundle of the shipped drafter", file=sys.stderr)
        return 1
    (checkpoint / PROOF_FILE).write_text(json.dumps(proof, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
