"""A datastore on disk: earlier texts as tokens, with a suffix array by which what followed a run is found."""
