"""Settings for every test."""

import os

# Tiny matrices gain nothing from threads, and two test machines' cores are soon oversubscribed.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
