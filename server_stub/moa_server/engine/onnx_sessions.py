"""Options of onnxruntime's sessions."""

from __future__ import annotations

import onnxruntime as ort

from moa_runtime.options import available_cpus


def session_options(threads: int | None) -> ort.SessionOptions:
    """Return options of one of many sessions of a process, each of which computes with ``threads`` threads, on all
    processors if None."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads or available_cpus()
    options.log_severity_level = 3
    # Each of the many sessions would keep the memory of its largest run.
    options.enable_cpu_mem_arena = options.enable_mem_pattern = False
    # Threads of other sessions wait meanwhile.
    options.add_session_config_entry("session.force_spinning_stop", "1")
    return options
