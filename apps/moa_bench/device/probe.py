"""``python -m moa_bench.device.probe``: measures one target in a process that holds nothing else.

One request comes in as JSON on stdin; parts of the target's result leave as lines of JSON on stdout. A
target that cannot run here is the part ``{"not_run": reason}``. See :func:`moa_bench.device.measure.run_probe`.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from moa_runtime.errors import MoaError


def main() -> int:
    # Engines may print; stdout is kept for the result.
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as out:
        os.dup2(2, 1)

        def emit(part: dict[str, Any]) -> None:
            print(json.dumps(part), file=out, flush=True)

        request = json.load(sys.stdin)
        try:
            _work(request.pop("work"))(**request, emit=emit)
        except MoaError as error:
            emit({"not_run": str(error)})
    return 0


def _work(name: str) -> Any:
    """The function of a request; imported late, so that neither kind's imports count as the other's memory."""
    if name == "steps":
        from moa_bench.device.steps import measure_steps

        return measure_steps
    from moa_bench.device.answers import measure_answers

    return measure_answers


if __name__ == "__main__":
    sys.exit(main())
