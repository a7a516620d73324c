"""``moa-chat --serve``: an OpenAI-compatible endpoint on this machine, answered by the device and the verifier."""
