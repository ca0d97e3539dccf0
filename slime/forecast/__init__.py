"""Forecasts of step times: rates of GPUs, a simulation of generation, a model of the trainer, and a
search over layouts."""
