"""Find why trainer and engine give different log-probs to the same tokens (`slime align`).

evidence.py      the samples under comparison, with both sides' log-probs of each token
dumps.py         reads the evidence from a run's dumps
reference.py     a third computation: the model in float32, with parts that can be changed
sight.py         how the reference computes image features and positions
case.py          the difference under examination, and what a cause is
outside.py       causes outside the model: tokens, context, temperature, filters
inside.py        causes inside the model: positions, quantisation, experts, precision
vision.py        causes in images: positions, tower and projector, preparation
held.py          causes in the engine: its weights, and its answers to repeated requests
engines.py       engines that still answer requests
trainer_here.py  the trainer's model in this process
layers.py        compares the hidden states of both sides part by part
examine.py       measures and ranks all causes, and formats the result
prepare.py       from a run's flags to an examination
"""
