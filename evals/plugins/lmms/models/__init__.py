"""What lmms-eval reads: a model's name, which is its module's too, and its class."""

AVAILABLE_MODELS = {"kvpatch": "KVPatch"}
