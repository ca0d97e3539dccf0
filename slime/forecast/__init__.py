"""How long a step takes, before it runs: the rates of a kind of GPU, a simulation of generation, a
model of the trainer, and a search over layouts."""
