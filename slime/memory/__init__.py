"""Plan the memory of a run from the flags and the model's config.json, before anything starts.

    Config + ModelSpec ─► parameters ─┬─► trainer (weights, gradients, optimizer, activations) ─┐
                                      └─► engine (weights, KV cache) ───────────────────────────┤
                                                                           plan ─► table ◄──────┘

Imports no torch and no Ray. Sizes are in bytes; 1 GB is 10⁹ bytes.
"""
