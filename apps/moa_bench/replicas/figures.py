"""From what the sessions noted to figures."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from moa_bench.replicas.measure import Results
from moa_bench.replicas.session import Resume
from moa_bench.result import rounded


def figures_of(results: Results) -> dict[str, Any]:
    """``events``: what each cost, see the benchmark's --help; ``other_resumes``: of connections lost before them."""
    resumes = [resume for session in results.sessions for resume in session.resumes]
    answers = [answer for session in results.sessions for answer in session.answers]
    ends = [event.at for event in results.events] + [math.inf]
    events = [
        {
            "event": event.name,
            "replica_s": rounded(event.seconds, 2),
            **_resume_figures([resume for resume in resumes if begun <= resume.lost_at < end]),
        }
        for event, (begun, end) in zip(results.events, pairwise(ends), strict=True)
    ]
    return {
        "answers": len(answers),
        "tokens": sum(len(answer.tokens) for answer in answers),
        "compared": results.compared,
        "different": len(results.different),
        "events": events,
        "other_resumes": sum(resume.lost_at < ends[0] for resume in resumes),
    }


def _resume_figures(resumes: Sequence[Resume]) -> dict[str, Any]:
    seconds = [resume.seconds for resume in resumes]
    return {
        "resumes": len(resumes),
        "s_to_go_on": {
            "median": rounded(float(np.percentile(seconds, 50)), 2) if seconds else None,
            "p95": rounded(float(np.percentile(seconds, 95)), 2) if seconds else None,
            "max": rounded(max(seconds), 2) if seconds else None,
        },
    }
