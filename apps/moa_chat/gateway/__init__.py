"""``moa-chat --serve``: an OpenAI-compatible endpoint on this machine, behind it the device and the verifier."""
