"""What the device does next (no I/O, threads or clock): the loop, the draft policy, costs and timeouts."""
