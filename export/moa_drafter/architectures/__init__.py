"""Other drafters, trained on the same data by the same pipeline, so that comparisons with them are fair."""
