"""What the device writes when the network dies, and how much of it the target keeps."""
