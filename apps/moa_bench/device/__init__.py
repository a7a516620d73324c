"""What drafting costs the device."""
