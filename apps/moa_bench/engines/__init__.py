"""Whether another engine writes the text that the transformers engine writes."""
