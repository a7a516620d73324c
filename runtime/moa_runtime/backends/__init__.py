"""Engines that run the device half of the drafter."""
