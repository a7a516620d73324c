"""What is there when the link returns that was lost in the middle of an answer."""
