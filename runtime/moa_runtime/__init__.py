"""The on-device runtime of moa-edge: everything that ships to a device, without torch."""
